"""Converts a ``response_template``, by which transformers (5.13 and later) reads a model's answers, to a format.

A template has the texts before and after each part of a message (``open``, ``close``, or patterns of these), and the
form of a call. The documented forms can be converted: markers around reasoning; and calls as JSON objects (one between
markers, or a list of them), with the name in the opening pattern, or as parameters between tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .gemma_call import GemmaCall
from .harmony_call import HarmonyCall
from .json_call import JsonCall
from .named_call import NamedCall
from .notation import Calls, Reasoning, Spelling
from .tagged_call import TaggedCall

_THINKING = ("thinking", "reasoning", "reasoning_content")
_PART = re.compile(
    r"\\s[*+]|\\n\??|\(\?P<(?P<group>\w+)>(?:[^()\\]|\\.)*\)|\(\?:\^\||\)|\.\*\??|\\(?P<escaped>\W)|(?P<plain>[^\\()*+?\[\]^$|.])",
    re.DOTALL,
)
"""Matches one element of an opening pattern: space, a named group, "(?:^|", ")", any text, or a character."""


class UnknownShapeError(ValueError):
    """A response template has a key that can't be converted into a format; the text names it."""


def of_response_template(text: str, known: Spelling) -> Spelling | None:
    """Returns the format of a response template; None if the template can't be converted.

    Args:
        text: the template, as JSON.
        known: the format of the table ``FORMATS`` that the chat template writes. It is returned itself if it has the
            same markers.
    """
    try:
        return converted(msgspec.json.decode(text), known)
    except (UnknownShapeError, msgspec.DecodeError):
        return None


