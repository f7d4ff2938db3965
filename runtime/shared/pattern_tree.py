"""Regular expressions as trees: matched without backtracking, and checked before a backtracking engine runs them.

A file from elsewhere may contain a regular expression. Most engines backtrack, and some expressions make them take time
that is exponential in the length of a text. ``PatternTree.matches`` follows all paths at once (Thompson, Regular
Expression Search Algorithm, 1968), with a set of positions in one integer. ``check_backtracking`` finds expressions
that other engines must not run: it looks for ambiguity in Glushkov's automaton (Weideman et al., Analyzing Matching
Time Behavior of Backtracking Regular Expression Matchers, 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

import msgspec

CharTest = Callable[[str], bool]

MOST_PATTERN_CHARACTERS = 10_000
_MOST_WORK = 200_000
"""Nodes that are visited to match one text."""
_MOST_POSITIONS = 2_000
_MOST_EDGES = 100_000
_MOST_UNROLLED = 16
"""The most repetitions of a part that are unrolled for the check. A higher number is treated as unlimited."""
_MOST_IN_LOOP = 64
_MOST_WAYS = 4_096
"""The most ways, loops not counted, in which an expression may match the same text."""


class Chars(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One character out of a set.

    Attributes:
        test: returns True for the characters of the set.
        samples: characters at the edges of the set, by which two sets are compared.
        only: all characters of the set if they are few; otherwise None.
    """

    test: CharTest
    samples: str = ""
    only: str | None = None

    @cached_property
    def known(self) -> frozenset[str]:
        """The characters of ``samples`` and ``_ALPHABET`` that are in the set."""
        return frozenset(filter(self.test, self.samples + _ALPHABET))


class Concatenation(msgspec.Struct, frozen=True, eq=False):
    """Nodes one after the other; without nodes, the empty text."""

    items: tuple[Node, ...] = ()


class Choice(msgspec.Struct, frozen=True, eq=False):
    """An alternative of several nodes."""

    options: tuple[Node, ...]


class Repeat(msgspec.Struct, frozen=True, eq=False):
    """A repetition of a node; ``most`` is None for any number of times."""

    body: Node
    least: int
    most: int | None


class Look(msgspec.Struct, frozen=True, eq=False):
    """An assertion about the text before or after a position."""

    body: Node
    ahead: bool
    negative: bool


class Edge(msgspec.Struct, frozen=True, eq=False):
    """An assertion about a position: the begin or end of the text or of a line, or the edge of a word."""

    kind: Literal["begin", "end", "last_line_end", "line_begin", "line_end", "word", "not_word", "anywhere"]


Node = Chars | Concatenation | Choice | Repeat | Look | Edge


def is_word(character: str) -> bool:
    """Returns True for characters of words: letters, digits and the underscore."""
    return character.isalnum() or character == "_"


# Tests of sets, whose first arguments ``functools.partial`` gives.


def is_not(test: CharTest, character: str) -> bool:
    """Returns True for characters that don't pass a test."""
    return not test(character)


def is_any(tests: Sequence[CharTest], character: str) -> bool:
    """Returns True for characters that pass one of the tests."""
    return any(test(character) for test in tests)


def is_between(low: str, high: str, character: str) -> bool:
    """Returns True for the characters from ``low`` to ``high``."""
    return low <= character <= high


def is_any_case(test: CharTest, character: str) -> bool:
    """Returns True for characters that pass a test themselves, or in lower or upper case."""
    return test(character) or test(character.lower()) or test(character.upper())


class PatternTree:
    """A parsed regular expression. Methods raise ``TooComplexError`` if they would take too much work."""

    def __init__(self, root: Node) -> None:
        self.root = root

    def matches(self, text: str, *, anywhere: bool = False) -> bool:
        """Returns True if the expression matches at the beginning of ``text``, or with ``anywhere`` at any position.

        Raises TooComplexError.
        """
        walk = _Walk(text)
        return bool(walk.ends(self.root, walk.everywhere if anywhere else 1))

    def shortest(self) -> int:
        """Returns the length of the shortest text that matches."""
        return _shortest(self.root)

    def check_backtracking(self) -> None:
        """Raises TooComplexError if a backtracking engine may need more than quadratic time for some text.

        The check is conservative: an expression that it refuses may be harmless.
        """
        _judge(self.root)


class TooComplexError(ValueError):
    """An error for an expression that takes too much work; the message has the reason."""


# ---- matching


