"""Drafts that are looked up in the request's own tokens: what followed the last few of them before.

Prompt lookup decoding (Saxena 2023; LLMA: Yang et al. 2023). Texts that copy, edit or repeat themselves gain by it.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST = 4
"""Tokens of a request's first draft; as many more as were accepted, and fewer after a miss."""
GRAMS = (4, 3, 2)
"""So many last tokens are looked up, the longest first."""
LONGEST_PAUSE = 64
"""Steps without a draft after many in a row that brought nothing."""


class Lookup:
    """Drafts of one request.

    Args:
        tokens: its list, which grows.
        longest: most tokens of a draft.
    """

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        self._tokens, self._longest = tokens, longest
        self._known = 0  # of these places, what comes before is in ``_places``
        self._places: dict[tuple[int, ...], int] = {}  # a few tokens -> where the last such ones end
        self._most, self._misses, self._pause = FIRST, 0, 0

    def next(self, most: int) -> list[int]:
        """Up to ``most`` tokens that may follow."""
        if self._pause:
            self._pause -= 1
            return []
        tokens, end = self._tokens, len(self._tokens)
        for place in range(max(self._known, 1), end):
            for count in GRAMS:
                if place >= count:
                    self._places[tuple(tokens[place - count : place])] = place
        self._known = end
        for count in GRAMS:
            place = self._places.get(tuple(tokens[-count:]), 0) if end > count else 0
            if place:  # what follows may repeat itself up to the end
                return [tokens[place + i % (end - place)] for i in range(min(self._most, most))]
        return []

    def took(self, drafted: int, accepted: int) -> None:
        """So many of the draft's tokens were accepted."""
        if accepted == drafted:
            self._most, self._misses = min(2 * self._most, self._longest), 0
            return
        self._most = max(accepted + 1, 2)
        self._misses = 0 if accepted else self._misses + 1
        self._pause = min(2**self._misses, LONGEST_PAUSE) if self._misses else 0
