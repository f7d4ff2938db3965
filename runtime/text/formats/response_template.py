"""Makes a format of a ``response_template``, by which transformers (5.13 and later) reads a model's answers.

It says of each part of a message what it begins and ends with (``open``, ``close``, or patterns of these), and how a
call is read. What transformers documents can be turned: markers around reasoning; and calls that are JSON objects, one
between markers or a list of them, that have their name in the opening pattern, or that are parameters between tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from .gemma_call import GemmaCall
from .harmony_call import HarmonyCall
from .json_call import JsonCall
from .named_call import NamedCall
from .notation import Calls, Notation, Reasoning, Spelling
from .tagged_call import TaggedCall

_THINKING = ("thinking", "reasoning", "reasoning_content")
_PART = re.compile(
    r"\\s[*+]|\\n\??|\(\?P<(?P<group>\w+)>(?:[^()\\]|\\.)*\)|\(\?:\^\||\)|\.\*\??|\\(?P<escaped>\W)|(?P<plain>[^\\()*+?\[\]^$|.])",
    re.DOTALL,
)
"""The elements of an opening pattern: space, a named group, "the beginning or", anything, and a letter."""


class UnknownShapeError(ValueError):
    """A response template has a key that can't be turned into a format; the text names it."""


def of_response_template(text: str, known: Spelling) -> Spelling | None:
    """The format; ``known`` itself, the table's, where both say the same; None where it can't be turned."""
    try:
        return converted(msgspec.json.decode(text), known)
    except (UnknownShapeError, msgspec.DecodeError):
        return None