def converted(template: Any, known: Spelling) -> Spelling:
    """Returns the format of a response template; see ``of_response_template``.

    Calls and reasoning of ``known`` are used if they have the same markers, since they describe more.

    Raises:
        UnknownShapeError: a key of ``template`` can't be converted; the text names it.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        raise UnknownShapeError("response_template: it has no fields, or another version than 1")
    calls, reasoning = _parts(fields)
    if calls is not None and isinstance(calls.call, HarmonyCall):
        return known if known.name == "harmony" else Spelling("response-template", calls)
    if calls is not None and known.calls is not None and _first(known.calls) == _first(calls):
        calls = known.calls
    if reasoning is not None and known.reasoning is not None and _same(reasoning, known.reasoning):
        reasoning = known.reasoning
    if (calls, reasoning) == (known.calls, known.reasoning):
        return known
    named = calls is not None and calls is known.calls
    return Spelling(known.name if named else "response-template", calls, reasoning)


def _parts(fields: Mapping[str, Any]) -> tuple[Calls | None, Reasoning | None]:
    """Returns the calls and the reasoning that the fields of a response template describe; None where they lack it."""
    reasoning, calls = None, None
    for name, field in fields.items():
        if not isinstance(field, Mapping):
            raise UnknownShapeError(f"response_template.fields.{name}: it isn't an object")
        if name in _THINKING:
            reasoning = Reasoning(_one_text(name, field, "open"), _one_text(name, field, "close"))
        elif name == "tool_calls":
            calls = _calls(field)
        elif name != "content":
            raise UnknownShapeError(f"response_template.fields.{name}: answers have no such part here")
    return calls, reasoning


def _calls(field: Mapping[str, Any]) -> Calls:
    """Returns the calls that the field ``tool_calls`` of a response template describes."""
    if "open" in field:
        parts: list[str | None] = [_one_text("tool_calls", field, "open")]
    else:
        parts = _pattern("tool_calls.open_pattern", field.get("open_pattern"))
    close = _one_text("tool_calls", field, "close")
    named = None in parts
    place = parts.index(None) if named else len(parts)
    before, after = _joined(parts[:place]), _joined(parts[place + 1 :])
    content, arguments = field.get("content", "text"), field.get("content_args") or {}
    if "<|channel|>" in before and "to=functions." in before:
        return Calls(HarmonyCall())
    if content == "json" and not named:
        return _json_calls(field, before, close)
    if content == "json" and (delimiters := arguments.get("string_delims")):
        quotes = {quote for pair in delimiters for quote in pair}
        marker, _, prefix = before.rpartition(">")
        if len(quotes) != 1 or not marker:
            raise UnknownShapeError("response_template.fields.tool_calls.content_args.string_delims")
        return Calls(GemmaCall(prefix, quotes.pop()), begin=f"{marker}>", end=close, text_after=True)
    if content == "json" and after:
        return Calls(NamedCall(after), begin=before, end=close)
    if content == "xml-inline" and named:
        return _tagged_calls(arguments.get("tag_pattern"), before, after, close)
    raise UnknownShapeError(f"response_template.fields.tool_calls.content: {content}")


def _json_calls(field: Mapping[str, Any], before: str, close: str) -> Calls:
    """Returns calls that are JSON objects: each between two markers, or all in one list between them."""
    name, keys = _keys(field.get("transform"))
    call = JsonCall((keys,) if keys != "arguments" else ("arguments", "parameters"), name)
    if field.get("transform_each"):
        return Calls(call, section=f"{before} [", separator=", ", section_end=f"]{close}")
    return Calls(call, begin=before, end=close)


def _tagged_calls(tag_pattern: Any, before: str, after: str, close: str) -> Calls:
    """Returns calls whose parameters are between tags.

    Args:
        tag_pattern: the pattern of a parameter, with a group for its key and one for its value.
        before, after: the texts around the tool's name.
        close: the text at the end of a call.
    """
    tags = _pattern("tool_calls.content_args.tag_pattern", tag_pattern)
    if tags.count(None) != 2:
        raise UnknownShapeError("response_template.fields.tool_calls.content_args.tag_pattern")
    key, value = (i for i, part in enumerate(tags) if part is None)
    begin, middle, end = map(_joined, (tags[:key], tags[key + 1 : value], tags[value + 1 :]))
    marker, _, name_begin = before.strip().rpartition("<")
    if not marker.strip():
        return Calls(TaggedCall("", after, begin, middle, end, ""), begin=before, end=close)
    tag = re.match(r"\w+", name_begin)  # the template leaves out what closes it
    close_tag = f"</{tag[0]}>" if tag else ""
    return Calls(
        TaggedCall(f"<{name_begin}", f"{after}\n", begin, middle, f"{end}\n", close_tag), begin=marker, end=close
    )


def _keys(transform: Any) -> tuple[str, str]:
    """Returns the keys of a call's name and of its arguments, as the field ``transform`` of a template has them."""
    function = transform.get("function") if isinstance(transform, Mapping) else "{content}"
    if function == "{content}":
        return "name", "arguments"
    patterns = [function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments")]
    keys = [re.fullmatch(r"\{(?:content\.)?(\w+)\}", one) if isinstance(one, str) else None for one in patterns]
    if keys[0] is None or keys[1] is None:
        raise UnknownShapeError("response_template.fields.tool_calls.transform")
    return keys[0][1], keys[1][1]


def _one_text(name: str, one: Mapping[str, Any], which: str) -> str:
    """Returns the marker before or after a part of a message.

    Args:
        name: of the part.
        one: the part's field in the template.
        which: "open" or "close".
    """
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
    """Returns the texts of a pattern, with None in place of each named group and a line break in place of optional
    space.

    ``name`` is the pattern's key, for errors.
    """
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
    """Returns the marker at the beginning of a call, without space."""
    call = calls.call
    lead = call.lead if isinstance(call, (TaggedCall, GemmaCall)) else ""
    return "".join(((calls.begin or calls.section) + lead).split())


def _same(one: Reasoning, other: Reasoning) -> bool:
    return (one.begin.strip(), one.end.strip()) == (other.begin.strip(), other.end.strip())
