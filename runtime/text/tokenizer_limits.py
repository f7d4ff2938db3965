"""Refuses a tokenizer.json that would take endless time or memory, before the `tokenizers` library reads it.

The library follows the file: six decoders that replace nothing by a text make terabytes of one token. So each part is
checked here, for the most characters that it makes of one, and for the time of its regular expressions
(``pattern_tree``). Unknown parts are refused. The limits are far beyond any tokenizer in use.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from ..shared.errors import shown
from .tokenizer_pattern import read_tokenizer_pattern

LARGEST_ID = 10_000_000
MOST_FACTOR = 128
"""The most characters that normalizers or decoders together may make of one character."""
MOST_ADDED = 64
"""The most characters that they may add to a piece of a text, besides that factor."""
MOST_PARTS = 512
MOST_TOKEN_CHARACTERS = 1 << 14
MOST_DECODED_CHARACTERS = 1 << 16
"""The most characters to which one token may be decoded."""
MOST_WORD_CHARACTERS = 1_000
"""The most characters of a word that WordPiece may divide, as that takes cubic time."""
_MOST_SPECIAL_IDS = 256


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}
    type: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 100


class _AddedToken(msgspec.Struct):
    content: str
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def check_tokenizer_json(tokenizer_json: str, *, longest: int = 1) -> None:
    """Checks that a tokenizer.json is safe to read.

    Args:
        tokenizer_json: the text of the file.
        longest: characters of the longest token, if the file doesn't have all tokens.

    Raises:
        ValueError: names the part that can't be used safely, or a token with a wrong id. Other faults aren't checked,
            as the library reports them.
    """
    try:
        try:
            tokenizer = msgspec.json.decode(tokenizer_json, type=_Tokenizer)
        except msgspec.ValidationError:  # the library may still read it, or refuse it by name
            tokenizer = _parts_alone(tokenizer_json)
    except msgspec.DecodeError as e:
        raise ValueError(f"it isn't JSON: {e}") from e
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    longest = max(_check_ids(tokenizer), longest)
    model = tokenizer.model
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(model, name) or "") > MOST_ADDED:
            raise ValueError(f"model.{name} has more than {MOST_ADDED:,} characters")
    if model.type == "WordPiece" and model.max_input_chars_per_word > MOST_WORD_CHARACTERS:
        raise ValueError(f"model.max_input_chars_per_word is above {MOST_WORD_CHARACTERS:,}")
    _check_parts(tokenizer.normalizer, "normalizer", "normalizers", _NORMALIZERS)
    _check_parts(tokenizer.pre_tokenizer, "pre_tokenizer", "pretokenizers", _PRE_TOKENIZERS)
    _check_parts(tokenizer.post_processor, "post_processor", "processors", _POST_PROCESSORS)
    factor, added = _check_parts(tokenizer.decoder, "decoder", "decoders", _DECODERS)
    if longest > MOST_TOKEN_CHARACTERS:
        raise ValueError(f"a token has {longest:,} characters, more than {MOST_TOKEN_CHARACTERS:,}")
    if longest * factor + added > MOST_DECODED_CHARACTERS:
        raise ValueError(
            f"decoder: it makes up to {longest * factor + added:,} characters of one token, "
            f"more than {MOST_DECODED_CHARACTERS:,}"
        )


def _parts_alone(tokenizer_json: str) -> _Tokenizer:
    """Returns the tokenizer without its model, whose form isn't known. Raises ValueError if the text isn't a JSON
    object.
    """
    document = msgspec.json.decode(tokenizer_json)
    if not isinstance(document, dict):
        raise ValueError("it isn't a JSON object")
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    return _Tokenizer(_Model(), **{name: document.get(name) for name in names})


def _check_ids(tokenizer: _Tokenizer) -> int:
    """Returns the number of characters of the longest token. Raises ValueError if an id is too large, or occurs twice.

    The library's tables are as long as the largest id. With two tokens of one id the library uses either, or panics.
    """
    vocabulary = tokenizer.model.vocab if isinstance(tokenizer.model.vocab, dict) else {}
    owners = {index: content for content, index in vocabulary.items()}
    if len(owners) < len(vocabulary):
        other, index = next((c, i) for c, i in vocabulary.items() if owners[i] != c)
        raise ValueError(f"two tokens have the id {index}: {other!r} and {owners[index]!r}")
    for token in tokenizer.added_tokens or ():
        if owners.setdefault(token.id, token.content) != token.content:
            raise ValueError(f"two tokens have the id {token.id}: {owners[token.id]!r} and {token.content!r}")
    if owners and max(owners) > LARGEST_ID:
        raise ValueError(f"a token has the id {max(owners)}")
    if owners and min(owners) < 0:
        raise ValueError(f"a token has the id {min(owners)}")
    pieces = tokenizer.model.vocab if isinstance(tokenizer.model.vocab, list) else []
    listed = (piece[0] for piece in pieces if isinstance(piece, list) and piece and isinstance(piece[0], str))
    return max(max(map(len, owners.values()), default=0), max(map(len, listed), default=0))


Growth = tuple[int, int]
"""The growth of a text by a part: (factor, added). n characters become at most factor * n + added."""
Part = Callable[[Mapping[str, Any], str], Growth]


def _check_parts(part: object, where: str, inner: str, known: Mapping[str, Part]) -> Growth:
    """Returns the growth of a normalizer or decoder with all its parts.

    Args:
        part: its JSON.
        where: its path in the document, for errors.
        inner: the key of the list of nested parts.
        known: type of a part -> the function that returns its growth.

    Raises ValueError naming a part that grows too much or isn't known.
    """
    factor, added = 1, 0
    for count, (place, one) in enumerate(_parts(part, where, inner), 1):
        if count > MOST_PARTS:
            raise ValueError(f"{where}: it has more than {MOST_PARTS} parts")
        kind = one.get("type")
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"{place}: its type is {shown(kind)}, which isn't known")
        try:
            times, more = known[kind](one, place)
        except (TypeError, AttributeError, KeyError) as e:
            raise ValueError(f"{place}: a field of {kind} is missing, or has another type") from e
        factor, added = factor * times, added * times + more
        if factor > MOST_FACTOR:
            raise ValueError(f"{place}: with the parts before it, it makes more than {MOST_FACTOR} characters of one")
        if added > MOST_ADDED:
            raise ValueError(f"{place}: with the parts before it, it adds more than {MOST_ADDED:,} characters")
    return factor, added


def _parts(part: object, where: str, inner: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the parts of a sequence and of nested sequences, with their paths in the document."""
    waiting = [(where, part)] if part is not None else []
    while waiting:
        place, one = waiting.pop()
        if not isinstance(one, Mapping):
            raise ValueError(f"{place}: it isn't an object")
        if one.get("type") != "Sequence":
            yield place, one
            continue
        items = one.get(inner)
        if not isinstance(items, list) or len(items) > MOST_PARTS:
            raise ValueError(f"{place}.{inner}: it isn't a list of at most {MOST_PARTS} parts")
        if len(waiting) + len(items) > MOST_PARTS:
            raise ValueError(f"{place}: it has more than {MOST_PARTS} parts")
        waiting += [(f"{place}.{inner}[{i}]", item) for i, item in reversed(list(enumerate(items)))]


