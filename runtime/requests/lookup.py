"""Guesses at the next tokens: what followed the last few before, in a request's own text or in past answers.

Prompt lookup decoding (Saxena 2023; LLMA: Yang et al. 2023), and its use of past answers (SuffixDecoding: Oliaro et al.
2024). Texts that copy, edit or repeat themselves or others gain by it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

OWN_GRAMS = (8, 4, 3, 2)
PAST_GRAMS = (8, 4)
"""So many last tokens are looked up, the longest first."""
PAST_TOKENS = 1 << 15
"""Of past answers, kept for each tenant; about 150 bytes each."""
PAST_TENANTS = 8
"""Tenants whose past answers are kept: those that ended a request last."""

MODEL, FORCED = 0, 1
"""Kinds of guesses: another model's, and tokens that have to come; see ``Guess.by``."""

_EXPECTED = {8: 0.8, 4: 0.6, 3: 0.4, 2: 0.25, MODEL: 0.7, FORCED: 1.0}
"""How often a token is right behind so many that are the same, or of a model's, until that is measured."""
_WEIGHT = 4.0
"""Of what was expected, in tokens."""
_MEMORY = 100.0
"""Tokens that a share goes back to."""
_FORGET = 0.98
"""What is left of a share's weight after a guess that wasn't worth a draft, so that it is tried again some day."""
CREDIT = 1.0
"""Steps' time that guesses of a kind may cost before any of their tokens was right."""
MORE_CREDIT = 0.003
"""And more for each step, so that what was wrong is tried again."""
_MOST_CREDIT = 3.0
"""Guesses that were right earn credit, up to so many steps' time: a long run of them can't pay for many wrong ones."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow.

    Attributes:
        tokens: at least one.
        by: how they were found, for statistics: how many tokens are the same before them, and less than 0 so many of a
            past answer; or ``MODEL`` or ``FORCED``.
    """

    tokens: Sequence[int]
    by: int


_BITS = 32
"""Of a token in a number that stands for a few."""
_MASKS = {count: (1 << _BITS * count) - 1 for count in OWN_GRAMS}


class Lookup:
    """Guesses by what a request's own tokens have, a list that grows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._known = 0  # of these places, what comes before is in ``_places``
        self._last = 0  # the last eight tokens of these as a number, each plus one; so fewer are a smaller number
        self._places: dict[int, int] = {}  # a few tokens as a number -> where the last such ones end

    def next(self, most: int) -> Guess | None:
        """Up to ``most`` tokens."""
        tokens, end, places, last = self._tokens, len(self._tokens), self._places, self._last
        eight, four, three, two = _MASKS.values()
        for place in range(self._known, end):
            places[last] = places[last & four] = places[last & three] = places[last & two] = place
            last = (last << _BITS | tokens[place] + 1) & eight
        self._known, self._last = end, last
        for count, mask in _MASKS.items():
            if end > count and (place := places.get(last & mask, 0)):
                # What follows may repeat itself up to the end.
                return Guess([tokens[place + i % (end - place)] for i in range(most)], count)
        return None


class RightTokens:
    """How often guesses were right, by their kind (``Guess.by``): what was expected, and what was seen."""

    def __init__(self, before: RightTokens | None = None) -> None:
        self._before = before
        self._seen: dict[int, list[float]] = {}  # kind -> right tokens, tokens

    def share(self, kind: int) -> float:
        """Of tokens of such a guess, each behind right ones."""
        expected = _EXPECTED[abs(kind)] if self._before is None else self._before.share(kind)
        right, tokens = self._seen.get(kind, (0.0, 0.0))
        return (right + _WEIGHT * expected) / (tokens + _WEIGHT)

    def saw(self, kind: int, right: int, tokens: int) -> None:
        """Of so many tokens, of which the last alone may be wrong."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        kept = min(1.0, _MEMORY / max(seen[1] + tokens, 1))
        seen[0], seen[1] = (seen[0] + right) * kept, (seen[1] + tokens) * kept

    def forget(self, kind: int) -> None:
        """A guess of this kind wasn't worth it."""
        if (seen := self._seen.get(kind)) is not None:
            seen[0], seen[1] = seen[0] * _FORGET, seen[1] * _FORGET