class _Walk:
    """A match of one text, by sets of positions. Bit i of a set is the position before character i."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.everywhere = (1 << (len(text) + 1)) - 1
        self._places: dict[str, int] = {}
        for i, character in enumerate(text):
            self._places[character] = self._places.get(character, 0) | (1 << i)
        self._of_chars: dict[Chars, int] = {}
        self._work = 0

    def ends(self, node: Node, begins: int) -> int:
        """Returns the set of positions at which a match of ``node`` ends that begins at a position of the set
        ``begins``.
        """
        return self._walk(node, begins, forward=True)

    def _walk(self, node: Node, positions: int, *, forward: bool) -> int:
        self._work += 1
        if self._work > _MOST_WORK:
            raise TooComplexError("it takes too many steps to match")
        if not positions:
            return 0
        if isinstance(node, Chars):
            places = self._chars(node)
            return (positions & places) << 1 if forward else (positions >> 1) & places
        if isinstance(node, Concatenation):
            for item in node.items if forward else reversed(node.items):
                positions = self._walk(item, positions, forward=forward)
                if not positions:
                    break
            return positions
        if isinstance(node, Choice):
            reached = 0
            for option in node.options:
                reached |= self._walk(option, positions, forward=forward)
            return reached
        if isinstance(node, Repeat):
            return self._repeat(node, positions, forward=forward)
        if isinstance(node, Look):
            # A body is asked for from all positions at once: ahead for its begins, behind for its ends.
            holds = self._walk(node.body, self.everywhere, forward=not node.ahead)
            return positions & (self.everywhere & ~holds if node.negative else holds)
        return positions & self._edges(node)

    def _repeat(self, node: Repeat, positions: int, *, forward: bool) -> int:
        for _ in range(node.least):
            following = self._walk(node.body, positions, forward=forward)
            if following == positions or not following:
                positions = following
                break
            positions = following
        reached, count = positions, node.least
        while positions and (node.most is None or count < node.most):
            positions = self._walk(node.body, positions, forward=forward) & ~reached
            reached |= positions
            count += 1
        return reached

    def _chars(self, node: Chars) -> int:
        places = self._of_chars.get(node)
        if places is None:
            places = 0
            if node.only is not None:
                for character in node.only:
                    places |= self._places.get(character, 0)
            else:
                for character, at in self._places.items():
                    if node.test(character):
                        places |= at
            self._of_chars[node] = places
        return places

    def _edges(self, node: Edge) -> int:
        text, n = self._text, len(self._text)
        if node.kind == "anywhere":
            return self.everywhere
        if node.kind == "begin":
            return 1
        if node.kind == "end":
            return 1 << n
        if node.kind == "last_line_end":
            return 1 << n | (1 << (n - 1) if text.endswith("\n") else 0)
        places = 0
        for i in range(n + 1):
            if node.kind == "line_begin":
                holds = i == 0 or text[i - 1] == "\n"
            elif node.kind == "line_end":
                holds = i == n or text[i] == "\n"
            else:
                before, after = i > 0 and is_word(text[i - 1]), i < n and is_word(text[i])
                holds = (before != after) == (node.kind == "word")
            places |= holds << i
        return places


def _shortest(node: Node) -> int:
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Concatenation):
        return sum(map(_shortest, node.items))
    if isinstance(node, Choice):
        return min(map(_shortest, node.options), default=0)
    return node.least * _shortest(node.body) if isinstance(node, Repeat) else 0


# ---- judging


class _Fragment(msgspec.Struct):
    """A part of the automaton.

    Attributes:
        first: the positions at which a match of the part may begin.
        last: the positions at which it may end.
        empty: True if the part matches the empty text.
    """

    first: list[int]
    last: list[int]
    empty: bool


class _Automaton(msgspec.Struct):
    """Glushkov's automaton, with a position for each character of the expression.

    Attributes:
        sets: position -> the characters that it reads; None for an assertion, which reads nothing and may fail.
        follow: position -> the positions after it. If several paths lead to one, it occurs several times.
        looks: the look-around assertions with their positions.
        edges: the number of entries in ``follow``.
    """

    sets: list[Chars | None] = msgspec.field(default_factory=list)
    follow: list[list[int]] = msgspec.field(default_factory=list)
    looks: list[tuple[int, Look]] = msgspec.field(default_factory=list)
    edges: int = 0

    def add(self, node: Node) -> _Fragment:
        if isinstance(node, Concatenation):
            return self._sequence(self.add(item) for item in node.items)
        if isinstance(node, Choice):
            options = [self.add(option) for option in node.options]
            return _Fragment(
                [p for o in options for p in o.first],
                [p for o in options for p in o.last],
                not options or any(o.empty for o in options),
            )
        if isinstance(node, Repeat):
            return self._repeat(node)
        if len(self.sets) >= _MOST_POSITIONS:
            raise TooComplexError(f"it has more than {_MOST_POSITIONS:,} places")
        self.sets.append(node if isinstance(node, Chars) else None)
        self.follow.append([])
        at = len(self.sets) - 1
        if isinstance(node, Look):
            self.looks.append((at, node))
        return _Fragment([at], [at], empty=False)

    def _join(self, before: Sequence[int], after: Sequence[int]) -> None:
        self.edges += len(before) * len(after)
        if self.edges > _MOST_EDGES:
            raise TooComplexError("it has too many ways from one place to the next")
        for p in before:
            self.follow[p] += after

    def _sequence(self, parts: Iterator[_Fragment]) -> _Fragment:
        whole = _Fragment([], [], empty=True)
        for part in parts:
            self._join(whole.last, part.first)
            first = whole.first + part.first if whole.empty else whole.first
            last = whole.last + part.last if part.empty else part.last
            whole = _Fragment(first, last, whole.empty and part.empty)
        return whole

    def _repeat(self, node: Repeat) -> _Fragment:
        least, most = min(node.least, _MOST_UNROLLED), node.most
        if most == 0:
            return _Fragment([], [], empty=True)
        if most is None or most > _MOST_UNROLLED:
            body = self.add(node.body)
            if body.empty and body.first and (least > 1 or most is not None):
                raise TooComplexError("it counts a part that may be empty")
            self._join(body.last, list(body.first))
            body.empty |= least == 0
            return body
        needed = self._sequence(self.add(node.body) for _ in range(least))
        rest = _Fragment([], [], empty=True)
        for _ in range(most - least):  # (x(x(x)?)?)?
            one = self.add(node.body)
            self._join(one.last, rest.first)
            rest = _Fragment(one.first + (rest.first if one.empty else []), one.last + rest.last, empty=True)
        return self._sequence(iter((needed, rest)))


def _judge(root: Node, *, within_look: bool = False) -> bool:
    """Returns True if the expression has a loop. Raises TooComplexError if matching may take more than quadratic time.

    Time is exponential if a loop can read the same text in two ways, and a later failure makes the engine try all of
    them. Time is cubic or worse if several loops in a row share characters before something that may fail. A loop after
    which the expression may end is harmless.

    ``within_look``: True if the expression is the body of a look-around assertion.
    """
    automaton = _Automaton()
    try:
        whole = automaton.add(root)
    except RecursionError:
        raise TooComplexError("it is nested too deep") from None
    ends = set(whole.last)
    loops = _components(automaton.follow)
    characters = _without_assertions(automaton)
    for loop in _components(characters):
        _judge_loop(automaton, characters, loop, ends)
    _judge_chain(automaton, loops, ends)
    _judge_ways(automaton, whole.first, loops)
    repeated = {p for loop in loops for p in loop}
    for at, look in automaton.looks:
        if _judge(look.body, within_look=True) and (at in repeated or within_look):
            raise TooComplexError("it repeats an assertion that has a repeated part itself")
    return bool(loops)


def _without_assertions(automaton: _Automaton) -> list[list[int]]:
    """Returns position -> the positions of characters that follow it, directly or after assertions."""
    reduced: list[list[int]] = []
    for p, following in enumerate(automaton.follow):
        edges: list[int] = []
        passed: dict[int, int] = {}
        waiting = [] if automaton.sets[p] is None else list(following)
        while waiting:
            q = waiting.pop()
            if automaton.sets[q] is not None:
                edges.append(q)
            elif passed.get(q, 0) < 2:  # the second time shows that there are two ways
                passed[q] = passed.get(q, 0) + 1
                waiting += automaton.follow[q]
        reduced.append(edges)
    return reduced


def _judge_loop(automaton: _Automaton, follow: Sequence[Sequence[int]], loop: Collection[int], ends: set[int]) -> None:
    """Raises TooComplexError if a loop can read the same text in two ways, before a part that may fail.

    Args:
        automaton: the automaton of the expression.
        follow: the positions after each position, without assertions.
        loop: the positions of the loop.
        ends: the positions at which the expression may end.
    """
    members = set(loop)
    if len(loop) > _MOST_IN_LOOP:
        raise TooComplexError(f"it repeats a part of {len(loop)} places")
    inside = {p: [q for q in follow[p] if q in members] for p in loop}
    twice = any(len(qs) > len(set(qs)) and not {p, *qs} <= ends for p, qs in inside.items())
    if twice or any(not positions <= ends for positions in _ambiguous(automaton, inside)):
        raise TooComplexError("it repeats a part that can match the same text in two ways")


def _ambiguous(automaton: _Automaton, inside: Mapping[int, Collection[int]]) -> Iterator[set[int]]:
    """Finds the ways in which a loop can read the same text twice. Yields the positions of each.

    It looks for cycles of pairs (p, q), the positions after two ways of reading the same text, that contain both a pair
    with p = q and one with different positions. ``inside``: position of a loop -> the positions after it.
    """
    pairs = {
        (p, q): [(a, b) for a in set(inside[p]) for b in set(inside[q]) if a == b or _overlap(automaton, a, b)]
        for p in inside
        for q in inside
        if p == q or _overlap(automaton, p, q)
    }
    numbers = {pair: i for i, pair in enumerate(pairs)}
    for component in _components([[numbers[pair] for pair in following] for following in pairs.values()]):
        component_pairs = [list(pairs)[i] for i in component]
        same = sum(p == q for p, q in component_pairs)
        if 0 < same < len(component_pairs):
            yield {p for pair in component_pairs for p in pair}


def _judge_chain(automaton: _Automaton, loops: list[list[int]], ends: set[int]) -> None:
    """Raises TooComplexError if two loops in a row share characters, before a part that may fail.

    Args:
        automaton: the automaton of the expression.
        loops: the positions of each loop.
        ends: the positions at which the expression may end.
    """
    for i, loop in enumerate(loops):
        if ends & set(loop):
            continue
        reachable = _reachable(automaton.follow, loop)
        for other in loops[:i] + loops[i + 1 :]:
            if ends & set(other) or not reachable & set(other):
                continue
            if any(_overlap(automaton, p, q) for p in loop for q in other):
                raise TooComplexError("two repeated parts in a row share characters, before something that may fail")


def _judge_ways(automaton: _Automaton, first: Sequence[int], loops: list[list[int]]) -> None:
    """Raises TooComplexError if too many paths through the automaton read the same text. A loop counts as one position.

    Args:
        automaton: the automaton of the expression.
        first: the positions at which the expression may begin.
        loops: the positions of each loop.
    """
    owner = list(range(len(automaton.sets)))
    for loop in loops:
        for p in loop:
            owner[p] = loop[0]
    follow: dict[int, list[int]] = {-1: list(first)}
    for p, following in enumerate(automaton.follow):
        follow.setdefault(owner[p], []).extend(q for q in following if owner[q] != owner[p])
    ways: dict[int, int] = {}
    waiting = [-1]
    while waiting:
        p = waiting[-1]
        if missing := [owner[q] for q in follow[p] if owner[q] not in ways]:
            waiting += missing
            continue
        waiting.pop()
        if p in ways:
            continue
        following = follow[p]
        if len(following) <= 1:
            ways[p] = max((ways[owner[q]] for q in following), default=1)
        else:
            ways[p] = max(
                sum(ways[owner[other]] for other in following if other == q or _overlap(automaton, q, other))
                for q in set(following)
            )
        if ways[p] > _MOST_WAYS:
            raise TooComplexError("it has too many ways to match the same text")


def _reachable(follow: Sequence[Sequence[int]], begin: Collection[int]) -> set[int]:
    seen, waiting = set[int](), list(begin)
    while waiting:
        for q in follow[waiting.pop()]:
            if q not in seen:
                seen.add(q)
                waiting.append(q)
    return seen


def _components(follow: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the strongly connected components with an edge of the graph ``follow`` (Tarjan 1972, without
    recursion).
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    components: list[list[int]] = []
    for begin in range(len(follow)):
        if begin in index:
            continue
        work = [(begin, iter(follow[begin]))]
        index[begin] = low[begin] = len(index)
        stack.append(begin)
        on_stack.add(begin)
        while work:
            p, edges = work[-1]
            for q in edges:
                if q not in index:
                    index[q] = low[q] = len(index)
                    stack.append(q)
                    on_stack.add(q)
                    work.append((q, iter(follow[q])))
                    break
                if q in on_stack:
                    low[p] = min(low[p], index[q])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[p])
                if low[p] == index[p]:
                    at = stack.index(p)
                    component = stack[at:]
                    del stack[at:]
                    on_stack.difference_update(component)
                    if len(component) > 1 or p in follow[p]:
                        components.append(component)
    return components


def _overlap(automaton: _Automaton, p: int, q: int) -> bool:
    """Returns True if two positions can read the same character, as far as the samples show."""
    one, other = automaton.sets[p], automaton.sets[q]
    if one is None or other is None:
        return False
    if one is other:
        return True
    if not one.known.isdisjoint(other.known):
        return True
    return any(a.test(c) for a, b in ((one, other), (other, one)) for c in b.known.intersection(b.samples))


# ASCII, and a character or two of each general category of Unicode.
_ALPHABET = "".join(map(chr, range(128))) + (
    "\x85\xa0\xa8\xa9\xab\xad\xb1\xb2\xb5\xbb\xbf\xc9\xdf\xe9\u0130\u0131\u01c5\u02b0\u0301\u0378\u0391\u0410\u0488"
    "\u05d0\u0663\u0903\u0e01\u16ee\u2013\u2018\u2019\u201c\u201d\u201e\u2026\u2028\u2029\u203f\u20ac\u2160\u2581\u3000"
    "\u3001\u3042\u30a2\u4e00\uac00\ue000\uff08\uff09\uff0c\U0001f642"
)
