"""The effect of a request's options on the logits of its next token, and the arrays of a step's sampled rows."""

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
"""Parameters, seed, and the index of the new token in its request's output."""


class LogitRules:
    """One request's rules: which tokens it has seen, and which are banned or favoured next.

    Args:
        params: what the request asks for.
        tokens: its own list: the prompt, to which new tokens are added, each followed by ``push``.
        end_tokens: those that end its text.
        bad_words: tokens of each of ``params.bad_words``.
        grammar: the answer's form.
        breakers: ``params.dry_sequence_breakers`` as tokens.

    Attributes:
        prompted: distinct tokens of the prompt, in any order, for a repetition penalty; empty without one.
        counted, counts: distinct tokens of the output, and how often each is there; empty without a penalty.
        counting: whether there is a penalty or a grammar, so that each new token must be given to ``push``.
        allowed: the only tokens that may come; empty for all.
        has_biases: whether ``biases`` ever says something.
        changing: whether any of these, or ``biases``, may be another for the next token.
        grammar: the answer's form, which says what may come; None without one.
        repeats: which tokens DRY penalizes; None without it.
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
        self.changing = self.counting or bool(self._words) or self._min_tokens > 0 or grammar is not None

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
        """None where the parameters have no such rules."""
        plain = params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0
        listed = params.logit_bias or params.allowed_token_ids or bad_words or params.min_tokens
        if plain and not listed and grammar is None and params.dry_multiplier == 0:
            return None
        return cls(params, tokens, end_tokens, bad_words, grammar, breakers)

    def push(self, token: int) -> None:
        """One more token of the output, which is in ``tokens`` by now."""
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
        """Up to ``most`` tokens that come next, as no other may; empty where others may, too."""
        if self.grammar is not None:
            return self.grammar.forced(most)
        return self.allowed * most if len(self.allowed) == 1 else ()

    def ahead(self, draft: Sequence[int]) -> list[LogitRules]:
        """They, and what they are behind each token of a draft."""
        rules = [self]
        for token in draft:
            rules.append(rules[-1]._behind(token) if self.changing else self)
        return rules

    def _behind(self, token: int) -> LogitRules:
        """Returns rules with one token more, which these rules don't have."""
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
        """Tokens whose logits change next, each once, and by how much; -inf is a ban."""
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
"""Options that a batch lacks where no row asks for them."""
PLAIN: Row = (SamplingParams(), 0, 0)
"""A row whose token nobody wants."""


def sampling_batch(
    rows: Sequence[Row],
    rules: Sequence[LogitRules | None] = (),
    top: int | None = None,
    scored: Mapping[int, Sequence[int]] = MappingProxyType({}),
    guided: Sequence[Guided] = (),
) -> SamplingBatch:
    """The arrays [R] of a step's rows.

    Args:
        rules: of each row's request; may be left out where none has any.
        top: so many top logprobs are wanted of some row, whatever the parameters say; None: none.
        guided: rows whose tokens grammars limit; their masks are computed from now on.
        scored: row -> the tokens whose logprobs are wanted in place of the drawn ones, of it and of those behind it.
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
    """The lists that the rules of a step's rows make for their next tokens.

    They go into the step's batch, and into those of later steps with the same rows. This is Python between two steps:
    it has no loops over tokens, and few over rows.

    Args:
        batch: has the rows' parameters.
        rules: of each row's request.
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
        """Sets the lists that may be others than a step ago."""
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
    """Returns the start of each row's list, and the end of the last. In Python: numpy takes longer for so few."""
    return np.fromiter(accumulate(map(len, rows), initial=0), _INT32, len(rows) + 1)


def _joined(rows: Sequence[array[int]]) -> Int32Array:
    return np.frombuffer(b"".join(rows), _INT32)