def _same(_: Mapping[str, Any], __: str) -> Growth:
    return 1, 0


def _times(factor: int) -> Part:
    return lambda _, __: (factor, 0)


def _replace(part: Mapping[str, Any], place: str) -> Growth:
    shortest = _shortest_match(part["pattern"], place)
    content = len(part["content"])
    if shortest == 0:
        if content == 0:
            return 1, 0
        raise ValueError(f"{place}: its pattern matches nothing, and is replaced by {content} characters")
    return max(1, -(-content // shortest)), 0


def _split(part: Mapping[str, Any], place: str) -> Growth:
    _shortest_match(part["pattern"], place)
    return 1, 0


def _shortest_match(pattern: Any, place: str) -> int:
    """Returns the fewest characters that a pattern matches.

    Raises ValueError if a regular expression may take too long.
    """
    if isinstance(pattern, str):  # as older files have it
        return len(pattern)
    if "String" in pattern:
        return len(pattern["String"])
    text = pattern["Regex"]
    try:
        return _shortest_of(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{place}: the regular expression {shown(text)} can't be used: {e}") from e


@lru_cache(maxsize=16)  # a bundle has the expressions of its tokenizer twice: in its tables, and in tokenizer.json
def _shortest_of(expression: str) -> int:
    """Returns the fewest characters that a regular expression matches. Raises ValueError if it may take too long."""
    tree = read_tokenizer_pattern(expression)
    tree.check_backtracking()
    return tree.shortest()


def _prepend(part: Mapping[str, Any], _: str) -> Growth:
    return 1, len(part["prepend"])


def _precompiled(part: Mapping[str, Any], place: str) -> Growth:
    """Returns the growth by a table of SentencePiece.

    The table has a trie, then the texts to which its entries point, each with a zero byte at its end.
    """
    charsmap = part["precompiled_charsmap"]
    try:
        data = base64.b64decode(charsmap or "", validate=True)
    except (binascii.Error, ValueError) as e:
        raise ValueError(f"{place}: precompiled_charsmap isn't base64") from e
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or size > len(data) - 4:
        raise ValueError(f"{place}: precompiled_charsmap is damaged")
    try:
        texts = data[4 + size :].decode().split("\0")
    except UnicodeDecodeError as e:
        raise ValueError(f"{place}: precompiled_charsmap has texts that aren't UTF-8") from e
    return max(1, *map(len, texts)), 0


def _metaspace(part: Mapping[str, Any], place: str) -> Growth:
    if len(part.get("replacement") or "▁") > 1:
        raise ValueError(f"{place}: its replacement has more than one character")
    return 1, 1


def _replaced_suffix(key: str) -> Part:
    """Returns the growth function of a decoder that replaces the text in its field ``key`` by a space or nothing.

    An empty text is replaced between all characters, which doubles a text.
    """
    return lambda part, _: (1 if part[key] else 2, 1)


def _template(part: Mapping[str, Any], place: str) -> Growth:
    tokens = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
    for name in ("single", "pair"):
        pieces = part[name]
        texts = [next(iter(piece.values()))["id"] for piece in pieces if "Sequence" in piece]
        ids = sum(tokens.get(piece["SpecialToken"]["id"], 0) for piece in pieces if "SpecialToken" in piece)
        if len(texts) > len(set(texts)):
            raise ValueError(f"{place}.{name}: it has a text more than once")
        if ids > _MOST_SPECIAL_IDS:
            raise ValueError(f"{place}.{name}: it adds {ids:,} tokens, more than {_MOST_SPECIAL_IDS}")
    return 1, 0


_NORMALIZERS: Mapping[str, Part] = {
    "Replace": _replace,
    "Prepend": _prepend,
    "Precompiled": _precompiled,
    "ByteLevel": _times(4),
    "BertNormalizer": _times(3),
    # Unicode's forms make up to 18 characters of one, and no more of these when they are applied again.
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt"), _same),
}
_PRE_TOKENIZERS: Mapping[str, Part] = {
    "Split": _split,
    "Metaspace": _metaspace,
    **dict.fromkeys(
        ("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Punctuation", "UnicodeScripts"), _same
    ),
    **dict.fromkeys(("Whitespace", "WhitespaceSplit", "FixedLength"), _same),
}
_POST_PROCESSORS: Mapping[str, Part] = {
    "TemplateProcessing": _template,
    **dict.fromkeys(("BertProcessing", "RobertaProcessing", "ByteLevel"), _same),
}
_DECODERS: Mapping[str, Part] = {
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": lambda _, __: (1, 1),
    "BPEDecoder": _replaced_suffix("suffix"),
    "CTC": _replaced_suffix("word_delimiter_token"),
    **dict.fromkeys(("ByteLevel", "ByteFallback", "Fuse", "Strip"), _same),
}
