"""Regular expressions by which a checkpoint names modules, in Python's syntax: matched without backtracking."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, partial
from re import _parser  # type: ignore[attr-defined]  # what `re` itself reads a pattern with
from typing import Any

from enginewright.runtime.shared.pattern_tree import (
    MOST_PATTERN_CHARACTERS,
    Chars,
    CharTest,
    Choice,
    Concatenation,
    Edge,
    Look,
    Node,
    PatternTree,
    Repeat,
    is_any,
    is_any_case,
    is_between,
    is_not,
    is_word,
)

_CATEGORIES: dict[str, CharTest] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": is_word,
}
_EDGES: dict[str, Edge] = {
    "AT_BEGINNING_STRING": Edge("begin"),
    "AT_END_STRING": Edge("end"),
    "AT_BOUNDARY": Edge("word"),
    "AT_NON_BOUNDARY": Edge("not_word"),
}


class NamePattern:
    """A regular expression for names of modules. It matches what ``re`` matches, in time that its length bounds."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError if it isn't a regular expression, or has a part that needs backtracking."""
        if len(pattern) > MOST_PATTERN_CHARACTERS:
            raise ValueError(f"it has more than {MOST_PATTERN_CHARACTERS:,} characters")
        try:
            parsed = _parser.parse(pattern)
            self._tree = PatternTree(_sequence(parsed, parsed.state.flags))
        except (re.error, OverflowError) as e:
            raise ValueError(str(e)) from e
        except RecursionError:
            raise ValueError("it is nested too deep") from None

    def match(self, name: str) -> bool:
        """Returns True if the pattern matches at the beginning of a name. Raises TooComplexError for too much work."""
        return self._tree.matches(name)

    def search(self, name: str) -> bool:
        """Returns True if the pattern matches anywhere in a name. Raises the errors of ``match``."""
        return self._tree.matches(name, anywhere=True)


@cache
def name_pattern(pattern: str) -> NamePattern:
    """Parses a pattern of module names. Results are cached by their text. Raises the errors of ``NamePattern``."""
    return NamePattern(pattern)


def _sequence(items: Iterable[tuple[Any, Any]], flags: int) -> Node:
    return Concatenation(tuple(_node(str(op), av, flags) for op, av in items))


def _node(op: str, value: Any, flags: int) -> Node:
    if op == "LITERAL" and not flags & re.IGNORECASE:
        return Chars(chr(value).__eq__, only=chr(value))
    if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return Chars(_folded(_test(op, value, flags), flags))
    if op == "BRANCH":
        return Choice(tuple(_sequence(option, flags) for option in value[1]))
    if op == "SUBPATTERN":
        _, added, removed, body = value
        return _sequence(body, (flags | added) & ~removed)
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, body = value
        return Repeat(_sequence(body, flags), least, None if most is _parser.MAXREPEAT else most)
    if op in ("ASSERT", "ASSERT_NOT"):
        direction, body = value
        return Look(_sequence(body, flags), direction > 0, op == "ASSERT_NOT")
    if op == "AT":
        return _edge(str(value), flags)
    if op == "FAILURE":
        return Chars(lambda _: False)
    raise ValueError(f"it has a part that can't be matched without backtracking ({op.lower()})")


def _edge(name: str, flags: int) -> Edge:
    many_lines = bool(flags & re.MULTILINE)
    if name == "AT_BEGINNING":
        return Edge("line_begin" if many_lines else "begin")
    if name == "AT_END":
        return Edge("line_end" if many_lines else "last_line_end")
    return _EDGES[name]


def _test(op: str, value: Any, flags: int) -> CharTest:
    if op == "LITERAL":
        return chr(value).__eq__
    if op == "NOT_LITERAL":
        return partial(is_not, _folded(chr(value).__eq__, flags))
    if op == "ANY":
        return (lambda _: True) if flags & re.DOTALL else "\n".__ne__
    tests = [_member(str(kind), item) for kind, item in value if str(kind) != "NEGATE"]
    member = partial(is_any, tests)
    negative = any(str(kind) == "NEGATE" for kind, _ in value)
    return partial(is_not, _folded(member, flags)) if negative else member


def _member(kind: str, value: Any) -> CharTest:
    if kind == "LITERAL":
        return chr(value).__eq__
    if kind == "RANGE":
        return partial(is_between, chr(value[0]), chr(value[1]))
    name = str(value)
    test = _CATEGORIES[name.replace("_NOT_", "_")]
    return partial(is_not, test) if "_NOT_" in name else test


def _folded(test: CharTest, flags: int) -> CharTest:
    return partial(is_any_case, test) if flags & re.IGNORECASE else test