def converted(template: Any, known: Spelling) -> Spelling:
    """The format of a response template.

    ``known`` is what the chat template was found to write: it says more, so it stays where the markers are the same.
    Raises UnknownShapeError naming the key that can't be turned.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        raise UnknownShapeError("response_template: it has no fields, or another version than 1")
    reasoning, calls = None, None
    for name, one in fields.items():
        if not isinstance(one, Mapping):
            raise UnknownShapeError(f"response_template.fields.{name}: it isn't an object")
        if name in _THINKING:
            reasoning = Reasoning(_one_text(name, one, "open"), _one_text(name, one, "close"))
        elif name == "tool_calls":
            calls = _calls(one)
        elif name != "content":
            raise UnknownShapeError(f"response_template.fields.{name}: answers have no such part here")
    if calls is not None and isinstance(calls.call, HarmonyCall):
        return known if known.name == "harmony" else Spelling("response-template", calls)
    if calls is not None and known.calls is not None and _first(known.calls) == _first(calls):
        calls = known.calls
    if reasoning is not None and known.reasoning is not None and _same(reasoning, known.reasoning):
        reasoning = known.reasoning
    spelling = Spelling("response-template", calls, reasoning)
    same = (calls, reasoning) == (known.calls, known.reasoning)
    return (
        known
        if same
        else replace(spelling, name=known.name)
        if calls is known.calls and calls is not None
        else spelling
    )


def _calls(one: Mapping[str, Any]) -> Calls:
    content, arguments = one.get("content", "text"), one.get("content_args") or {}
    if "open" in one:
        parts: list[str | None] = [_one_text("tool_calls", one, "open")]
    else:
        parts = _pattern("tool_calls.open_pattern", one.get("open_pattern"))
    close = _one_text("tool_calls", one, "close")
    named = None in parts
    place = parts.index(None) if named else len(parts)
    before, after = _joined(parts[:place]), _joined(parts[place + 1 :])
    if "<|channel|>" in before and "to=functions." in before:
        return Calls(HarmonyCall())
    if content == "json" and not named:
        name, keys = _keys(one.get("transform"))
        call: Notation = JsonCall((keys,) if keys != "arguments" else ("arguments", "parameters"), name)
        if one.get("transform_each"):
            return Calls(call, section=f"{before} [", separator=", ", section_end=f"]{close}")
        return Calls(call, begin=before, end=close)
    if content == "json" and (delimiters := arguments.get("string_delims")):
        quotes = {quote for pair in delimiters for quote in pair}
        marker, _, prefix = before.rpartition(">")
        if len(quotes) != 1 or not marker:
            raise UnknownShapeError("response_template.fields.tool_calls.content_args.string_delims")
        return Calls(GemmaCall(prefix, quotes.pop()), begin=f"{marker}>", end=close, text_after=True)
    if content == "json" and after:
        return Calls(NamedCall(after), begin=before, end=close)
    if content == "xml-inline" and named:
        tags = _pattern("tool_calls.content_args.tag_pattern", arguments.get("tag_pattern"))
        if tags.count(None) != 2:
            raise UnknownShapeError("response_template.fields.tool_calls.content_args.tag_pattern")
        key, value = (i for i, part in enumerate(tags) if part is None)
        begin, middle, end = map(_joined, (tags[:key], tags[key + 1 : value], tags[value + 1 :]))
        marker, _, name_begin = before.strip().rpartition("<")
        if marker.strip():
            tag = re.match(r"\w+", name_begin)  # the template leaves out what closes it
            close_tag = f"</{tag[0]}>" if tag else ""
            call = TaggedCall(f"<{name_begin}", f"{after}\n", begin, middle, f"{end}\n", close_tag)
            return Calls(call, begin=marker, end=close)
        call = TaggedCall("", after, begin, middle, end, "")
        return Calls(call, begin=before, end=close)
    raise UnknownShapeError(f"response_template.fields.tool_calls.content: {content}")


def _keys(transform: Any) -> tuple[str, str]:
    """The keys of a call's name and arguments."""
    function = transform.get("function") if isinstance(transform, Mapping) else "{content}"
    if function == "{content}":
        return "name", "arguments"
    patterns = [function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments")]
    keys = [re.fullmatch(r"\{(?:content\.)?(\w+)\}", one) if isinstance(one, str) else None for one in patterns]
    if keys[0] is None or keys[1] is None:
        raise UnknownShapeError("response_template.fields.tool_calls.transform")
    return keys[0][1], keys[1][1]


def _one_text(name: str, one: Mapping[str, Any], which: str) -> str:
    """The text that a part begins or ends with."""
    text_or_list = one.get(which)
    if isinstance(text_or_list, list) and len(text_or_list) == 1:
        text_or_list = text_or_list[0]
    if isinstance(text_or_list, str) and text_or_list:
        return text_or_list
    pattern = _pattern(f"{name}.{which}_pattern", one.get(f"{which}_pattern"))
    text = "".join(part for part in pattern if part is not None)
    if None in pattern or not text.strip():
        raise UnknownShapeError(f"response_template.fields.{name}.{which}")
    return text


def _pattern(name: str, pattern: Any) -> list[str | None]:
    """The texts of a pattern, and None where a named group stands. Space that may be there is a line's end."""
    parts: list[str | None] = []
    at = 0
    while isinstance(pattern, str) and at < len(pattern):
        one = _PART.match(pattern, at)
        if one is None:
            break
        at = one.end()
        if one["group"] is not None:
            parts.append(None)
        elif one["escaped"] or one["plain"]:
            parts.append(one["escaped"] or one["plain"])
        elif one[0].startswith(("\\s", "\\n")):
            parts.append("\n")
    if not isinstance(pattern, str) or at < len(pattern):
        raise UnknownShapeError(f"response_template.fields.{name}: {pattern!r:.100}")
    return parts


def _joined(parts: Sequence[str | None]) -> str:
    return "".join(part or "" for part in parts)


def _first(calls: Calls) -> str:
    """The marker that a call begins with."""
    call = calls.call
    lead = call.lead if isinstance(call, (TaggedCall, GemmaCall)) else ""
    return "".join(((calls.begin or calls.section) + lead).split())


def _same(one: Reasoning, other: Reasoning) -> bool:
    return (one.begin.strip(), one.end.strip()) == (other.begin.strip(), other.end.strip())
