"""Answers as the models of each format write them, and tokenizers that have the formats' markers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.chat_format import FORMATS, ChatFormat, Message
from enginewright.runtime.text.tokenizer import Tokenizer

BY_NAME = {one.name: one for one in FORMATS}

GLM = [f"<{slash}{tag}>" for tag in ("think", "tool_call", "arg_key", "arg_value") for slash in ("", "/")]
MARKERS = {
    "hermes": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "qwen3-xml": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "harmony": ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
    "deepseek-v3": [f"<｜tool▁{one}｜>" for one in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
    "deepseek-v3.1": [f"<｜tool▁{one}｜>" for one in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
    "deepseek-dsml": ["<think>", "</think>", "｜DSML｜"],
    "deepseek-v4": ["<think>", "</think>", "｜DSML｜"],
    "deepseek-v4.1": ["<think>", "</think>", "｜DSML｜"],
    "kimi-k2": [
        *(f"<|tool_calls_section_{one}|>" for one in ("begin", "end")),
        *(f"<|tool_call_{one}|>" for one in ("begin", "argument_begin", "end")),
        *("<think>", "</think>"),
    ],
    "glm-4.5": GLM,
    "glm-4.7": GLM,
    "minimax-m2": ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
    "mistral-v3": ["[TOOL_CALLS]"],
    "llama-pythonic": ["<|python_start|>", "<|python_end|>"],
    "llama-json": ["<|python_tag|>", "<|eom_id|>"],
}
"""Markers that are tokens of the notation's models."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Looks the weather up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_alarm",
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {
                        "type": "object",
                        "properties": {"hour": {"type": "integer"}, "minute": {"type": "integer"}},
                        "required": ["hour", "minute"],
                        "additionalProperties": False,
                    },
                    "label": {"type": "string"},
                    "repeat": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["at", "repeat"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]


def byte_tokenizer(markers: Sequence[str], *, special: bool = True, template: str | None = None) -> Tokenizer:
    """A token for each byte, and one for each marker; "<end>" ends a text."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = [chr(b) if b in shown else chr(next(others)) for b in range(256)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: b for b, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    backend.add_tokens([AddedToken(one, special=special, normalized=False) for one in markers])
    if special:
        backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in markers])
    return Tokenizer(TokenizerFiles(backend.to_str(), template, {"eos_token": "<end>", "bos_token": None}))


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """A tokenizer with a format's markers. Qwen's and GLM's aren't special, as in their files."""
    return byte_tokenizer(MARKERS[name], special=name not in ("hermes", "qwen3-xml", "glm-4.5", "glm-4.7"))


@dataclass(frozen=True)
class Answer:
    """The content of an answer, and its tokens."""

    name: str
    ids: tuple[int, ...]
    content: str | None
    reasoning: str | None
    calls: tuple[tuple[str, dict[str, Any]], ...]

    def check(self, message: Message) -> None:
        """Asserts that a message says the same."""
        assert (message.content, message.reasoning) == (self.content, self.reasoning)
        assert [(one.name, json.loads(one.arguments)) for one in message.calls] == list(self.calls)
        assert message.complete and all(one.complete for one in message.calls)


def encoded(name: str, text: str) -> tuple[int, ...]:
    """A text's tokens, in which markers are tokens."""
    return tuple(tokenizer_of(name).encode(text, add_special_tokens=False))


def answer(
    name: str, content: str | None, reasoning: str | None, calls: Iterable[tuple[str, dict[str, Any]]]
) -> Answer:
    """An answer as this format's models write it."""
    listed = tuple(calls)
    return Answer(name, encoded(name, written(name, content, reasoning, listed)), content, reasoning, listed)


def answers(name: str, count: int, seed: int = 0) -> list[Answer]:
    """Answers drawn at random: all combinations of text, reasoning and calls come, with odd texts in them."""
    draw = random.Random(f"{name} {seed}")
    texts = [
        "Ok.",
        "Zü 🌦️ 東",
        '"hi" \\ x',
        "a <\n\n{c: [1]}",
        "x </tool_",
        "é\t👩‍💻",
    ]
    answers_of = []
    for _ in range(count):
        can_think = BY_NAME[name].reasoning is not None or name == "harmony"
        reasoning = draw.choice(texts) if can_think and draw.random() < 0.6 else None
        calls = [_drawn_call(name, draw, texts) for _ in range(draw.choice([0, 1, 1, 2]))]
        if name == "harmony":
            calls = calls[:1]
        alone = BY_NAME[name].calls is not None and BY_NAME[name].calls.bare and calls  # type: ignore[union-attr]
        content = None if alone or (calls and draw.random() < 0.5) else draw.choice(texts)
        if content is not None and name.startswith("llama") and content[0] in "{[":
            content = "Ok."
        answers_of.append(answer(name, content, reasoning, calls))
    return answers_of


