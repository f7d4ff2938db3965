"""What a request's options do to the logits of its next token, and the arrays of a step's sampled rows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from enginewright.plugins.shared.contracts import Int32Array, SamplingBatch

from .sampling import SamplingParams

Row = tuple[SamplingParams, int, int]
"""Parameters, seed, and the index of the new token in its request's output."""


_NOT_COUNTED = -1


class LogitRules:
    """Of one request: which tokens it has seen, and which are banned or favoured next.

    Args:
        params: what the request asks for.
        tokens: its own list: the prompt, to which new tokens are added, each followed by ``push``.
        end_tokens: those that end its text.
        bad_words: tokens of each of ``params.bad_words``.

    Attributes:
        seen: distinct tokens of prompt and output, in any order, for a repetition penalty.
        counted, counts: distinct tokens of the output, and how often each is there, for the other penalties.
        allowed: the only tokens that may come; empty for all.
        has_biases: whether ``biases`` ever says something.
        more: whether it, or ``allowed``, does.
        changing: whether any of these, or ``biases``, may be another for the next token.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: list[int],
        end_tokens: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self._tokens, self._prompt_length = tokens, len(tokens)
        self.seen, self.counted, self.counts = array("i"), array("i"), array("i")
        self.allowed = array("i", sorted(set(params.allowed_token_ids)))
        self._sees = params.repetition_penalty != 1
        self._counts = params.frequency_penalty != 0 or params.presence_penalty != 0
        # Token -> its place in ``counted``; one look-up a token, as this is Python between two steps.
        self._places: dict[int, int] | None = None
        if self._sees or self._counts:
            self._places = dict.fromkeys(set(tokens), _NOT_COUNTED) if self._sees else {}
            self.seen.extend(self._places)
        self._min_tokens = params.min_tokens
        self._ends = dict.fromkeys(end_tokens, -math.inf)
        always = {word[0]: -math.inf for word in bad_words if len(word) == 1}
        self._always = dict(params.logit_bias) | always
        self._words = [list(word) for word in bad_words if len(word) > 1]
        self._kept = self._arrays(self._always)
        self.has_biases = bool(self._always or self._words or self._min_tokens)
        self.more = self.has_biases or bool(self.allowed)
        self.changing = self._places is not None or bool(self._words) or self._min_tokens > 0

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        tokens: list[int],
        end_tokens: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> LogitRules | None:
        """None where the parameters have no such rules."""
        plain = params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0
        if plain and not (params.logit_bias or params.allowed_token_ids or bad_words or params.min_tokens):
            return None
        return cls(params, tokens, end_tokens, bad_words)

    def push(self, token: int) -> None:
        """One more token of the output, which is in ``tokens`` by now."""
        if (places := self._places) is None:
            return
        place = places.get(token)
        if place is not None and place >= 0:
            self.counts[place] += 1
            return
        if place is None and self._sees:
            self.seen.append(token)
        if self._counts:
            places[token] = len(self.counted)
            self.counted.append(token)
            self.counts.append(1)
        else:
            places[token] = _NOT_COUNTED

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
PLAIN: Row = (SamplingParams(), 0, 0)
"""A row whose token nobody wants."""


def sampling_batch(rows: Sequence[Row], rules: Sequence[LogitRules | None] = (), top: int = 0) -> SamplingBatch:
    """The arrays [R] of a step's rows.

    Args:
        rules: of each row's request; may be left out where none has any.
        top: so many top logprobs are wanted of some row, whatever the parameters say; 0: none.
    """
    wanted = [p.logprobs for p, _, _ in rows if p.logprobs is not None] + [top] * (top > 0)
    batch = SamplingBatch(
        temperature=np.array([p.temperature for p, _, _ in rows], np.float32),
        top_k=np.array([p.top_k for p, _, _ in rows], np.int32),
        top_p=np.array([p.top_p for p, _, _ in rows], np.float32),
        min_p=np.array([p.min_p for p, _, _ in rows], np.float32),
        seed=np.array([seed for _, seed, _ in rows], np.uint64),
        counter=np.array([counter for _, _, counter in rows], np.uint64),
        logprobs=max(wanted, default=None),
    )
    for name, off in (("typical_p", 1), ("repetition_penalty", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
        if any(getattr(p, name) != off for p, _, _ in rows):
            setattr(batch, name, np.array([getattr(p, name) for p, _, _ in rows], np.float32))
    set_lists(batch, rules)
    return batch


def set_lists(batch: SamplingBatch, rules: Sequence[LogitRules | None]) -> None:
    """Puts what the rows' rules say of their next tokens into a batch. This is Python between two steps: no loops over
    tokens."""
    if not any(rules):
        return
    if batch.repetition_penalty is not None:
        batch.seen_start, batch.seen = _packed([NOTHING if r is None else r.seen for r in rules])
    if batch.frequency_penalty is not None or batch.presence_penalty is not None:
        batch.counted_start, batch.counted = _packed([NOTHING if r is None else r.counted for r in rules])
        batch.counts = _joined([NOTHING if r is None else r.counts for r in rules])
    if not any(r is not None and r.more for r in rules):
        return
    if any(r is not None and r.allowed for r in rules):
        batch.allowed_start, batch.allowed = _packed([NOTHING if r is None else r.allowed for r in rules])
    if any(r is not None and r.has_biases for r in rules):
        biases = [(NOTHING, NOTHING) if r is None else r.biases() for r in rules]
        batch.biased_start, batch.biased = _packed([ids for ids, _ in biases])
        batch.bias = np.frombuffer(b"".join([values for _, values in biases]), np.float32)
        if not len(batch.biased):
            batch.biased_start = batch.biased = batch.bias = None


def _packed(rows: Sequence[array[int]]) -> tuple[Int32Array, Int32Array]:
    """Where each row's begins, and all of them."""
    starts = accumulate(map(len, rows), initial=0)  # in Python: an array of so few costs numpy more
    return np.fromiter(starts, np.int32, len(rows) + 1), _joined(rows)


def _joined(rows: Sequence[array[int]]) -> Int32Array:
    return np.frombuffer(b"".join(rows), np.int32)
