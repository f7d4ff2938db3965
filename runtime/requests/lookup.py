"""Proposers that cost no time: forced tokens, and tokens that followed the same n-gram earlier.

Prompt lookup decoding (Saxena 2023; LLMA: Yang et al. 2023) searches a request's own text for n-grams; SuffixDecoding
(Oliaro et al. 2024) also searches past answers. It helps for texts that copy, edit or repeat earlier text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from .proposers import NOTHING, Proposal, ProposalKind, Proposer
from .request import Generation, Request

PAST_TOKENS = 1 << 15
"""Tokens of past answers that are kept for each tenant; about 150 bytes each."""
PAST_TENANTS = 8
"""The number of tenants whose past answers are kept: those with the last ended requests."""
OWN_KINDS = {
    8: ProposalKind("own_text", 8, 0.8),
    4: ProposalKind("own_text", 4, 0.6),
    3: ProposalKind("own_text", 3, 0.4),
    2: ProposalKind("own_text", 2, 0.25),
}
"""The length of an n-gram that occurs earlier in the request's own text -> the kind of the proposal from there."""
PAST_KINDS = {8: ProposalKind("past_answers", 8, 0.8), 4: ProposalKind("past_answers", 4, 0.6)}
"""Length of an n-gram -> the kind of the proposals that followed such an n-gram in a past answer."""
FORCED = ProposalKind("forced", 1 << 10, 1.0)
"""The kind of proposals that the rules of a request force."""


class ForcedTokens(Proposer):
    """Proposes the next tokens if a request's rules leave no choice."""

    name = FORCED.source

    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        forced = [() if request.rules is None else request.rules.forced(most) for request, most in wanted]
        return [Proposal(tokens, FORCED) if tokens else NOTHING for tokens in forced]


class OwnText(Proposer):
    """Proposes the tokens that followed a request's last n-gram earlier in its own text."""

    name = "own_text"

    def __init__(self) -> None:
        self._lookups: WeakKeyDictionary[Request, NgramLookup] = WeakKeyDictionary()

    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        lookups = [self._lookups.setdefault(request, NgramLookup(request.tokens)) for request, _ in wanted]
        return [lookup.next(most) for lookup, (_, most) in zip(lookups, wanted, strict=True)]


_BITS = 32
"""Bits of a token in the integer that represents an n-gram."""
_MASKS = {count: (1 << _BITS * count) - 1 for count in OWN_KINDS}


class NgramLookup:
    """An index of the n-grams of a growing list of tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._known = 0  # of these places, what comes before is in ``_places``
        self._last = 0  # the last eight tokens of these as a number, each plus one; so fewer are a smaller number
        self._places: dict[int, int] = {}  # an n-gram as a number -> where the last such one ends

    def next(self, most: int) -> Proposal:
        """Returns up to ``most`` tokens that followed an earlier copy of the last 8, 4, 3 or 2 tokens."""
        tokens, end, places, last = self._tokens, len(self._tokens), self._places, self._last
        eight, four, three, two = _MASKS.values()
        for place in range(self._known, end):
            places[last] = places[last & four] = places[last & three] = places[last & two] = place
            last = (last << _BITS | tokens[place] + 1) & eight
        self._known, self._last = end, last
        for count, mask in _MASKS.items():
            if end > count and (place := places.get(last & mask, 0)):
                # What follows may repeat itself up to the end.
                return Proposal([tokens[place + i % (end - place)] for i in range(most)], OWN_KINDS[count])
        return NOTHING


class PastAnswers(Proposer):
    """Proposes the tokens that followed a request's last n-gram in past answers to the same tenant."""

    name = "past_answers"

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Answers] = OrderedDict()

    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        return [self.next(request.tenant, request.tokens, most) for request, most in wanted]

    def release(self, request: Request) -> None:
        if request.finish_reason in ("stop", "length"):  # its answer may come again
            self.add(request.tenant, request.tokens, request.prompt_length)

    def forget(self, tenant: str | None) -> None:
        for name in list(self._tenants) if tenant is None else (tenant,):
            self._tenants.pop(name, None)

    def add(self, tenant: str, tokens: Sequence[int], answer: int) -> None:
        """Adds an answer to the tenant's past answers. It begins at index ``answer`` of ``tokens``."""
        if len(tokens) - answer < 2:
            return
        if tenant not in self._tenants:
            self._tenants[tenant] = _Answers()
            if len(self._tenants) > PAST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        # A few tokens of its prompt too, so that the same question finds the answer's first.
        self._tenants[tenant].add(array("i", tokens[max(answer - max(PAST_KINDS), 0) : answer + PAST_TOKENS // 2]))

    def next(self, tenant: str, tokens: Sequence[int], most: int) -> Proposal:
        """Returns up to ``most`` tokens that followed the last n-gram of ``tokens`` in the tenant's past answers."""
        answers = self._tenants.get(tenant)
        return NOTHING if answers is None else answers.next(tokens, most)


class _Answers:
    """The last answers to one tenant, at most ``PAST_TOKENS`` tokens, with an index of their n-grams."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, array[int]] = OrderedDict()
        self._places: dict[int, int] = {}  # an n-gram's hash -> the last answer that has it, and where it ends
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

    def next(self, tokens: Sequence[int], most: int) -> Proposal:
        for count, kind in PAST_KINDS.items():
            last = tuple(tokens[-count:])
            if (place := self._places.get(hash(last))) is None:
                continue
            answer, end = self._kept[place >> 32], place & 0xFFFFFFFF
            if tuple(answer[end - count : end]) == last:
                return Proposal(answer[end : end + most], kind)
        return NOTHING


def _hashes(answer: array[int]) -> list[tuple[int, int]]:
    """Returns (hash, end index) of each n-gram of an answer that has a token after it."""
    grams = ((count, end) for count in PAST_KINDS for end in range(count, len(answer)))
    return [(hash(tuple(answer[end - count : end])), end) for count, end in grams]
