"""Templates render as in transformers, and can't do more than render."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from enginewright.runtime.shared.errors import BundleError, RequestError
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


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = """\
{%- for m in messages %}{{ m['role'] ~ ':' }}{% if m['content'] is string %}{{ m['content'] }}{% else -%}
{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}"""


def checked(source: str, messages: Any = USER, **variables: Any) -> str:
    """Renders as ``LLM.chat`` does."""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(template.checked(messages, variables, ("temperature",)), **variables)


def test_openai_s_parts_of_text() -> None:
    """A template that takes texts alone gets one, and one that goes through parts gets them."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]}]
    assert checked(CHATML, parts) == "<user>a\nb\nc"
    # It shows parts in another way than text, so that one text is what it is to be given.
    assert checked(PARTS, parts) == "user:a\nb\nc"
    assert checked(PARTS.replace("[{{ part['text'] }}]", "{{ part['text'] }}"), parts) == "user:abc"
    assert checked(CHATML, [{"role": "user", "content": []}]) == "<user>"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:,"}},
            "message 1: part 0 of its content is of type 'image_url'",
        ),
        ({"type": "input_audio", "input_audio": {}}, "is of type 'input_audio'; models take text alone"),
        ({"type": "text"}, "part 0 of its content has no text"),
        ({"type": "text", "text": 5}, "has no text"),
        ({}, "is of type None"),
        (5, "has no text"),
        (None, "has no text"),
    ],
)
def test_parts_that_are_no_text(part: Any, said: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}]
    with pytest.raises(RequestError, match=said):
        checked(CHATML, messages)


READS = "{% if mood == 'x' or tools or messages[0].tool_calls %}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("source", "messages", "variables", "said"),
    [
        (CHATML, USER, {"tools": [{"name": "f"}]}, "tools: the model's template doesn't read them"),
        (CHATML, USER, {"documents": [{"text": "a"}]}, "documents: the model's template doesn't read them"),
        (
            READS,
            USER,
            {"mod": 1},
            r"mod: the model's template has no such variable .*\n  Did you mean mood\? It reads .*mood",
        ),
        (READS, USER, {"temperature": 1}, r"temperature: .*\n  Pass SamplingParams\(temperature=\.\.\.\)"),
        (
            CHATML,
            [{"role": "users", "content": "a"}],
            {},
            r"the role 'users'.*\n  Did you mean user\? It knows assistant, system, user",
        ),
        (CHATML, [{"role": "tool", "content": "a"}], {}, "the role 'tool', which the model's template doesn't know"),
        (CHATML, [{"role": "assistant", "tool_calls": [{"id": "a"}]}], {}, "doesn't read its tool_calls"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            [{"role": "system", "content": "a"}, *USER],
            {},
            "message 0: the model's template leaves system messages out",
        ),
    ],
)
def test_nothing_is_left_out_without_a_word(source: str, messages: Any, variables: Any, said: str) -> None:
    assert render(source, messages, **variables)  # transformers' way says nothing
    with pytest.raises(RequestError, match=f"^chat: .*{said}"):
        checked(source, messages, **variables)


def test_what_a_template_reads_is_taken() -> None:
    assert checked(READS, mood="x", tools=[{"name": "f"}]) == '<user><b>é & "x"</b>'
    assert checked(CHATML, tools=[], documents=None, mood=None) == '<user><b>é & "x"</b>'
    roles = "{% if messages[0].role in ['tool', 'ipython'] or {'observer': 1}[messages[0].role] %}{% endif %}" + CHATML
    for role in ("tool", "ipython", "observer", "user"):
        assert checked(roles, [{"role": role, "content": "a"}]) == f"<{role}>a"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    with pytest.raises(RequestError, match=r"refuses these messages .*: no system"):
        checked(refuses, [{"role": "system", "content": "a"}])


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert checked(CHATML, messages) == "<system>a<user>b"
    knows = "{% if messages[0].role == 'developer' %}{% endif %}" + CHATML
    assert checked(knows, messages) == "<developer>a<user>b"
    leaves_out = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(RequestError, match="leaves system messages out"):
        checked(leaves_out, messages)
