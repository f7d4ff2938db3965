"""Finds the tokens that contain or begin a text: sequence breakers of DRY, as in llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .tokenizer import Tokenizer

_LONGEST_TAIL = 20
"""The most tokens after the first one of a sequence."""


class SequenceBreakers:
    """Finds the token sequences in which a text may occur, whatever text is around it.

    A token that contains the text is a sequence alone. A token that ends with the text's beginning is a sequence
    together with the tokens of the rest. The first call builds one array with the bytes of the whole vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab

    def find(self, texts: Sequence[str]) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Maps a token to the tokens that must follow it to complete one of the texts; empty if the token contains a
        text.
        """
        sequences: dict[int, dict[tuple[int, ...], None]] = {}
        for text in texts:
            data = text.encode()
            within = self._containing(data)
            for token in within:
                sequences.setdefault(token, {})[()] = None
            for length in range(1, len(data)):
                tail = self._tail(data[length:])
                if tail is None:
                    continue
                for token in self._ending(data[:length]):
                    if token not in within:
                        sequences.setdefault(token, {})[tail] = None
        return {token: tuple(tails) for token, tails in sequences.items()}

    def _tail(self, data: bytes) -> tuple[int, ...] | None:
        """Returns the tokens of ``data``, the rest of a text; None if it begins within a character."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)[:_LONGEST_TAIL])

    @cached_property
    def _words(self) -> tuple[bytes, npt.NDArray[np.int64]]:
        """Returns the bytes of all tokens, joined, and the offset of each token; the last offset is the end."""
        words = [self._tokenizer.token_bytes(token) for token in range(self._vocab)]
        return b"".join(words), np.cumsum([0, *map(len, words)])

    def _containing(self, text: bytes) -> set[int]:
        """Returns the tokens whose bytes contain the text."""
        data, starts = self._words
        if len(text) == 1:
            places = np.flatnonzero(np.frombuffer(data, np.uint8) == text[0])
        else:
            at, listed = data.find(text), []
            while at >= 0:
                listed.append(at)
                at = data.find(text, at + 1)
            places = np.array(listed, np.int64)
        tokens = np.searchsorted(starts, places, side="right") - 1
        return set(tokens[places + len(text) <= starts[tokens + 1]].tolist())

    def _ending(self, text: bytes) -> list[int]:
        """Returns the tokens whose bytes end with ``text``."""
        data, starts = self._words
        values, ends = np.frombuffer(data, np.uint8), starts[1:]
        tokens = np.flatnonzero(np.diff(starts) >= len(text))
        for back, byte in enumerate(reversed(text), start=1):
            tokens = tokens[values[ends[tokens] - back] == byte]
        return tokens.tolist()
