"""What a request's options do to the logits of its next token, and the arrays of a step's sampled rows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from enginewright.plugins.shared.contracts import Int32Array, SamplingBatch

from .sampling import SamplingParams

Row = tuple[SamplingParams, int, int]
"""Parameters, seed, and the index of the new token in its request's output."""


class LogitRules:
    """Of one request: which tokens it has seen, and which are banned or favoured next. Grows with its tokens.

    Attributes:
        seen: distinct tokens of prompt and output, in any order, for a repetition penalty.
        counted, counts: distinct tokens of the output, and how often each is there, for the other penalties.
        allowed: the only tokens that may come; empty for all.
        changing: whether any of these, or ``biases``, may be another for the next token.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_tokens: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.seen, self.counted, self.counts = array("i"), array("i"), array("i")
        self.allowed = array("i", sorted(set(params.allowed_token_ids)))
        self._seen = set(prompt) if params.repetition_penalty != 1 else None
        self.seen.extend(self._seen or ())
        counts = params.frequency_penalty != 0 or params.presence_penalty != 0
        self._places: dict[int, int] | None = {} if counts else None
        self._min_tokens = params.min_tokens
        self._ends = dict.fromkeys(end_tokens, -math.inf)
        always = {word[0]: -math.inf for word in bad_words if len(word) == 1}
        self._always = dict(params.logit_bias) | always
        self._words = [list(word) for word in bad_words if len(word) > 1]
        self._kept = self._arrays(self._always)
        self.changing = self._seen is not None or counts or bool(self._words) or self._min_tokens > 0

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        end_tokens: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> LogitRules | None:
        """None where the parameters have no such rules."""
        plain = params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0
        if plain and not (params.logit_bias or params.allowed_token_ids or bad_words or params.min_tokens):
            return None
        return cls(params, prompt, end_tokens, bad_words)

    def push(self, token: int) -> None:
        """One more token of the output."""
        if self._seen is not None and token not in self._seen:
            self._seen.add(token)
            self.seen.append(token)
        if self._places is not None:
            place = self._places.setdefault(token, len(self.counted))
            if place == len(self.counted):
                self.counted.append(token)
                self.counts.append(1)
            else:
                self.counts[place] += 1

    def biases(self, tokens: Sequence[int], output_length: int) -> tuple[array[int], array[float]]:
        """Tokens whose logits change, each once, and by how much; -inf is a ban. ``tokens``: prompt and output."""
        banned: dict[int, float] = {}
        if output_length < self._min_tokens:
            banned |= self._ends
        for word in self._words:
            if list(tokens[-len(word) + 1 :]) == word[:-1]:
                banned[word[-1]] = -math.inf
        return self._arrays(self._always | banned) if banned else self._kept

    @staticmethod
    def _arrays(biases: dict[int, float]) -> tuple[array[int], array[float]]:
        return array("i", biases), array("f", biases.values())


Ruled = tuple[LogitRules | None, Sequence[int], int]
"""A row's rules, its request's tokens so far, and how many of them are its output."""


NO_RULES: Ruled = (None, (), 0)
PLAIN: Row = (SamplingParams(), 0, 0)
"""A row whose token nobody wants."""


def sampling_batch(rows: Sequence[Row], ruled: Sequence[Ruled] = (), top: int = 0) -> SamplingBatch:
    """The arrays [R] of a step's rows.

    Args:
        ruled: may be left out where no row has rules.
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
    set_lists(batch, ruled)
    return batch


def set_lists(batch: SamplingBatch, ruled: Sequence[Ruled]) -> None:
    """Puts what the rows' rules say of their next tokens into a batch."""
    rules = [one for one, _, _ in ruled if one is not None]
    if not rules:
        return
    each = [one for one, _, _ in ruled]
    if batch.repetition_penalty is not None:
        batch.seen_start, batch.seen = _packed([() if r is None else r.seen for r in each])
    if batch.frequency_penalty is not None or batch.presence_penalty is not None:
        batch.counted_start, batch.counted = _packed([() if r is None else r.counted for r in each])
        _, batch.counts = _packed([() if r is None else r.counts for r in each])
    if any(r.allowed for r in rules):
        batch.allowed_start, batch.allowed = _packed([() if r is None else r.allowed for r in each])
    biases = [((), ()) if r is None else r.biases(tokens, length) for r, tokens, length in ruled]
    if any(len(ids) for ids, _ in biases):
        batch.biased_start, batch.biased = _packed([ids for ids, _ in biases])
        batch.bias = np.concatenate([np.asarray(values, np.float32) for _, values in biases])
    else:
        batch.biased_start = batch.biased = batch.bias = None


def _packed(rows: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    """Where each row's begins, and all of them."""
    start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.concatenate([np.asarray(row, np.int32) for row in rows])
