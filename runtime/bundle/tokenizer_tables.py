"""``tokenizer/tables.bin``: the tables of a BPE tokenizer as sorted arrays that are searched in place.

The `tokenizers` library builds hash tables of all tokens and merges when it loads: 40 ms for a vocabulary of 49,152
tokens, half a second for one of 262,144. A short process needs only a few of the merges. So an export also writes the
merges as sorted arrays, and a tokenizer.json with characters alone, which the library loads at once. The library then
does everything but the merges: it normalizes, splits, recognizes added tokens and decodes.

    8 bytes   "EWTOKEN1"
    4 bytes   CRC-32 of everything after it
    20 bytes  numbers: ids, merges, tokens of the model, bytes of the texts, bytes of the JSON
    4 bytes   1 if a piece of text that is itself a token isn't merged (``ignore_merges``), otherwise 0
    arrays    of 4-byte entries:
        offsets  ids + 1     where the text of each id begins; the text is empty if no token has the id
        order    tokens      ids of the model's own tokens, sorted by the bytes of their texts
        starts   ids + 1     where the merges of each left token begin
        rights   merges      the right token of each merge, sorted for each left token
        ranks    merges      the index of each merge in tokenizer.json: the lowest is merged first
        merged   merges      the token that the two become
    texts     UTF-8
    JSON      the tokenizer.json with characters alone; its ids are those of the full one

All numbers are unsigned and little-endian.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from typing import Any

import msgspec
import numpy as np

from ..shared.errors import BundleError

TABLES_PATH = "tokenizer/tables.bin"

_MAGIC = b"EWTOKEN1"
_HEADER = struct.Struct("<6I")
_BEGIN = len(_MAGIC) + 4


class TokenizerTables:
    """The parsed contents of tables.bin.

    Attributes:
        characters_json: a tokenizer.json without merges, whose tokens are characters, bytes and added tokens.
        ids: the largest token id, plus one.
        longest: the length in bytes of the longest token.
        takes_whole: ``ignore_merges`` of the tokenizer.
    """

    def __init__(self, data: bytes) -> None:
        """Parses the file. Raises BundleError if it is damaged."""
        view = memoryview(data)
        try:
            if data[: len(_MAGIC)] != _MAGIC or zlib.crc32(view[_BEGIN:]) != int.from_bytes(
                data[len(_MAGIC) : _BEGIN], "little"
            ):
                raise ValueError
            self.ids, merges, tokens, texts, characters, takes_whole = _HEADER.unpack_from(data, _BEGIN)
            at = _BEGIN + _HEADER.size
            arrays = []
            for n in (self.ids + 1, tokens, self.ids + 1, merges, merges, merges):
                arrays.append(view[at : at + 4 * n].cast("I"))
                at += 4 * n
            self._offsets, self._order, self._starts, self._rights, self._ranks, self._merged = arrays
            self._texts = view[at : at + texts]
            self.characters_json = str(view[at + texts :], "utf-8")
            if len(view) != at + texts + characters:
                raise ValueError
        except (ValueError, struct.error):
            raise BundleError(f"{TABLES_PATH}: the file is damaged", hint="Export the bundle again.") from None
        self.takes_whole = bool(takes_whole)
        self.longest = int(np.diff(np.frombuffer(self._offsets, np.uint32).astype(np.int64)).max(initial=0))

    def text(self, index: int) -> str | None:
        """Returns the text of a token as tokenizer.json spells it; None if no token has that id."""
        if not 0 <= index < self.ids:
            return None
        begin, end = self._offsets[index], self._offsets[index + 1]
        return str(self._texts[begin:end], "utf-8") if begin != end else None

    def find(self, text: str) -> int | None:
        """Returns the id of the model's token with this text; None if there is none. Added tokens aren't searched."""
        encoded, order = text.encode(), self._order
        at = bisect_left(order, encoded, key=self._bytes)
        return order[at] if at < len(order) and self._bytes(order[at]) == encoded else None

    def merge(self, left: int, right: int) -> tuple[int, int] | None:
        """Returns the rank of the merge of two tokens, and the token that they become; None if they don't merge."""
        end = self._starts[left + 1]
        at = bisect_left(self._rights, right, self._starts[left], end)
        return (self._ranks[at], self._merged[at]) if at < end and self._rights[at] == right else None

    def _bytes(self, index: int) -> bytes:
        return bytes(self._texts[self._offsets[index] : self._offsets[index + 1]])


def tables_of(tokenizer_json: str) -> bytes | None:
    """Returns the contents of tables.bin for a tokenizer.json.

    Returns None if the tokenizer isn't BPE, or has features that the tables can't represent.
    """
    document = msgspec.json.decode(tokenizer_json)
    model, added = document["model"], document.get("added_tokens") or []
    vocabulary = model.get("vocab")
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or any(model.get(name) for name in odd):
        return None
    names = vocabulary | {token["content"]: token["id"] for token in added}
    by_id = {index: name for name, index in names.items()}
    if not vocabulary or "" in names or len(by_id) < len(names):
        return None
    alphabet = _characters(model, [token["content"] for token in added])
    if alphabet is None:
        return None
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    listed = [(vocabulary[a], vocabulary[b], vocabulary[a + b]) for a, b in pairs]
    merges = np.array(listed, np.uint32).reshape(-1, 3)
    ranks = np.arange(len(merges))
    in_order = np.lexsort((ranks, merges[:, 1], merges[:, 0]))
    merges, ranks = merges[in_order], ranks[in_order]
    # As the library: of a pair that is there twice, the last one counts.
    last = np.append((merges[1:, :2] != merges[:-1, :2]).any(axis=1), True)[: len(merges)]
    merges, ranks = merges[last], ranks[last]
    ids = max(by_id) + 1
    texts = [by_id.get(index, "").encode() for index in range(ids)]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    order = sorted(vocabulary.values(), key=texts.__getitem__)
    starts = np.searchsorted(merges[:, 0], np.arange(ids + 1))
    characters = document | {
        "model": model | {"vocab": {name: names[name] for name in alphabet}, "merges": [], "ignore_merges": False},
        "truncation": None,
        "padding": None,
    }
    json = msgspec.json.encode(characters)
    arrays = (offsets, np.array(order), starts, merges[:, 1], ranks, merges[:, 2])
    parts = [array.astype("<u4").tobytes() for array in arrays]
    size = sum(map(len, texts))
    header = _HEADER.pack(ids, len(merges), len(order), size, len(json), bool(model.get("ignore_merges")))
    rest = b"".join([header, *parts, *texts, json])
    return _MAGIC + zlib.crc32(rest).to_bytes(4, "little") + rest


def _characters(model: dict[str, Any], added: list[str]) -> list[str] | None:
    """Returns the tokens that exist before any merge: characters, bytes, the unknown token and added tokens.

    Returns None if the arrays couldn't reproduce the tokenizer with them.
    """
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else []
    begin = [name for name in vocabulary if len(name) == 1 or name in in_bytes or name == unknown]
    others = [name for name in added if name not in vocabulary]
    if any(len(name) == 1 or name in in_bytes or name == unknown for name in others):
        return None
    # A piece is looked up whole by its characters' tokens: each must have one.
    if model.get("ignore_merges") and not set().union(*vocabulary) <= set(begin):
        return None
    return list(dict.fromkeys([*begin, *added]))
