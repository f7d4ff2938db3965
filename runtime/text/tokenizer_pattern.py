"""Reads regular expressions of tokenizer.json in the syntax of Oniguruma (Ruby's), which `tokenizers` uses.

They are read to be judged, never to be matched: an unknown set counts as all characters.
Syntax: https://github.com/kkos/oniguruma/blob/master/doc/RE.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import partial

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
    TooComplexError,
    is_any,
    is_any_case,
    is_between,
    is_not,
    is_word,
)

_MOST_NESTED = 50

_EDGES = {
    "A": Edge("begin"),
    "z": Edge("end"),
    "Z": Edge("last_line_end"),
    "b": Edge("word"),
    "B": Edge("not_word"),
    "G": Edge("anywhere"),
    "K": Edge("anywhere"),
}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_GROUPS: tuple[tuple[str, Callable[[Node], Node]], ...] = (
    ("?:", lambda body: body),
    ("?>", lambda body: body),  # atomic: it goes back less
    ("?=", lambda body: Look(body, ahead=True, negative=False)),
    ("?!", lambda body: Look(body, ahead=True, negative=True)),
    ("?<=", lambda body: Look(body, ahead=False, negative=False)),
    ("?<!", lambda body: Look(body, ahead=False, negative=True)),
)


def read_tokenizer_pattern(pattern: str) -> PatternTree:
    """Reads a regular expression. Raises ValueError if the text isn't one, or has an unknown part."""
    if len(pattern) > MOST_PATTERN_CHARACTERS:
        raise TooComplexError(f"it has more than {MOST_PATTERN_CHARACTERS:,} characters")
    reader = _Reader(pattern)
    root = reader.choice(0)
    if not reader.at_end:
        raise ValueError(f"character {reader.at}: a ) without its (")
    return PatternTree(root)


