"""Keys that are planted in a long text, with questions for all of them at its end.

The questions are answered by the text itself, so that one evaluation of a text gives the probability of every answer.
Answers are far from their keys: a cache of few bits has lost what makes them unlikely.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CITIES = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dakar", "Riga"),
    *("Seoul", "Accra", "Delhi", "Turin", "Perth", "Kyoto", "Boston", "Prague"),
)
FIRST, LAST = 0.15, 0.75
"""The shares of the text between which keys are planted."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Needles:
    """A text with planted keys.

    Attributes:
        ids: [S], the tokens.
        places: [A], the position before each token of an answer, whose logits predict it.
        tokens: [A], these tokens.
        owners: [A], the number of the answer that each belongs to.
    """

    ids: list[int]
    places: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]

    @property
    def keys(self) -> range:
        """The numbers of the answers."""
        return range(int(self.owners.max()) + 1)

    def arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        """Returns the fields as arrays, for another process."""
        return {"ids": np.array(self.ids), "answers": self.places, "tokens": self.tokens, "owners": self.owners}

    def score(self, logits: npt.NDArray[np.float32]) -> dict[str, float]:
        """Returns the share of answers whose tokens are all the likeliest, and the mean log-probability of an answer.

        Args:
            logits: [A, V], at ``places``.
        """
        rows = logits.astype(np.float64)
        top = rows.max(1, keepdims=True)
        logs = rows - top - np.log(np.exp(rows - top).sum(1, keepdims=True))
        right = rows.argmax(1) == self.tokens
        of_token = logs[np.arange(len(self.tokens)), self.tokens]
        return {
            "needles": len(self.keys),
            "found": float(np.mean([right[self.owners == i].all() for i in self.keys])),
            "answer": float(np.mean([of_token[self.owners == i].sum() for i in self.keys])),
        }


def plant(encode: Encode, text: Sequence[int], length: int) -> Needles:
    """Returns a text of ``length`` tokens with a key for each of ``CITIES``, and the questions at its end.

    Args:
        encode: gives the tokens of a text, without special ones.
        text: tokens of a longer text, with the special ones that begin it.
        length: the number of tokens.
    """
    drawn = random.Random(0)
    keys = {city: encode(f" {drawn.randrange(10000, 100000)}") for city in CITIES}
    lines = {city: (encode(f"\nThe secret code of {city} is"), keys[city]) for city in CITIES}
    end = encode(".\n")
    whole = sum(len(ask) + len(key) + len(end) for ask, key in lines.values())
    rest = length - 2 * whole
    ids: list[int] = []
    at = 0
    for i, (ask, key) in enumerate(lines.values()):
        depth = int(rest * (FIRST + (LAST - FIRST) * i / (len(CITIES) - 1)))
        ids += [*text[at:depth], *ask, *key, *end]
        at = depth
    ids += text[at:rest]
    places, tokens, owners = [], [], []
    for number, city in enumerate(drawn.sample(CITIES, len(CITIES))):
        ask, key = lines[city]
        ids += ask
        places += range(len(ids) - 1, len(ids) - 1 + len(key))
        tokens += key
        owners += [number] * len(key)
        ids += [*key, *end]
    return Needles(ids, np.array(places), np.array(tokens), np.array(owners))
