"""How models spell reasoning and tool calls: what a format is made of, and the table of formats.

A format is one entry of ``FORMATS``. Parser and grammar are both made from it. Texts stand as a chat template writes
them: the parser takes other whitespace too, the grammar asks for this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Reasoning:
    """Reasoning stands between two markers.

    Attributes:
        begin, end: the markers.
        calls_end: a call's marker ends the reasoning too. Models of this format forget its end.
    """

    begin: str
    end: str
    calls_end: bool = False


@dataclass(frozen=True)
class JsonCall:
    """A call is a JSON object that has a name and arguments: ``{"name": "f", "arguments": {"a": 1}}``.

    Attributes:
        name: the key of the tool's name.
        arguments: keys that the arguments may stand under; the first is the one that the template writes.
    """

    arguments: tuple[str, ...] = ("arguments", "parameters")
    name: str = "name"


@dataclass(frozen=True)
class NamedCall:
    """A call is a name, and its arguments in JSON behind it: ``f[ARGS]{"a": 1}``.

    Attributes:
        prefix: stands before the name, and isn't part of it.
        index: what divides the name from the call's number, where it has one; the three together are the call's id.
        id: what divides the name from the call's id, where a model writes one.
        middle: stands between name and arguments.
        after: stands behind the arguments.
    """

    middle: str
    prefix: str = ""
    index: str = ""
    id: str = ""
    after: str = ""


@dataclass(frozen=True)
class TaggedCall:
    """A call is a name and parameters between tags; a text parameter stands there as it is, others as JSON.

    Attributes:
        name_begin, name_end: around the name.
        key_begin, key_end: around a parameter's key; its value follows.
        value_end: behind the value.
        end: behind the parameters.
        typed: what stands behind a key that says whether its value is text, as ``" string="``.
    """

    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_end: str
    end: str
    typed: str = ""


@dataclass(frozen=True)
class PythonCall:
    """A call is Python: ``f(a=1, b='x')``."""


@dataclass(frozen=True)
class GemmaCall:
    """A call is a name and an object without quotes around keys, and with tokens around texts: ``f{a:<|"|>x<|"|>}``.

    Attributes:
        prefix: stands before the name.
        quote: stands before and behind a text.
    """

    prefix: str = "call:"
    quote: str = '<|"|>'


@dataclass(frozen=True)
class HarmonyCall:
    """A call is a message with a recipient, ``functions.f``. Reasoning and answer are messages of other channels."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    stop: str = "<|return|>"
    prefix: str = "functions."


Call = JsonCall | NamedCall | TaggedCall | PythonCall | GemmaCall | HarmonyCall


@dataclass(frozen=True)
class Calls:
    """How the calls of an answer are spelled.

    Attributes:
        call: one of them.
        section, section_end: around all of them.
        begin, end: around each.
        separator: between two.
        text_after: the template writes an answer's text behind its calls.
        bare: an answer may begin with a call that has no marker before it; then only offered tools are called so.
        marker: what may stand before calls that are bare.
    """

    call: Call
    section: str = ""
    begin: str = ""
    end: str = ""
    separator: str = ""
    section_end: str = ""
    text_after: bool = False
    bare: bool = False
    marker: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spelling:
    """One format.

    Attributes:
        name: of the format, for people.
        calls: None where a model calls no tools.
        reasoning: None where a model doesn't show any.
        signs: texts that a rendered conversation with a call has, where its model uses this format.
        words: texts that the template itself has then, where rendering isn't enough.
    """

    name: str
    calls: Calls | None = None
    reasoning: Reasoning | None = None
    signs: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=())


THINK = Reasoning("<think>\n", "\n</think>\n\n")
_THINK_CLOSE = Reasoning("<think>", "</think>")


def _dsml(name: str, section: str, space: str = "") -> Spelling:
    """DeepSeek's markup; its versions differ in the section's name and in a space."""
    tag = f"<｜DSML｜{space}"
    close = f"</｜DSML｜{space}"
    call = TaggedCall(
        name_begin=f'{tag}invoke name="',
        name_end='">\n',
        key_begin=f'{tag}parameter name="',
        key_end='">',
        value_end=f"{close}parameter>\n",
        end=f"{close}invoke>",
        typed='" string="',
    )
    calls = Calls(call, section=f"\n\n{tag}{section}>\n", separator="\n", section_end=f"\n{close}{section}>")
    return Spelling(name, calls, _THINK_CLOSE, (f"{tag}{section}>", f"{tag}invoke name="))


