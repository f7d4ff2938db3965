"""Templates render as in transformers, and can't do more than render."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from enginewright.plugins.shared.errors import BundleError, RequestError
from enginewright.runtime.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": '<b>é & "x"</b>'}]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "pad_token": None, "add_bos": True}).render(messages, **variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", '<s><b>é & "x"</b>'),
        ("{{ messages[0]['content'] | tojson }}", '"<b>é & \\"x\\"</b>"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # trim_blocks and lstrip_blocks
        ("{% generation %}yes{% endgeneration %}", "yes"),
        ("{{ tools is none }}{{ pad_token is defined }}", "TrueFalse"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = 2 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)
def test_rendering(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables() -> None:
    source = "{{ tools[0].name }} {{ enable_thinking }}{% if add_generation_prompt %}go{% endif %}"
    rendered = render(source, tools=[{"name": "f"}], enable_thinking=False, add_generation_prompt=False)
    assert rendered == "f False"


def test_the_date() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    assert before <= render("{{ strftime_now('%Y-%m-%d') }}") <= datetime.now().strftime("%Y-%m-%d")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('system role not supported') }}",
        "{{ messages[5].content }}",
        "{{ 'a' + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ none_such() }}",
        "{{ 1 // 0 }}",
        "{{ 'abc'.index('x') }}",
    ],
)
def test_a_template_that_refuses(source: str) -> None:
    with pytest.raises(RequestError, match="chat: the model's template refuses"):
        render(source)


def test_a_template_that_is_none() -> None:
    with pytest.raises(BundleError, match=r"chat_template\.jinja: line 2: "):
        ChatTemplate("ok\n{% if %}", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "weather"}, "tools must be a list"),
        ({"tools": [5]}, "neither a JSON schema nor a function"),
        ({"documents": {"text": "x"}}, "documents must be a list"),
        ({"documents": ["x"]}, "documents must be a list of dicts"),
        ({"thing": {1, 2}}, "not plain data: {1, 2} is a set"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both set"),
        ({"continue_final_message": "thinking"}, "no text in 'thinking'"),
        ({"continue_final_message": "role"}, "doesn't read 'role'"),
        ({"continue_final_message": True}, "leaves the last message out"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    source = "{{ tools }}{{ documents }}{% if false %}{{ messages[0].content }}{% endif %}"
    with pytest.raises(RequestError, match=message):
        render(source, **options)


def test_data_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RequestError, match="contains itself"):
        render("x", thing=loop)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ([{"content": "x"}], "message 0 has no role"),
        (["hi"], "message 0 has no role"),
        ([{"role": "user", "content": object()}], "not plain data"),
    ],
)
def test_wrong_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("x", messages)
