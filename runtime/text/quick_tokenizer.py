"""A tokenizer that starts at once: the library's for all but the merges, which are looked up in ``tables.bin``."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import tokenizers

from enginewright.runtime.bundle.tokenizer_tables import TokenizerTables

_KEPT_PIECES = 10_000
"""The most pieces whose tokens are cached, as in the library."""
_LONGEST_KEPT = 256
"""The most characters of a piece whose tokens are cached."""


class Encoded:
    """Token ids in a field ``ids``, as in the class ``Encoding`` of `tokenizers`."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class _Names(dict[int, str | None]):
    """Cached texts of tokens."""

    def __init__(self, tables: TokenizerTables) -> None:
        self._tables = tables

    def __missing__(self, index: int) -> str | None:
        text = self._tables.text(index)
        if text is not None:
            self[index] = text
        return text


class QuickTokenizer:
    """Replaces ``tokenizers.Tokenizer`` while texts are short. It has the methods that the runtime needs, with the same
    results, and starts faster.

    It is thread-safe, and needn't read tokenizer.json. Its merging takes two to six times as long as the library's.
    After twice as many characters as the vocabulary has tokens, the library's tokenizer is read and used instead;
    reading it takes about as long as merging these characters.

    Args:
        tables: the tables of the bundle.
        read: reads the library's tokenizer.
    """

    def __init__(self, tables: TokenizerTables, read: Callable[[], tokenizers.Tokenizer]) -> None:
        """Opens the part of the tokenizer that needs no merges. Raises the errors of ``tokenizers``."""
        self._tables = tables
        self._read = read
        self._characters = tokenizers.Tokenizer.from_str(tables.characters_json)
        self.decoder, self.normalizer = self._characters.decoder, self._characters.normalizer
        self._added: dict[int, tokenizers.AddedToken] = self._characters.get_added_tokens_decoder()
        self._added_ids = {token.content: index for index, token in self._added.items()}
        self._special = frozenset(index for index, token in self._added.items() if token.special)
        self._left = 2 * tables.ids
        self._names = _Names(tables)
        self._pieces: dict[tuple[int, ...], list[int]] = {}
        self._lock = threading.Lock()
        self._whole: tokenizers.Tokenizer | None = None

    def whole(self) -> tokenizers.Tokenizer:
        """Returns the library's tokenizer, which the first call reads."""
        with self._lock:
            if self._whole is None:
                self._whole = self._read()
                self._pieces = {}
            return self._whole

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Returns an object with a text's token ids in ``ids``. Raises the errors of ``tokenizers`` and of
        ``read``.
        """
        self._left -= len(text)
        if self._left < 0 or self._whole is not None:
            return self.whole().encode(text, add_special_tokens=add_special_tokens)
        return Encoded(self.merged(text, add_special_tokens=add_special_tokens))

    def merged(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns a text's token ids, computed with the tables and never with the library's tokenizer."""
        encoding = self._characters.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        begin = 0
        all_ids = encoding.ids
        for piece, same in groupby(encoding.word_ids):
            end = begin + sum(1 for _ in same)
            # Tokens that belong to no piece of the text are those that are put around it.
            ids += all_ids[begin:end] if piece is None or end == begin + 1 else self._merged(all_ids[begin:end])
            begin = end
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids; ids outside the vocabulary are skipped. Raises the errors of
        ``tokenizers``.
        """
        skipped = self._special if skip_special_tokens else ()
        names = self._names
        texts = [text for i in ids if i not in skipped and (text := names[i]) is not None]
        return " ".join(texts) if self.decoder is None else str(self.decoder.decode(texts))

    def to_str(self) -> str:
        return str(self.whole().to_str())

    def id_to_token(self, index: int) -> str | None:
        return self._tables.text(index)

    def token_to_id(self, token: str) -> int | None:
        index = self._added_ids.get(token)
        return self._tables.find(token) if index is None else index

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
        del with_added_tokens
        names = ((self._tables.text(index), index) for index in range(self._tables.ids))
        return {name: index for name, index in names if name is not None}

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        return self._added

    def _merged(self, ids: list[int]) -> list[int]:
        """Returns the tokens of a piece after merging.

        ``ids``: the tokens of its characters. Short pieces are cached.
        """
        key = tuple(ids)
        merged = self._pieces.get(key)
        if merged is None:
            merged = self._merge(ids)
            if len(ids) <= _LONGEST_KEPT and len(self._pieces) < _KEPT_PIECES:
                self._pieces[key] = merged
        return merged

    def _merge(self, ids: list[int]) -> list[int]:
        """Returns the tokens after merging: the merge of lowest rank first, and of these the leftmost, as in
        `tokenizers`.

        Byte-pair encoding: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units (2016).
        """
        if self._tables.takes_whole:
            names = [self._tables.text(index) for index in ids]
            if None not in names and (one := self._tables.find("".join(filter(None, names)))) is not None:
                return [one]
        merge, n = self._tables.merge, len(ids)
        tokens = list(ids)
        before, behind = list(range(-1, n - 1)), list(range(1, n + 1))  # of a token that is gone, behind is 0
        waiting = [(merged[0], i, merged[1]) for i in range(n - 1) if (merged := merge(ids[i], ids[i + 1])) is not None]
        heapq.heapify(waiting)
        while waiting:
            _, i, token = heapq.heappop(waiting)
            j = behind[i]
            if j in (0, n):
                continue
            now = merge(tokens[i], tokens[j])
            if now is None or now[1] != token:  # one of the two has become another since
                continue
            tokens[i], behind[i], behind[j] = token, behind[j], 0
            if behind[i] < n:
                before[behind[i]] = i
            for one, other in ((before[i], i), (i, behind[i])):
                if one >= 0 and other < n and (merged := merge(tokens[one], tokens[other])) is not None:
                    heapq.heappush(waiting, (merged[0], one, merged[1]))
        return [token for token, after in zip(tokens, behind, strict=True) if after]
