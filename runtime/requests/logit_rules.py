"""The options of a request that change the logits of its next token, and the sampling arrays of a step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from ..shared.contracts import NO_TOKEN, SAMPLING_OPTIONS, Int32Array, SamplingBatch
from .repeats import NO_BIASES, Breakers, Repeats
from .sampling import SamplingParams
from .structured import Grammar, Guided, Masks

Row = tuple[SamplingParams, int, int]
"""A row of a step: sampling parameters, seed, and the index of the new token in its request's output."""


class LogitRules:
    """The rules of one request that ban, limit or favour its next tokens.

    Args:
        params: the request's parameters.
        tokens: the request's list of tokens, at first its prompt. The request appends new tokens, and calls ``push``.
        end_tokens: tokens that end the request's text.
        bad_words: the tokens of each of ``params.bad_words``.
        grammar: the grammar of the answer; None for none.
        breakers: ``params.dry_sequence_breakers`` as tokens.

    Attributes:
        prompted: distinct tokens of the prompt, in any order; empty without a repetition penalty.
        counted, counts: distinct tokens of the output, and how often each occurs; empty without a penalty.
        counting: True if ``push`` must be called with each new token.
        allowed: the only allowed tokens; empty if all are allowed.
        has_biases: True if ``biases`` may return any token.
        changing: True if any rule may change with the next token.
        needs_tokens: True if a rule depends on the output's tokens, and not on their number alone.
        grammar: the grammar of the answer; None without one.
        repeats: the state of DRY; None without it.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: list[int],
        end_tokens: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        breakers: Breakers = MappingProxyType({}),
    ) -> None:
        self._tokens, self._prompt_length = tokens, len(tokens)
        self.grammar = grammar
        self.prompted, self.counted, self.counts = array("i"), array("i"), array("i")
        self.allowed = array("i", sorted(set(params.allowed_token_ids)))
        # Token -> its place in ``counted``; one look-up a token, as this is Python between two steps.
        self._places: dict[int, int] = {}
        if params.repetition_penalty != 1:
            self.prompted.extend(set(tokens))
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._counted = penalties != (1, 0, 0)
        self.repeats = Repeats.from_options(params, tokens, breakers)
        self.counting = self._counted or grammar is not None or self.repeats is not None
        self._min_tokens = params.min_tokens
        self._ends = dict.fromkeys(end_tokens, -math.inf)
        always = {word[0]: -math.inf for word in bad_words if len(word) == 1}
        self._always = dict(params.logit_bias) | always
        self._words = [list(word) for word in bad_words if len(word) > 1]
        self._kept = self._arrays(self._always)
        self.has_biases = bool(self._always or self._words or self._min_tokens)
        self.needs_tokens = self.counting or bool(self._words)
        self.changing = self.needs_tokens or self._min_tokens > 0

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        tokens: list[int],
        end_tokens: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        breakers: Breakers = MappingProxyType({}),
    ) -> LogitRules | None:
        """Returns the rules of a request; None if its parameters have none. The arguments are those of the class."""
        plain = params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0
        listed = params.logit_bias or params.allowed_token_ids or bad_words or params.min_tokens
        if plain and not listed and grammar is None and params.dry_multiplier == 0:
            return None
        return cls(params, tokens, end_tokens, bad_words, grammar, breakers)

    def push(self, token: int) -> None:
        """Updates the rules for a new token of the output, which the caller has appended to ``tokens``."""
        if self.grammar is not None:
            self.grammar.push(token)
        if self.repeats is not None:
            self.repeats.push(token)
        if not self._counted:
            return
        place = self._places.get(token)
        if place is not None:
            self.counts[place] += 1
            return
        self._places[token] = len(self.counted)
        self.counted.append(token)
        self.counts.append(1)

    def forced(self, most: int) -> Sequence[int]:
        """Returns up to ``most`` next tokens if the rules leave no choice; empty if several tokens are allowed."""
        if self.grammar is not None:
            return self.grammar.forced(most)
        return self.allowed * most if len(self.allowed) == 1 else ()

    def ahead(self, draft: Sequence[int]) -> list[LogitRules]:
        """Returns these rules, then the rules after each token of a draft: len(draft) + 1 objects."""
        rules = [self]
        for token in draft:
            rules.append(rules[-1]._behind(token) if self.changing else self)
        return rules

    def _behind(self, token: int) -> LogitRules:
        """Returns a copy of the rules as they are after one more token, without the grammar:

        ``Masks`` follows drafts by itself.
        """
        other = copy(self)
        tail_length = max([1, *(len(word) - 1 for word in self._words)])  # so many last tokens are looked at
        other._tokens = [*self._tokens[-tail_length:], token]
        other._prompt_length = self._prompt_length + len(other._tokens) - len(self._tokens) - 1
        other.grammar = None  # the masks of a step are made with its drafts
        if self._counted:
            other._places, other.counted, other.counts = self._places.copy(), self.counted[:], self.counts[:]
        if self.repeats is not None:
            other.repeats = copy(self.repeats)
        if self._counted or self.repeats is not None:
            other.push(token)
        return other

    def biases(self) -> tuple[array[int], array[float]]:
        """Returns (tokens, values): each token whose next logit changes, once, and the value to add to it. -inf bans
        it.
        """
        tokens, banned = self._tokens, dict[int, float]()
        if len(tokens) - self._prompt_length < self._min_tokens:
            banned |= self._ends
        for word in self._words:
            if tokens[-len(word) + 1 :] == word[:-1]:
                banned[word[-1]] = -math.inf
        return self._arrays(self._always | banned) if banned else self._kept

    @staticmethod
    def _arrays(biases: dict[int, float]) -> tuple[array[int], array[float]]:
        return array("i", biases), array("f", biases.values())


NOTHING: array[Any] = array("i")
_INT32 = np.dtype(np.int32)
_RARE = (
    *("typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("top_n_sigma", "xtc_probability"),
)
"""The options whose array a batch omits if no row uses them."""
PLAIN: Row = (SamplingParams(), 0, 0)
"""The sampling options of a row whose drawn token is ignored."""


def sampling_batch(
    rows: Sequence[Row],
    rules: Sequence[LogitRules | None] = (),
    top: int | None = None,
    scored: Mapping[int, Sequence[int]] = MappingProxyType({}),
    guided: Sequence[Guided] = (),
) -> SamplingBatch:
    """Returns the sampling arrays [R] of a step with R rows.

    Args:
        rows: parameters, seed and output index of each row.
        rules: the rules of each row's request; may be empty if no row has any.
        top: the number of top logprobs to compute, unless parameters ask for more; None for those of parameters alone.
        scored: row r -> known tokens; the logprobs of these are computed at rows r, r + 1, ... instead of the drawn
            token's.
        guided: rows that are limited by grammars; other threads begin to compute their masks.
    """
    counts = [p.logprobs for p, _, _ in rows if p.logprobs is not None] + ([] if top is None else [top])
    batch = SamplingBatch(
        temperature=np.array([p.temperature for p, _, _ in rows], np.float32),
        top_k=np.array([p.top_k for p, _, _ in rows], np.int32),
        top_p=np.array([p.top_p for p, _, _ in rows], np.float32),
        min_p=np.array([p.min_p for p, _, _ in rows], np.float32),
        seed=np.array([seed for _, seed, _ in rows], np.uint64),
        counter=np.array([counter for _, _, counter in rows], np.uint64),
        logprobs=max(counts, default=None),
    )
    for name in _RARE:
        off = SAMPLING_OPTIONS[name]
        if any(getattr(p, name) != off for p, _, _ in rows):
            setattr(batch, name, np.array([getattr(p, name) for p, _, _ in rows], np.float32))
    if batch.xtc_probability is not None:
        batch.xtc_threshold = np.array([p.xtc_threshold for p, _, _ in rows], np.float32)
    if any(rules):
        RowLists(batch, rules)
    if guided:
        batch.masks = Masks(guided, len(rows))
    if scored:
        batch.scored = np.full(len(rows), NO_TOKEN, np.int32)
        for row, tokens in scored.items():
            batch.scored[row : row + len(tokens)] = tokens
    return batch


class RowLists:
    """Builds the lists of tokens that the rules of a step's rows need: counted, banned, biased and allowed tokens.

    The lists go into the step's batch, and are updated for later steps with the same rows. The code runs between two
    steps, so it has no loop over tokens, and few over rows.

    Args:
        batch: the batch with the rows' parameters; the lists are set in it.
        rules: the rules of each row's request; None for a row without rules.
    """

    def __init__(self, batch: SamplingBatch, rules: Sequence[LogitRules | None]) -> None:
        self._rules = rules
        self._counted: list[array[int]] = []
        self._counts: list[array[int]] = []
        self._seen: list[array[int]] = []  # of each row, those of its prompt, then those of its output
        if batch.repetition_penalty is not None:
            pairs = [(NOTHING, NOTHING) if r is None else (r.prompted, r.counted) for r in rules]
            self._seen = [tokens for pair in pairs for tokens in pair]
            self._prompted_start = _starts([prompted for prompted, _ in pairs])
        if batch.frequency_penalty is not None or batch.presence_penalty is not None:
            self._counts = [NOTHING if r is None else r.counts for r in rules]
        if self._seen or self._counts:
            self._counted = [NOTHING if r is None else r.counted for r in rules]
        self._last = -1  # distinct tokens of all outputs, a step ago
        if any(r is not None and r.allowed for r in rules):
            allowed = [NOTHING if r is None else r.allowed for r in rules]
            batch.allowed_start, batch.allowed = _starts(allowed), _joined(allowed)
        self._biased = any(r is not None and r.has_biases for r in rules)
        self._repeats = [None if r is None else r.repeats for r in rules]
        self._dry = any(repeats is not None for repeats in self._repeats)
        self.put(batch)

    def put(self, batch: SamplingBatch) -> None:
        """Sets in ``batch`` the lists that may have changed since the last step."""
        if self._counts:
            batch.counts = _joined(self._counts)
        if self._counted:
            counted = _joined(self._counted)
            if len(counted) != self._last:  # they only grow: otherwise all are as they were
                self._last = len(counted)
                starts = _starts(self._counted)
                if self._counts:
                    batch.counted_start, batch.counted = starts, counted
                if self._seen:
                    batch.seen_start, batch.seen = self._prompted_start + starts, _joined(self._seen)
        if self._biased:
            biases = [(NOTHING, NOTHING) if r is None else r.biases() for r in self._rules]
            tokens = [ids for ids, _ in biases]
            batch.biased_start, batch.biased = _starts(tokens), _joined(tokens)
            batch.bias = np.frombuffer(b"".join([values for _, values in biases]), np.float32)
            if not len(batch.biased):
                batch.biased_start = batch.biased = batch.bias = None
        if self._dry:
            lists = [NO_BIASES if repeats is None else repeats.biases() for repeats in self._repeats]
            batch.dry_start = batch.dry = batch.dry_bias = None
            if any(len(tokens) for tokens, _ in lists):
                batch.dry_start = np.cumsum([0, *(len(tokens) for tokens, _ in lists)]).astype(np.int32)
                batch.dry = np.concatenate([tokens for tokens, _ in lists])
                batch.dry_bias = np.concatenate([values for _, values in lists])


def _starts(rows: Sequence[array[int]]) -> Int32Array:
    """Returns the start of each row's list in the concatenated list, then its end."""
    return np.fromiter(accumulate(map(len, rows), initial=0), _INT32, len(rows) + 1)


def _joined(rows: Sequence[array[int]]) -> Int32Array:
    return np.frombuffer(b"".join(rows), _INT32)
