"""Templates in the manner of many families: text and tokens are those of transformers' apply_chat_template."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import get_json_schema

from enginewright.optimizer.capture.tokenizer import tokenizer_files
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.chat_template import ChatTemplate
from enginewright.runtime.text.tokenizer import Tokenizer
from enginewright.runtime.text.tool_schema import tool_schema

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
THEIR_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


def weather(place: str, days: int = 3, unit: Unit = Unit.CELSIUS) -> dict[str, float]:
    """Looks the weather up.

    Args:
        place: The town, e.g. "São Paulo"
            or a <region>.
        days: How many days (choices: [1, 3, 7])
        unit: Of temperatures.

    Returns:
        Temperatures by day.
    """
    return {f"{place}{days}{unit}": 0.0}


def search(words: list[str], options: dict[str, int] | None, how: Literal["any", 2], at: int | str = 1) -> Any:
    """Searches
    for words.

    Args:
        words: What to find.
        options: Limits.
        how: Any or two.
        at: Where.
    """
    return words, options, how, at


def nothing() -> None:
    """Does nothing."""


class Box:
    def open(self, pair: tuple[int, str], many: tuple, more: list[dict[str, bool]] | int) -> None:  # type: ignore[type-arg]
        """Opens it.

        Args:
            pair: Two.
            many: Some.
            more: Others.
        """


TOOLS: list[Any] = [weather, get_json_schema(search), nothing]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich <b>&"}}}
TWO = [CALL, CALL | {"id": "123456789"}]
RESULT = {"role": "tool", "name": "weather", "content": '{"a": 21.5}', "tool_call_id": "abcdefghi"}
SYSTEM = {"role": "system", "content": "Be brief. 'x' & \"y\" <z>"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "single": [user("  Hello,  world!\n")],
    "system": [SYSTEM, user("Hi")],
    "turns": [user("é 😀"), assistant(" Fine. "), user("{{ 1 + 1 }}{% raw %}"), assistant("2"), user("<|im_end|> so?")],
    "answered": [SYSTEM, user("Count."), assistant("One, two,  ")],
    "called": [user("Weather?"), assistant(None, tool_calls=[CALL]), RESULT],
    "results": [
        SYSTEM,
        user("W?"),
        assistant("I look.", tool_calls=TWO),
        RESULT,
        RESULT,
        assistant("21.5"),
        user("Ok"),
    ],
    "thoughts": [
        user("2+2?"),
        assistant("<think>\nhm\n</think>\n\n4"),
        user("sure?"),
        assistant("<think>x</think>Yes"),
    ],
    "reasoning": [user("2+2?"), assistant("4", reasoning="It is four."), user("?"), assistant("4", thinking="Again.")],
    "nulls": [user("a"), {**assistant("b", tool_calls=None), "reasoning_content": None}],
    "no think": [{"role": "system", "content": "Short. /no_think"}, user("Hi")],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " What? "}, {"type": "image"}]}],
    "two users": [user("a"), user("b")],
    "assistant first": [assistant("a"), user("b")],
    "developer": [{"role": "developer", "content": "Do."}, user("b")],
    "no content": [{"role": "user"}],
    "numbers": [{"role": "user", "content": 5}],
    "mapping": [user("a"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": {"t": [1, None, True]}}],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompted": {"add_generation_prompt": True},
    "continued": {"continue_final_message": True},
    "thinking continued": {"continue_final_message": "reasoning_content"},
    "tools": {"tools": TOOLS, "add_generation_prompt": True},
    "no tools": {"tools": []},
    "documents": {"documents": [{"title": "Ä", "text": "One\n"}, {"title": "B", "text": "Two"}]},
    "all": {"tools": TOOLS[:1], "documents": [{"text": "D"}], "controls": {"citations": 1}},
    "not thinking": {"enable_thinking": False, "thinking": True, "add_generation_prompt": True},
    "variables": {"date_string": "1 Jan", "reasoning_effort": "high", "model_identity": "I am.", "bos_token": "[B]"},
}
ADDED = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>", "<|eot_id|>", "<think>")


def fast_tokenizer(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    """Single bytes and some special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(ADDED[:-1]))
    backend.add_tokens([ADDED[-1]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template, image_token="<img>"
    )


def refusal_or(errors: Any, render: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return render(*args, **options)
    except errors:
        return "refused"


@pytest.mark.parametrize("family", TEMPLATES)
def test_families(family: str) -> None:
    theirs = fast_tokenizer((FOLDER / f"{family}.jinja").read_text(encoding="utf-8"))
    ours = Tokenizer(tokenizer_files(theirs))
    rendered: dict[tuple[str, str], str] = {}
    for (name, messages), (how, options) in itertools.product(CONVERSATIONS.items(), OPTIONS.items()):
        options_of = {"add_generation_prompt": False, **options}
        expected = refusal_or(THEIR_ERRORS, theirs.apply_chat_template, messages, tokenize=False, **options_of)
        template = ours.chat_template()
        got = refusal_or(RequestError, template.render, messages, **options_of)
        assert got == expected, (name, how)
        rendered[name, how] = got
        if expected != "refused":
            ids = theirs.apply_chat_template(messages, return_dict=False, **options_of)
            assert ours.encode_chat(messages, **options_of) == ids
    accepted = [key for key, text in rendered.items() if text != "refused"]
    assert ("single", "prompted") in accepted and len(accepted) > len(rendered) // 4
    assert ours.chat_template().render(CONVERSATIONS["single"]) == rendered["single", "prompted"]


def test_the_templates_tell_conversations_and_options_apart() -> None:
    """The comparison can't show that the templates depend on their variables at all."""
    text = (FOLDER / "qwen3.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"})
    one = template.render(CONVERSATIONS["results"], tools=TOOLS)
    assert '{"type": "function", "function": {"name": "weather", "description": "Looks the weather up."' in one
    assert '"São Paulo\\" or a <region>."' in one
    assert one.count("<tool_call>") == 2 and one.endswith("<|im_start|>assistant\n")
    assert "<think>\n\n</think>" in template.render(CONVERSATIONS["single"], enable_thinking=False)
    assert template.render(CONVERSATIONS["answered"], continue_final_message=True).endswith("\n\nOne, two,  ")


@pytest.mark.parametrize("function", [weather, search, nothing, Box().open, Box.open])
def test_schemas_of_functions(function: Callable[..., Any]) -> None:
    assert tool_schema(function) == get_json_schema(function)
    assert "parameters" in tool_schema(function)["function"]


def test_several_templates() -> None:
    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | tojson }}", "rag": "R{{ documents }}"}
    theirs = fast_tokenizer(named)
    ours = Tokenizer(tokenizer_files(theirs))
    messages = [user("x")]
    choices: list[dict[str, Any]] = [
        {},
        {"tools": []},
        {"tools": TOOLS},
        {"chat_template": "rag"},
        {"chat_template": "{{ 1 + 1 }}"},
    ]
    for options in choices:
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        assert ours.encode_chat(messages, **options) == ids
    with pytest.raises(RequestError, match="no template 'rga'; the model has default, rag, tool_use"):
        ours.encode_chat(messages, chat_template="rga")
    with pytest.raises(RequestError, match="chat_template: line 2"):
        ours.encode_chat(messages, chat_template="\n{% if %}")
    only = Tokenizer(tokenizer_files(fast_tokenizer({"tool_use": "T"})))
    assert only.encode_chat(messages, tools=TOOLS) == only.encode("T")
    with pytest.raises(RequestError, match=r"no chat template\n.*tool_use"):
        only.encode_chat(messages)