class Credit:
    """What guesses may cost, by their kind: in plain steps' time, and those that were right have earned it.

    Attributes:
        steps: so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._left: dict[int, tuple[float, int]] = {}  # kind -> credit, after so many steps

    def of(self, kind: int) -> float:
        """Of guesses of this kind now."""
        found, steps = self._left.get(kind, (CREDIT, self.steps))
        return found + MORE_CREDIT * (self.steps - steps)

    def pay(self, kind: int, steps: float) -> None:
        """A guess cost so much, or has saved it where that is less than 0."""
        self._left[kind] = min(self.of(kind) - steps, _MOST_CREDIT), self.steps


class Guesses:
    """Of one request.

    Attributes:
        lookup: its own tokens.
        right: how often its guesses were right; before there were many, how often all requests' were.
        last: what its draft was.
        found: the step in which it had one, or began.
        next_look: the step in which to look for one again.
    """

    def __init__(self, tokens: Sequence[int], right: RightTokens, step: int) -> None:
        self.lookup, self.right, self.last = Lookup(tokens), RightTokens(right), Guess((), 0)
        self.found = self.next_look = step


def next_look(step: int, found: int) -> int:
    """The step in which to look for guesses again, after one in which there was none; the last was found in ``found``.

    Looking takes time, so where none was found for long not each step looks. What repeats itself is found later, too.
    Requests look in the same steps.
    """
    misses = step - found
    every = 1 if misses < 4 else min(1 << misses.bit_length() - 2, 16)
    return (step // every + 1) * every


class PastAnswers:
    """The last answers of each tenant, and guesses by them. A tenant's guesses come from its own alone."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Answers] = OrderedDict()

    def add(self, tenant: str, tokens: Sequence[int], answer: int) -> None:
        """A request ended; its answer begins at ``answer`` of its tokens."""
        if len(tokens) - answer < 2:
            return
        if tenant not in self._tenants:
            self._tenants[tenant] = _Answers()
            if len(self._tenants) > PAST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        # A few tokens of its prompt too, so that the same question finds the answer's first.
        self._tenants[tenant].add(array("i", tokens[max(answer - PAST_GRAMS[0], 0) : answer + PAST_TOKENS // 2]))

    def forget(self, tenant: str | None) -> None:
        """Of one tenant or of all."""
        for name in [tenant] if tenant is not None else list(self._tenants):
            self._tenants.pop(name, None)

    def next(self, tenant: str, tokens: Sequence[int], most: int, longer_than: int) -> Guess | None:
        """Up to ``most`` tokens behind more than ``longer_than`` that are the same."""
        answers = self._tenants.get(tenant)
        return None if answers is None else answers.next(tokens, most, longer_than)


class _Answers:
    """Of one tenant: ``PAST_TOKENS`` tokens at most."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, array[int]] = OrderedDict()
        self._places: dict[int, int] = {}  # a hash of a few tokens -> the last answer that has them, and where they end
        self._count = self._tokens = 0

    def add(self, answer: array[int]) -> None:
        self._count += 1
        self._kept[self._count] = answer
        self._tokens += len(answer)
        for key, end in _hashes(answer):
            self._places[key] = self._count << 32 | end
        while self._tokens > PAST_TOKENS:
            number, oldest = self._kept.popitem(last=False)
            self._tokens -= len(oldest)
            for key, _ in _hashes(oldest):
                if self._places.get(key, 0) >> 32 == number:
                    del self._places[key]

    def next(self, tokens: Sequence[int], most: int, longer_than: int) -> Guess | None:
        for count in PAST_GRAMS:
            last = tuple(tokens[-count:])
            if count <= longer_than or (place := self._places.get(hash(last))) is None:
                continue
            answer, end = self._kept[place >> 32], place & 0xFFFFFFFF
            if tuple(answer[end - count : end]) == last:
                return Guess(answer[end : end + most], -count)
        return None


def _hashes(answer: array[int]) -> list[tuple[int, int]]:
    """Of every few tokens that others follow, and where they end."""
    grams = ((count, end) for count in PAST_GRAMS for end in range(count, len(answer)))
    return [(hash(tuple(answer[end - count : end])), end) for count, end in grams]
