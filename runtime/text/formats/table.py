"""The table of chat formats. A format is one entry of ``FORMATS``, from which parser and grammar are made."""

from __future__ import annotations

from dataclasses import replace

from .gemma_call import GemmaCall
from .harmony_call import HarmonyCall
from .json_call import JsonCall
from .named_call import NamedCall
from .notation import Calls, Reasoning, Spelling
from .python_call import PythonCall
from .tagged_call import TaggedCall

THINK = Reasoning("<think>\n", "\n</think>\n\n")
_THINK_CLOSE = Reasoning("<think>", "</think>")


def _dsml(name: str, section: str, space: str = "") -> Spelling:
    """Returns a format of DeepSeek's markup; its versions differ in the section's name and in a space."""
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
"""The formats with calls, special ones first. A model has the first format whose signs all occur in a rendered call."""

REASONING = Spelling("reasoning", None, THINK, ("<think>",))
"""The format of a model with reasoning that calls no tools."""

PLAIN = Spelling("plain")
"""The format of text alone."""