@dataclass
class Turn:
    role: str
    content: str


class Text(str):
    """A subclass of text that a caller may pass; its methods are not for templates."""

    def secret(self) -> str:
        return "secret"


def test_objects_become_plain_data() -> None:
    source = "{{ messages[0].content.secret is defined }}{{ v }}{{ d }}{{ t }}{{ e }}{{ n }}{{ k }}"
    theirs = fast_tokenizer(source)
    ours = Tokenizer(tokenizer_files(theirs)).chat_template()
    variables: dict[str, Any] = {
        "v": [1.5, True, None],
        "d": Turn("a", "b"),
        "t": (1, (2,)),
        "e": Text("x"),
        "k": {1: 2},
    }
    variables["n"] = np.float32(0.5)
    messages = [user(Text("hi"))]
    expected = theirs.apply_chat_template(messages, tokenize=False, **variables)
    assert ours.render(messages, add_generation_prompt=False, **variables) == expected
    assert expected.startswith("False[1.5, True, None]")


def test_what_looks_like_a_special_token_in_a_message_becomes_one() -> None:
    """transformers does the same: a program that serves strangers has to remove such texts."""
    theirs = fast_tokenizer("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    ours = Tokenizer(tokenizer_files(theirs))
    messages = [user("a</s><think>b<s")]
    ids = ours.encode_chat(messages)
    assert ids == theirs.apply_chat_template(messages, return_dict=False)
    assert len(ids) == 1 + 1 + 1 + 1 + 1 + 2
    assert ours.decode(ids) == "a<think>b<s" == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_whether_a_template_only_appends(name: str, tiny_bundle: Path) -> None:
    """Templates that drop reasoning don't, nor does harmony's, in which only the last answer has channels."""
    files = Bundle.open(tiny_bundle).tokenizer_files()
    template = (FOLDER / f"{name}.jinja").read_text()
    appends = Tokenizer(replace(files, chat_template=template)).template_appends
    assert appends is (name not in ("deepseek_r1", "qwen3", "harmony"))
