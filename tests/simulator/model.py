"""A language model made of hashes: its next token depends on every cell of the KV cache that a request sees.

Each place of a cache has two cells, as if the model had two layers. The first holds a hash of the token and of its
position. The second holds a hash of all first cells that the token sees. A row's value is a hash of all second cells
that it sees, so one wrong cell, now or when any of the others was computed, gives another value, and with it another
token or log-probability.

A recurrent group has a state instead of cells, a hash of the state before and of the token. A row sees the state after
its own token.

Both sides of the comparison use this module: ``executor`` reads cells through block tables, ``reference`` keeps one
request's own in a list.

Shape letters as in contracts.py.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.uint64]

VOCAB = 256
END, POISON = 1, 255
"""The token that ends a text, and one whose keys are NaN. The model never says the second."""
LETTERS = tuple(range(97, 113))
"""Tokens of prompts, and those that the model prefers: their byte-level texts are letters."""
ALL = frozenset(range(VOCAB)) - {POISON}
MOST_POSITIONS = 4096
RECURRENT = -1
"""The value in place of a window, for a group that has states."""
BITS = (1 << 64) - 1
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_TOKEN, _POSITION, _SEED, _COUNTER, _GROUP, _STATE = (
    *(0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F),
    *(0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3),
)
_random = random.Random(20261128)
WEIGHTS = [_random.getrandbits(64) | 1 for _ in range(MOST_POSITIONS)]
"""An odd number for each position: two blocks that change places change every sum over them."""
WEIGHT_ARRAY = np.array(WEIGHTS, np.uint64)
_SALTS = [_random.getrandbits(64) for _ in range(VOCAB)]
_PREFERRED = [LETTERS[(token * 5 + 3) % 7] for token in range(VOCAB)]


def mix(value: int) -> int:
    """Hashes 64 bits."""
    value &= BITS
    value = ((value ^ (value >> 29)) * _FIRST) & BITS
    value = ((value ^ (value >> 32)) * _SECOND) & BITS
    return value ^ (value >> 31)


def mix_cells(values: Cells) -> Cells:
    """Hashes each of an array as ``mix`` does."""
    values = (values ^ (values >> np.uint64(29))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def first_cell(token: int, position: int, group: int) -> int:
    """The first cell of a token at a position."""
    return mix(token * _TOKEN + position * _POSITION + (group + 1) * _GROUP)


def next_state(state: int, token: int, position: int, group: int) -> int:
    """The state of a recurrent group after one token more. It is 0 before the first."""
    return mix(state * _STATE + first_cell(token, position, group))


def first_cells(tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], group: int) -> Cells:
    """The first cells of many tokens at their positions.  [T]"""
    salt = np.uint64(((group + 1) * _GROUP) & BITS)
    return mix_cells(
        tokens.astype(np.uint64) * np.uint64(_TOKEN) + positions.astype(np.uint64) * np.uint64(_POSITION) + salt
    )


@dataclass(frozen=True)
class Draw:
    """Everything but the cache on which a row's token depends.

    Attributes:
        last: the row's own token.
        temperature, seed, counter: as a step's ``SamplingBatch`` has them.
        seen: tokens that a repetition penalty applies to, each once.
        counted: tokens of the output and how often each came, where there is another penalty.
    """

    last: int
    temperature: float = 0.0
    seed: int = 0
    counter: int = 0
    seen: Sequence[int] = ()
    counted: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Model:
    """Which model of the kind it is.

    Attributes:
        salt: another salt is another model.
        habit: of 16 rows, how many continue their last token in the usual way, whatever came before. Texts repeat
            themselves then, so that drafts are found.
        errs: of 16 rows, how many this model gets wrong: a draft model that is right most of the time.
    """

    salt: int = 0
    habit: int = 8
    errs: int = 0

    def value(self, sums: Sequence[int]) -> int:
        """The value of a row, from the sum of what it sees in each group."""
        total = self.salt
        for group, one in enumerate(sums):
            total = mix(total + (one ^ ((group + 1) * _GROUP)))
        return total

    def distribution(self, value: int, draw: Draw) -> Distribution:
        """The tokens that may come in a row, likeliest first."""
        for token in draw.seen:
            value += _SALTS[token]
        for token, count in draw.counted:
            value += _SALTS[token] * (2 * count + 1)
        if draw.temperature > 0:
            value += mix(draw.seed + draw.counter * _COUNTER + _SEED)
        value = mix(value)
        if (value >> 20) % 40 == 0:
            best = END
        elif (value & 15) < self.habit:
            best = _PREFERRED[draw.last]
        else:
            best = (value >> 8) & 255
        if self.errs and (value >> 56) & 15 < self.errs:
            best ^= 1
        return Distribution(255 ^ best, 0.05 + ((value >> 32) & 255) / 128, ((value >> 40) & 0xFFFF) / 0xFFFF)


@dataclass(frozen=True)
class Distribution:
    """The order of all tokens in a row, and their log-probabilities: token ``k ^ flip`` is the better, the larger k.

    Attributes:
        flip: see above.
        slope, offset: the log-probability falls by ``slope`` from one token to the next, from ``-offset`` on.
    """

    flip: int
    slope: float
    offset: float

    def logprob(self, token: int) -> float:
        """The log-probability of a token, as a 32-bit float."""
        return float(np.float32(-(255 - (token ^ self.flip)) * self.slope - self.offset))

    def best(self, allowed: Collection[int] | None = None) -> int:
        """The likeliest token of those that are allowed, None for all; -1 where none is."""
        if allowed is None:
            best = 255 ^ self.flip
            return best if best != POISON else best ^ 1
        return max(allowed, key=self.flip.__xor__, default=-1)

    def top(self, count: int, allowed: Collection[int] | None = None) -> list[tuple[int, float]]:
        """The likeliest tokens with their log-probabilities; those that aren't allowed come last, with -infinity."""
        if allowed is None:
            tokens = (k ^ self.flip for k in range(255, -1, -1))
            return [(token, self.logprob(token)) for token in islice((t for t in tokens if t != POISON), count)]
        best = sorted(allowed, key=self.flip.__xor__, reverse=True)[:count]
        banned = (token for token in range(VOCAB) if token not in allowed)
        return [(token, self.logprob(token)) for token in best] + [
            (token, -np.inf) for token in islice(banned, count - len(best))
        ]


@lru_cache(1 << 14)
def tokens_of(mask: bytes) -> tuple[int, ...]:
    """The tokens whose bits are set."""
    bits = int.from_bytes(mask, "little")
    return tuple(token for token in range(VOCAB) if bits >> token & 1)