_QWEN_XML = TaggedCall(
    name_begin="<function=",
    name_end=">\n",
    key_begin="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
    end="</function>",
)
_GLM = TaggedCall(
    name_begin="",
    name_end="\n",
    key_begin="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
    end="",
)
_GLM_IN_A_LINE = replace(_GLM, name_end="", key_end="</arg_key><arg_value>", value_end="</arg_value>")
_MINIMAX = TaggedCall(
    name_begin='<invoke name="',
    name_end='">\n',
    key_begin='<parameter name="',
    key_end='">',
    value_end="</parameter>\n",
    end="</invoke>",
)
_DEEPSEEK = Calls(
    NamedCall("<｜tool▁sep｜>"),
    section="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁call▁begin｜>",
    end="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
)

FORMATS: tuple[Spelling, ...] = (
    Spelling(
        "qwen3-xml",
        Calls(_QWEN_XML, begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
        Reasoning("<think>\n", "\n</think>\n\n", calls_end=True),
        ("<tool_call>", "<function=", "<parameter=", "</function>"),
    ),
    Spelling("harmony", Calls(HarmonyCall()), None, ("<|channel|>", "<|message|>", "to=functions.")),
    Spelling(
        "deepseek-v3",
        replace(
            _DEEPSEEK,
            call=NamedCall("\n```json\n", after="\n```"),
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            separator="\n",
        ),
        _THINK_CLOSE,
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "```json"),
    ),
    Spelling(
        "deepseek-v3.1",
        _DEEPSEEK,
        _THINK_CLOSE,
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    _dsml("deepseek-dsml", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    _dsml("deepseek-v4.1", "calls", " "),
    Spelling(
        "kimi-k2",
        Calls(
            NamedCall("<|tool_call_argument_begin|>", prefix="functions.", index=":"),
            section="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>",
            end="<|tool_call_end|>",
            section_end="<|tool_calls_section_end|>",
        ),
        _THINK_CLOSE,
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    ),
    Spelling(
        "glm-4.5",
        Calls(_GLM, begin="<tool_call>", end="</tool_call>", separator="\n"),
        Reasoning("<think>", "</think>\n"),
        ("<tool_call>get_weather\n", "<arg_key>", "<arg_value>"),
    ),
    Spelling(
        "glm-4.7",
        Calls(_GLM_IN_A_LINE, begin="<tool_call>", end="</tool_call>"),
        _THINK_CLOSE,
        ("<tool_call>", "<arg_key>", "<arg_value>"),
    ),
    Spelling(
        "hermes",
        Calls(JsonCall(), begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
        THINK,
        ("<tool_call>", '"name": "', "</tool_call>"),
    ),
    Spelling(
        "minimax-m2",
        Calls(_MINIMAX, section="<minimax:tool_call>\n", separator="\n", section_end="\n</minimax:tool_call>"),
        THINK,
        ("<minimax:tool_call>", "<invoke name="),
    ),
    Spelling(
        "gemma4",
        Calls(GemmaCall(), begin="<|tool_call>", end="<tool_call|>", text_after=True),
        Reasoning("<|channel>thought\n", "<channel|>"),
        ("<|tool_call>", "<tool_call|>"),
    ),
    Spelling(
        "mistral",
        Calls(NamedCall("[ARGS]", id="[CALL_ID]"), begin="[TOOL_CALLS]"),
        Reasoning("[THINK]", "[/THINK]"),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    Spelling(
        "mistral-v3",
        Calls(JsonCall(), section="[TOOL_CALLS] [", separator=", ", section_end="]"),
        Reasoning("<think>\n", "\n</think>\n\n"),
        ("[TOOL_CALLS]",),
    ),
    Spelling(
        "llama-pythonic",
        Calls(
            PythonCall(),
            section="[",
            separator=", ",
            section_end="]",
            bare=True,
            marker=("<|python_start|>", "<|python_tag|>", "<|python_end|>"),
        ),
        None,
        ("[get_weather(",),
        ("[func_name1(",),
    ),
    Spelling(
        "llama-json",
        Calls(JsonCall(("parameters", "arguments")), separator="; ", bare=True, marker=("<|python_tag|>",)),
        None,
        ('{"name": "', '"parameters": '),
    ),
)
"""Formats with calls, the more special first: the first whose signs are all there is taken."""

REASONING = Spelling("reasoning", None, THINK, ("<think>",))
"""Reasoning, and no calls."""

PLAIN = Spelling("plain")
"""Text alone."""