class _Reader:
    """Reads a pattern from left to right. ``at`` is the index of the next character."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self.at = 0
        self._ignores_case = self._is_verbose = False
        self._seen: set[str] = set()  # characters that the set that is being read names

    @property
    def at_end(self) -> bool:
        return self.at >= len(self._text)

    def choice(self, depth: int) -> Node:
        """Reads alternatives up to a closing parenthesis or the end. ``depth``: the number of groups around them."""
        if depth > _MOST_NESTED:
            raise TooComplexError(f"it has more than {_MOST_NESTED} parentheses within each other")
        flags = self._ignores_case, self._is_verbose  # those that a group sets end with it
        options = [self._sequence(depth)]
        while self._takes("|"):
            options.append(self._sequence(depth))
        self._ignores_case, self._is_verbose = flags
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while not self.at_end and self._text[self.at] not in "|)":
            if self._is_verbose and self._skips_comment():
                continue
            item = self._atom(depth)
            while (often := self._quantifier()) is not None:
                item = Repeat(item, *often)
            items.append(item)
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def _skips_comment(self) -> bool:
        if self._text[self.at].isspace():
            self.at += 1
            return True
        if self._text[self.at] != "#":
            return False
        end = self._text.find("\n", self.at)
        self.at = len(self._text) if end < 0 else end
        return True

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Reads a quantifier. Returns the minimum and maximum of repetitions; None if no quantifier follows.

        Possessive and lazy quantifiers are read like greedy ones.
        """
        for sign, often in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                _ = self._takes("?") or self._takes("+")
                return often
        if not self._text.startswith("{", self.at):
            return None
        end = self._text.find("}", self.at)
        least, comma, most = self._text[self.at + 1 : max(end, 0)].partition(",")
        if not all(n.isascii() and n.isdigit() for n in (least, most) if n) or not (least or most):
            return None  # characters like any others
        self.at = end + 1
        _ = self._takes("?")  # "{2}+" repeats what is repeated, in Ruby's syntax
        low = int(least or 0)
        return low, (int(most) if most else None) if comma else low

    def _atom(self, depth: int) -> Node:
        character = self._next()
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._chars(self._class(depth))
        if character == ".":
            return self._chars(_all)
        if character == "^":
            return Edge("line_begin")
        if character == "$":
            return Edge("line_end")
        if character == "\\":
            return self._escape()
        return self._literal(character)

    def _group(self, depth: int) -> Node:
        if self._takes("?#"):
            self.at = self._text.index(")", self.at) + 1
            return Concatenation()
        make_group = next((make for begin, make in _GROUPS if self._takes(begin)), None)
        if make_group is None and self._text.startswith("?", self.at):
            if self._text.startswith("?<", self.at):
                make_group = _GROUPS[0][1]
                self.at = self._text.index(">", self.at) + 1
            else:
                return self._flags(depth)
        body = self.choice(depth + 1)
        self._close()
        return body if make_group is None else make_group(body)

    def _flags(self, depth: int) -> Node:
        """Parses (?i), which holds up to the end of its group, or (?i:...)."""
        self.at += 1
        before, on = (self._ignores_case, self._is_verbose), True
        while (flag := self._next()) not in ":)":
            if flag == "-":
                on = False
            elif flag == "i":
                self._ignores_case = on
            elif flag == "x":
                self._is_verbose = on
            elif flag not in "ms":
                raise ValueError(f"character {self.at}: (?{flag} isn't known")
        if flag == ")":
            body = self.choice(depth + 1)
            return body  # the group's flags are put back where it ends
        body = self.choice(depth + 1)
        self._close()
        self._ignores_case, self._is_verbose = before
        return body

    def _escape(self) -> Node:
        character = self._next()
        if character in _EDGES:
            return _EDGES[character]
        if character == "g":
            raise ValueError(f"character {self.at}: \\g calls a group")
        if character == "k" or (character.isdigit() and character != "0"):
            if self._takes("<"):
                self.at = self._text.index(">", self.at) + 1
            return Repeat(self._chars(_all), 0, None)  # what a group has matched: any text
        if character in "RX":
            return Repeat(self._chars(_all), 1, 2 if character == "R" else None)
        known = self._known_set(character)
        return self._literal(self._escaped(character)) if known is None else self._chars(known)

    def _known_set(self, character: str) -> CharTest | None:
        r"""Returns the set of an escape such as \s or \p{L}; None if the escape is one character."""
        sets: dict[str, CharTest] = {"d": str.isdecimal, "s": str.isspace, "w": is_word, "h": _is_hexadecimal}
        if character in sets:
            return sets[character]
        if character.lower() in sets:
            return partial(is_not, sets[character.lower()])
        if character not in "pP":
            return None
        if not self._takes("{"):
            raise ValueError(f"character {self.at}: \\{character} without a name")
        end = self._text.index("}", self.at)
        name = self._text[self.at : end]
        self.at = end + 1
        test = _property(name.removeprefix("^"))
        # All but the characters of a set that isn't known may be any character too.
        negative = (character == "P") != name.startswith("^")
        return partial(is_not, test) if negative and test is not _all else test

    def _escaped(self, character: str) -> str:
        """Returns the one character of an escape."""
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "x" and self._takes("{"):
            end = self._text.index("}", self.at)
            digits, self.at = self._text[self.at : end], end + 1
            return chr(int(digits, 16))
        if character in "xu":
            most, digits = (2 if character == "x" else 4), ""
            while len(digits) < most and not self.at_end and _is_hexadecimal(self._text[self.at]):
                digits += self._next()
            return chr(int(digits or "0", 16))
        return "\0" if character == "0" else character

    def _class(self, depth: int) -> CharTest:
        """Returns the test of a set in brackets, with nested sets; "&&" intersects the sets on both sides."""
        if depth > _MOST_NESTED:
            raise TooComplexError("it has sets nested too deep")
        negative = self._takes("^")
        sides: list[list[CharTest]] = [[]]
        first = True
        while first or not self._takes("]"):
            if self._takes("&&"):
                sides.append([])
                continue
            sides[-1].append(self._member(depth))
            first = False
        union = [partial(is_any, tuple(side)) for side in sides]
        test = union[0] if len(union) == 1 else partial(_every, tuple(union))
        return partial(is_not, test) if negative else test

    def _member(self, depth: int) -> CharTest:
        if self._takes("[:"):
            end = self._text.index(":]", self.at)
            self.at = end + 2
            return _all
        if self._takes("["):
            return self._class(depth + 1)
        character = self._next()
        if character == "\\":
            character = self._next()
            known = self._known_set(character)
            if known is not None:
                return known
            character = "\b" if character == "b" else self._escaped(character)
        self._seen.add(character)
        rest = self._text[self.at : self.at + 2]
        if len(rest) < 2 or rest[0] != "-" or rest[1] in "[]":
            return character.__eq__
        self.at += 1
        last = self._next()
        if last == "\\":
            last = self._escaped(self._next())
        self._seen.add(last)
        return partial(is_between, character, last)

    def _literal(self, character: str) -> Node:
        self._seen.add(character)
        return self._chars(character.__eq__)

    def _chars(self, test: CharTest) -> Chars:
        if self._ignores_case:
            test = partial(is_any_case, test)
        samples = "".join(sorted({near for c in self._seen for near in _near(c)}))
        self._seen = set()
        return Chars(test, samples)

    def _next(self) -> str:
        if self.at_end:
            raise ValueError("it ends too early")
        self.at += 1
        return self._text[self.at - 1]

    def _takes(self, text: str) -> bool:
        """If ``text`` follows, moves past it and returns True."""
        if not self._text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _close(self) -> None:
        if not self._takes(")"):
            raise ValueError("a ( without its )")


def _property(name: str) -> CharTest:
    """Returns the test of a general category of Unicode by its short name; for other properties, of all characters."""
    short = name.replace("_", "").replace(" ", "")
    if short in _CATEGORIES or (len(short) == 1 and short in "LMNPSZC"):
        return partial(_in_category, short)
    return _all


_MINOR = {"L": "ultmo", "M": "nce", "N": "dlo", "P": "cdseifo", "S": "mcko", "Z": "slp", "C": "cfson"}
_CATEGORIES = frozenset(major + minor for major, minors in _MINOR.items() for minor in minors)


def _in_category(name: str, character: str) -> bool:
    return unicodedata.category(character).startswith(name)


def _all(_: str) -> bool:
    return True


def _every(tests: tuple[CharTest, ...], character: str) -> bool:
    return all(test(character) for test in tests)


def _is_hexadecimal(character: str) -> bool:
    return character in "0123456789abcdefABCDEF"


def _near(character: str) -> str:
    """Returns a character and its two neighbours: at one of these, a set with this character begins or ends."""
    code = ord(character)
    return "".join(chr(c) for c in (code - 1, code, code + 1) if 0 <= c < 0x110000 and not 0xD800 <= c < 0xE000)