def _drawn_call(name: str, draw: random.Random, texts: list[str]) -> tuple[str, dict[str, Any]]:
    which = draw.randrange(3)
    if which == 0:
        arguments: dict[str, Any] = {"city": draw.choice(texts)}
        if draw.random() < 0.5:
            arguments["days"] = draw.randrange(-3, 100)
        if draw.random() < 0.5:
            arguments["unit"] = draw.choice("cf")
        return "get_weather", arguments
    if which == 1:
        arguments = {"at": {"hour": draw.randrange(24), "minute": draw.randrange(60)}}
        if draw.random() < 0.5:
            arguments["label"] = draw.choice(texts)
        arguments["repeat"] = draw.random() < 0.5
        if draw.random() < 0.5:
            arguments["tags"] = draw.sample(texts, draw.randrange(3))
        return "set_alarm", arguments
    return "now", {}


def written(name: str, content: str | None, reasoning: str | None, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The text of an answer in this format, markers as they are spelled."""
    if name == "harmony":
        return _harmony(content, reasoning, calls)
    text = content or ""
    called = _called(name, calls) if calls else ""
    if name in ("hermes", "qwen3-xml", "minimax-m2") and called and content:
        called = "\n" + called
    text = called + text if name == "gemma4" else text + called
    if reasoning is None:
        return text
    if name == "gemma4":
        return f"<|channel>thought\n{reasoning}\n<channel|>{text}"
    if name == "mistral":
        return f"[THINK]{reasoning}[/THINK]{text}"
    if name == "glm-4.5":
        return f"\n<think>{reasoning}</think>\n{text}"
    if name in ("hermes", "qwen3-xml", "minimax-m2", "mistral-v3"):
        return f"<think>\n{reasoning}\n</think>\n\n{text}"
    return f"<think>{reasoning}</think>{text}"


def _called(name: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    if name == "hermes":
        return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {_json(a)}}}\n</tool_call>' for n, a in calls)
    if name == "qwen3-xml":
        return "\n".join(
            f"<tool_call>\n<function={n}>\n"
            + "".join(f"<parameter={k}>\n{_raw(v)}\n</parameter>\n" for k, v in a.items())
            + "</function>\n</tool_call>"
            for n, a in calls
        )
    if name == "deepseek-v3":
        each = (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>"
            for n, a in calls
        )
        return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"
    if name == "deepseek-v3.1":
        each = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for n, a in calls)
        return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"
    if name.startswith("deepseek-"):
        space = " " if name == "deepseek-v4.1" else ""
        section = {"deepseek-dsml": "function_calls", "deepseek-v4": "tool_calls"}.get(name, "calls")
        tag, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
        each = (
            f'{tag}invoke name="{n}">\n'
            + "".join(
                f'{tag}parameter name="{k}" string="{_json(isinstance(v, str))}">{_raw(v)}{end}parameter>\n'
                for k, v in a.items()
            )
            + f"{end}invoke>"
            for n, a in calls
        )
        return f"\n\n{tag}{section}>\n" + "\n".join(each) + f"\n{end}{section}>"
    if name == "kimi-k2":
        each = (
            f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>"
            for i, (n, a) in enumerate(calls)
        )
        return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"
    if name in ("glm-4.5", "glm-4.7"):
        line = "\n" if name == "glm-4.5" else ""
        return line.join(
            f"<tool_call>{n}{line}"
            + "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{_raw(v)}</arg_value>{line}" for k, v in a.items())
            + "</tool_call>"
            for n, a in calls
        )
    if name == "minimax-m2":
        each = (
            f'<invoke name="{n}">\n'
            + "".join(f'<parameter name="{k}">{_raw(v)}</parameter>\n' for k, v in a.items())
            + "</invoke>"
            for n, a in calls
        )
        return "<minimax:tool_call>\n" + "\n".join(each) + "\n</minimax:tool_call>"
    if name == "gemma4":
        return "".join(f"<|tool_call>call:{n}{_gemma(a)}<tool_call|>" for n, a in calls)
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{_json(a)}" for n, a in calls)
    if name == "mistral-v3":
        return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {_json(a)}}}' for n, a in calls) + "]"
    if name == "llama-pythonic":
        each = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
        return "[" + ", ".join(each) + "]"
    assert name == "llama-json", name
    return "; ".join(f'{{"name": "{n}", "parameters": {_json(a)}}}' for n, a in calls)


def _harmony(content: str | None, reasoning: str | None, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    parts = []
    if reasoning is not None:
        parts.append(f"<|channel|>analysis<|message|>{reasoning}")
    if content is not None:
        parts.append(f"<|channel|>{'commentary' if calls else 'final'}<|message|>{content}")
    parts += [f" to=functions.{n}<|channel|>commentary <|constrain|>json<|message|>{_json(a)}" for n, a in calls]
    return "<|end|><|start|>assistant".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _gemma(value: Any) -> str:
    if isinstance(value, dict):
        each = sorted(value.items(), key=lambda one: one[0].lower())
        return "{" + ",".join(f"{k}:{_gemma(v)}" for k, v in each) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else _json(value)


def format_of(name: str) -> ChatFormat:
    """The format of this name."""
    return ChatFormat(BY_NAME[name])
