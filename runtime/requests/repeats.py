"""DRY: a penalty for tokens that would continue a repetition of earlier text.

It was published as p-e-w, "DRY: A modern repetition penalty" (text-generation-webui, 2024); llama.cpp's sampler is the
reference for the details. If the last n tokens also occur earlier, the token after that earlier copy loses
``multiplier * base ** (n - allowed_length)`` of its logit; n must be at least ``allowed_length``. A repetition can't
extend across a sequence breaker, and breakers of one token aren't penalized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from ..shared.contracts import FloatArray, Int32Array

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""Token -> the continuations with which it is a sequence breaker. An empty continuation means the token alone."""

_LOG_MOST = 88.7228391
"""The logarithm of the greatest penalty, the greatest float32, as in llama.cpp."""
_MOST = float(np.finfo(np.float32).max)
NO_BIASES: tuple[Int32Array, FloatArray] = np.zeros(0, np.int32), np.zeros(0, np.float32)
"""The biases of a row that has none."""


class DryOptions(Protocol):
    """The fields of ``SamplingParams`` for DRY."""

    @property
    def dry_multiplier(self) -> float: ...
    @property
    def dry_base(self) -> float: ...
    @property
    def dry_allowed_length(self) -> int: ...
    @property
    def dry_penalty_last_n(self) -> int: ...


class _End(msgspec.Struct, frozen=True):
    """The positions of a sequence breaker's first and last token in the whole text."""

    begin: int
    end: int


class Repeats:
    """The state of DRY for one request: its tokens, and for each position the length of the repetition that ends there.

    That length is the number of tokens up to the position that equal the last tokens of the text. ``push`` replaces its
    arrays, so that a shallow copy can continue independently.

    Args:
        options: the request's options.
        tokens: the prompt.
        breakers: the sequence breakers as tokens.
    """

    def __init__(self, options: DryOptions, tokens: Sequence[int], breakers: Breakers) -> None:
        base = float(np.float32(options.dry_base))
        self._multiplier, self._base = float(np.float32(options.dry_multiplier)), base
        self._allowed = options.dry_allowed_length
        self._most_exponent = int(_LOG_MOST / math.log(base)) if base > 1.000001 else 0
        self._window = options.dry_penalty_last_n if options.dry_penalty_last_n > 0 else 0  # 0: the whole text
        self._breakers = breakers
        self._alone = frozenset(token for token, tails in breakers.items() if () in tails)
        self._longest_tail = max((len(tail) for tails in breakers.values() for tail in tails), default=0)
        self._count = len(tokens)  # of the whole text
        self._tokens: Int32Array = np.asarray(tokens, np.int32)[-self._window :]
        self._lengths: Int32Array = _repeated(self._tokens.tolist())
        self._last_breaker: _End | None = None  # among those that later tokens can't make longer
        for back in range(self._longest_tail + 1, len(self._tokens)):
            if (breaker := self._breaker_at(back)) is not None:
                self._last_breaker = breaker
                break

    @classmethod
    def from_options(cls, options: DryOptions, tokens: Sequence[int], breakers: Breakers) -> Repeats | None:
        """Returns the state for a request; None if its options disable DRY."""
        off = options.dry_multiplier == 0 or options.dry_penalty_last_n == 0
        return None if off else cls(options, tokens, breakers)

    def push(self, token: int) -> None:
        """Appends a token to the text."""
        same = self._tokens == token
        before = np.concatenate((np.zeros(1, np.int32), self._lengths[:-1]))[: len(same)]
        self._lengths = np.append(np.where(same, before + 1, 0), 0).astype(np.int32)[-self._window :]
        self._tokens = np.append(self._tokens, np.int32(token))[-self._window :]
        self._count += 1
        back = self._longest_tail + 1
        if self._breakers and back < len(self._tokens) and (breaker := self._breaker_at(back)) is not None:
            self._last_breaker = breaker

    def biases(self) -> tuple[Int32Array, FloatArray]:
        """Returns (tokens, values): each token that is penalized next, once, and the negative value to add to its
        logit.
        """
        limit = self._unbroken()
        if len(self._tokens) <= self._allowed or limit < self._allowed:
            return NO_BIASES
        lengths = np.minimum(self._lengths[:-1], limit)
        if self._window:  # what was before the window doesn't count
            lengths = np.minimum(lengths, np.arange(1, len(self._tokens)))
        places = np.flatnonzero(lengths >= self._allowed)
        if not len(places):
            return NO_BIASES
        longest: dict[int, int] = {}
        for token, length in zip(self._tokens[places + 1].tolist(), lengths[places].tolist(), strict=True):
            if token not in self._alone and length > longest.get(token, -1):
                longest[token] = length
        exponents = np.fromiter(longest.values(), np.int64, len(longest)) - self._allowed
        if self._most_exponent:
            exponents = np.minimum(exponents, self._most_exponent)
        penalties = np.minimum(self._multiplier * self._base ** exponents.astype(np.float64), _MOST)
        return np.fromiter(longest, np.int32, len(longest)), -penalties.astype(np.float32)

    def _unbroken(self) -> int:
        """Returns the number of tokens since the last sequence breaker."""
        for back in range(min(self._longest_tail + 1, len(self._tokens)) if self._breakers else 0):
            if (breaker := self._breaker_at(back)) is not None:
                return self._count - 1 - breaker.end
        settled = self._last_breaker
        if settled is not None and settled.begin >= self._count - len(self._tokens):
            return self._count - 1 - settled.end
        return len(self._tokens)

    def _breaker_at(self, back: int) -> _End | None:
        """Returns the longest complete sequence breaker that begins ``back`` tokens before the last token; None if
        there is none.
        """
        at = len(self._tokens) - 1 - back
        tails = self._breakers.get(int(self._tokens[at]))
        if tails is None:
            return None
        longest = -1
        for tail in tails:
            if longest < len(tail) <= back and tuple(self._tokens[at + 1 : at + 1 + len(tail)].tolist()) == tail:
                longest = len(tail)
        begin = self._count - 1 - back
        return None if longest < 0 else _End(begin, begin + longest)


def _repeated(tokens: list[int]) -> Int32Array:
    """Returns for each position the number of tokens up to it that equal the last tokens; 0 for the last position.

    It is Gusfield's Z-algorithm over the reversed tokens.
    """
    count = len(tokens)
    tokens = tokens[::-1]
    lengths = [0] * count
    left = right = 0  # of the repetition that reaches farthest, tokens[left:right]
    for k in range(1, count):
        length = min(right - k, lengths[k - left]) if k < right else 0
        if k + length >= right:
            while k + length < count and tokens[length] == tokens[k + length]:
                length += 1
            left, right = k, k + length
        lengths[k] = length
    return np.array(lengths[::-1], np.int32)
