"""Builds a tokenizer.json that tokenizes a text as llama.cpp does with a GGUF file.

llama.cpp first separates special tokens from a text. Each part of the text between them is then normalised, split, and
tokenized by the file's model. A tokenizer.json has the same steps: added tokens, a normalizer, a pre-tokenizer and a
model. Each function here builds the steps of one model of GGUF files.

Reference: llama.cpp, src/llama-vocab.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import base64
import heapq
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from enginewright.runtime.text import fill_in_middle
from enginewright.runtime.text.tokenizer import BYTES_OF_LETTERS, what_tokenizers_raises

from .pretokenizers import as_in_unicode_15
from .vocabulary import Kind, Vocabulary

_TEMPLATE = "tokenizer.chat_template"
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token", "sep": "sep_token"} | {
    "cls": "cls_token",
    "mask": "mask_token",
}
_SPECIAL = Kind.CONTROL | Kind.UNKNOWN
_ADDED = _SPECIAL | Kind.USER_DEFINED
_SPACE = "▁"
_ASCII_SPACES = r"[ \t\n\v\f\r]+"
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_FOLDER = "Export from the model's Hugging Face directory."
_MOST_TIED_TEXTS = 2000
_MOST_STRIPPED = 4000
"""The most characters of tokens whose white space a regular expression removes. A bundle has no longer expressions."""
_COMPATIBLE = "ﬁ"
"""A character that compatibility forms of Unicode (NFKC) change and the canonical form (NFC) doesn't."""
_LONGEST_WORD = 1000
"""The most characters of a word of a "bert" model; a longer word is one unknown token.

The library's time grows with the square of the length.
"""

Json = dict[str, Any]


def build_files(vocabulary: Vocabulary, keys: Mapping[str, Any]) -> TokenizerFiles:
    """Builds the tokenizer files of a bundle from a GGUF file's tokenizer, chat templates included.

    Args:
        vocabulary: the file's vocabulary.
        keys: the keys of its header.

    Raises:
        UnsupportedModelError: names the part of the tokenizer that can't be expressed.
        SourceError: names the key that is wrong.
    """
    special: dict[str, str | bool | None] = dict.fromkeys(_NAMES.values())
    for name, index in vocabulary.ids.items():
        # A byte-level vocabulary's default ids are those of any tokens.
        if name in _NAMES and (name in vocabulary.stated or vocabulary.model != "gpt2"):
            special[_NAMES[name]] = vocabulary.tokens[index]
        elif name in fill_in_middle.NAMES and name in vocabulary.stated:
            special[fill_in_middle.NAMES[name][0]] = vocabulary.tokens[index]
    special |= {"add_bos": False, "add_eos": False}  # the post-processor adds them
    default, others = _templates(vocabulary.path, keys)
    return TokenizerFiles(
        tokenizer_json=build_tokenizer(vocabulary),
        chat_template=default,
        special_tokens=special,
        other_templates=others,
    )


def build_tokenizer(vocabulary: Vocabulary) -> str:
    """Returns the text of a tokenizer.json for the vocabulary. Raises the errors of ``build_files``."""
    build = {"llama": _sentencepiece, "gpt2": _merging, "gemma4": _merging, "bert": _wordpiece, "t5": _unigram}
    parts = build[vocabulary.model](vocabulary)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary),
        **parts,
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    with _library_errors(vocabulary):
        tokenizers.Tokenizer.from_str(text)
    return text


def _templates(path: Path, keys: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """Returns the default chat template, and the others by name. Raises SourceError naming one that isn't a text."""
    templates: dict[str, str] = {}
    for key in sorted(keys):
        if key != _TEMPLATE and not key.startswith(f"{_TEMPLATE}."):
            continue
        if not isinstance(keys[key], str):
            raise SourceError(f"{path}: {key} isn't a text", hint="Download or convert the file again.")
        templates[key[len(_TEMPLATE) + 1 :] or "default"] = keys[key]
    templates = {name: text for name, text in templates.items() if text}
    return templates.pop("default", None), templates


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """Returns the tokens that are matched before a text is split; those of ``_stripped`` after normalisation."""
    stripped = _stripped(vocabulary)
    before = frozenset() if _trims_spaces(vocabulary) else vocabulary.strip_before - stripped
    return [
        {
            "id": index,
            "content": vocabulary.tokens[index],
            "single_word": False,
            "lstrip": index in before,
            "rstrip": index in vocabulary.strip_after and index not in stripped,
            "normalized": index in stripped,
            "special": bool(kind & _SPECIAL),
        }
        for index, kind in enumerate(vocabulary.kinds)
        if kind & _ADDED
    ]


def _stripped(vocabulary: Vocabulary) -> frozenset[int]:
    """Returns the ids of tokens next to which ``_strip`` removes spaces.

    The library would remove any Unicode space there, but llama.cpp removes only ASCII's.
    """
    if vocabulary.model not in ("llama", "gpt2"):
        return frozenset()
    texts, stripping = vocabulary.tokens, vocabulary.strip_before | vocabulary.strip_after
    added = [i for i, kind in enumerate(vocabulary.kinds) if kind & _ADDED]
    others = [texts[i] for i in added if i not in stripping]
    # These are found after normalisation, when spaces are written otherwise and other tokens are taken out.
    later = [i for i in added if i in stripping and not {" ", _SPACE} & set(texts[i])]
    later = [i for i in later if not any(other in texts[i] for other in others)]
    return frozenset(later if sum(len(texts[i]) for i in later) <= _MOST_STRIPPED else ())


def _trims_spaces(vocabulary: Vocabulary) -> bool:
    """Returns True if the vocabulary's normalisation always removes ASCII white space at the end of a part of a
    text.
    """
    trims = vocabulary.model == "t5" and vocabulary.merge_spaces and bool(vocabulary.charsmap)
    return trims and not _by_table(vocabulary, " \t\n\v\f\r").strip(" ")


def _strip(vocabulary: Vocabulary) -> list[Json]:
    """Returns the normalizers that remove white space next to the tokens of ``_stripped``."""
    before, after = (
        "|".join(re.escape(vocabulary.tokens[i]) for i in sorted(_stripped(vocabulary) & ids))
        for ids in (vocabulary.strip_before, vocabulary.strip_after)
    )
    removed = [*([rf"{_ASCII_SPACES}(?={before})"] if before else [])]
    removed += [rf"(?<={after}){_ASCII_SPACES}"] if after else []
    return [_replace(Regex(pattern), "") for pattern in removed]


def _around(vocabulary: Vocabulary) -> Json | None:
    """Returns the post-processor, which adds tokens before and after a text."""
    end = "sep" if vocabulary.model == "bert" else "eos" if vocabulary.add_eos else None
    before = [vocabulary.ids["bos"]] if vocabulary.add_bos else []
    after = [] if end is None else [_id(vocabulary, end)]
    between = [*after, *([_id(vocabulary, "sep")] if vocabulary.add_sep else [])]
    if not before and not after:
        return None

    def named(indices: Iterable[int]) -> list[Json]:
        return [{"SpecialToken": {"id": vocabulary.tokens[index], "type_id": 0}} for index in indices]

    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*named(before), text, *named(after)],
        "pair": [*named(before), text, *named(between), second, *named(after)],
        "special_tokens": {
            vocabulary.tokens[index]: {
                "id": vocabulary.tokens[index],
                "ids": [index],
                "tokens": [vocabulary.tokens[index]],
            }
            for index in (*before, *between)
        },
    }


def _id(vocabulary: Vocabulary, name: str) -> int:
    if name not in vocabulary.ids:
        key = {"unk": "unknown_token_id", "sep": "seperator_token_id"}.get(name, f"{name}_token_id")
        raise SourceError(f"{vocabulary.key(key)} is missing", hint="Download or convert the file again.")
    return vocabulary.ids[name]


def _merging(vocabulary: Vocabulary) -> Json:
    """Returns a model that merges pairs in the order of a list: of bytes written as letters, or of characters."""
    pre, places = vocabulary.pre, {text: i for i, text in enumerate(vocabulary.tokens)}
    assert pre is not None
    for i, (left, right) in enumerate(vocabulary.merges):
        for text in (left, right, left + right):
            if text not in places:
                raise SourceError(
                    f"{vocabulary.key('merges')}: pair {i} has {text[:40]!r}, which isn't a token", hint=_FOLDER
                )
    merges = _without_special(vocabulary, places)
    splits = [_split(one.expression, one.behavior) for one in pre.splits]
    splits += _split_letters(vocabulary, places) if pre.byte_letters else _split_characters(vocabulary, places)
    decoder: Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    steps = _strip(vocabulary)
    byte_fallback = not pre.byte_letters and any(text in places for text in _BYTES)
    if byte_fallback and any(text in _BYTES for pair in merges for text in pair):
        raise UnsupportedModelError(f"{vocabulary.key('merges')} merges tokens of bytes", hint=_FOLDER)
    if pre.escape_spaces:
        steps.append(_replace(" ", _SPACE))
        decoder = _characters_decoder(strip=False)
    if pre.whole_newlines:
        _check_newlines(vocabulary, places)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": decoder,
        "model": _bpe(places, merges, byte_fallback=byte_fallback, ignore_merges=pre.ignore_merges),
    }


def _split_letters(vocabulary: Vocabulary, places: Mapping[str, int]) -> list[Json]:
    """Returns the pre-tokenizers that write bytes as letters, and remove letters without a token."""
    splits: list[Json] = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    if missing := {letter for letter in BYTES_OF_LETTERS if letter not in places}:
        longer = (text for text in places if len(text) > 1 and missing & set(text))
        assert vocabulary.pre is not None
        if vocabulary.pre.ignore_merges and any(set(text) <= set(BYTES_OF_LETTERS) for text in longer):
            raise UnsupportedModelError(
                f"{vocabulary.key('tokens')} has tokens of bytes that aren't tokens", hint=_FOLDER
            )
        splits.append(_split(_class(missing), "Removed"))
    return splits


def _split_characters(vocabulary: Vocabulary, places: Mapping[str, int]) -> list[Json]:
    """Returns pre-tokenizers that remove characters without a token; none if all 256 bytes have tokens.

    llama.cpp writes such a character as bytes and drops bytes without a token. The library needs tokens of all bytes of
    a character or writes none.
    """
    present = [byte for byte, text in enumerate(_BYTES) if text in places]
    if len(present) == len(_BYTES):
        return []
    if any(byte >= 0x80 for byte in present):
        raise UnsupportedModelError(
            f"{vocabulary.key('tokens')} has {len(present)} of the 256 tokens of bytes", hint=_FOLDER
        )
    known = {text for text in places if len(text) == 1} | set(map(chr, present))
    return [_split(_class(known, negated=True), "Removed")]


def _without_special(vocabulary: Vocabulary, places: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges without those that result in a special token.

    Special tokens are separated from a text before merging; where their text must stay text, no merge may make them.
    """
    parts = {text for pair in vocabulary.merges for text in pair}
    special = {text for text, i in places.items() if vocabulary.kinds[i] & _SPECIAL and text not in parts}
    return [(left, right) for left, right in vocabulary.merges if left + right not in special]


def _check_newlines(vocabulary: Vocabulary, places: Mapping[str, int]) -> None:
    """Raises UnsupportedModelError if merging doesn't turn each token of newlines into that one token.

    ``places``: token -> its id.
    """
    ranks = {pair: i for i, pair in enumerate(vocabulary.merges) if not (pair[0] + pair[1]).strip("\n")}
    for text in places:
        if not text.strip("\n"):
            symbols = list(text)
            while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]:
                _, i = min(pairs)
                symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
            if len(symbols) > 1:
                raise UnsupportedModelError(
                    f"{vocabulary.key('merges')} makes {len(symbols)} tokens of {len(text)} newlines, which are one",
                    hint=_FOLDER,
                )


def _sentencepiece(vocabulary: Vocabulary) -> Json:
    """Returns SentencePiece's merging as a BPE model: the pair with the highest score first, and of these the leftmost.

    The list of merges has each way to make a token of two others, sorted by score. SentencePiece merges tokens of equal
    score from left to right, which a list can't express in general; for runs of one character it can, with the longest
    first. So with equal scores the list is tested on texts of those tokens.
    """
    tokens, kinds, scores = vocabulary.tokens, vocabulary.kinds, vocabulary.scores
    places = {text: i for i, text in enumerate(tokens)}
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for i, text in enumerate(tokens):
        # An added token's own spelling is taken out of a text before, unless white space in it is written otherwise.
        added = kinds[i] & _SPECIAL or (kinds[i] & Kind.USER_DEFINED and _SPACE not in text)
        if len(text) < 2 or added or " " in text or text in _BYTES:
            continue
        missing = next((character for character in text if character not in places), None)
        if missing is not None:
            raise UnsupportedModelError(
                f"{vocabulary.key('tokens')}: token {i} has the character {missing!r}, which isn't a token",
                hint=_FOLDER,
            )
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in places and right in places:
                ranked.append((-scores[i], -len(text), i, -at, left, right))
    ranked.sort()
    unknown = vocabulary.ids.get("unk")
    parts: Json = {
        **_with_first_space(vocabulary),
        "decoder": _characters_decoder(strip=vocabulary.space_prefix),
        "model": _bpe(
            places,
            [(left, right) for *_, left, right in ranked],
            byte_fallback=any(text in places for text in _BYTES),
            unknown=None if unknown is None else tokens[unknown],
        ),
    }
    _check_ties(vocabulary, places, parts["model"], [(-score, tokens[i]) for score, _, i, *_ in ranked])
    return parts


def _with_first_space(vocabulary: Vocabulary) -> Json:
    """Returns the steps that write a space as U+2581, and put one before each part if the file's settings ask for that.

    A part may begin after a token that is matched after normalisation. Then the pre-tokenizer adds the space, unless
    U+2581 is already there.
    """
    steps, stripped = _strip(vocabulary), sorted(_stripped(vocabulary))
    splits: Json | None = None
    if vocabulary.space_prefix and stripped:
        tokens = "|".join(re.escape(vocabulary.tokens[i]) for i in stripped)
        steps.append(_replace(Regex(rf"(?:\A|(?<={tokens}))[ {_SPACE}]"), _SPACE * 2))
        splits = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": False}
    elif vocabulary.space_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append(_replace(" ", _SPACE))
    return {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": splits}


def _check_ties(
    vocabulary: Vocabulary, places: Mapping[str, int], model: Json, merged: Iterable[tuple[float, str]]
) -> None:
    """Raises UnsupportedModelError if texts of tokens with equal scores become other tokens than in llama.cpp."""
    groups: dict[float, set[str]] = defaultdict(set)
    for score, text in merged:
        groups[score].add(text)
    tied = sorted(text for group in groups.values() if len(group) > 1 for text in group)
    if not tied:
        return
    begun: dict[str, list[str]] = defaultdict(list)
    for text in tied:
        begun[text[0]].append(text)
    overlapping = (text + other[1:] for text in tied for other in begun[text[-1]])
    texts = chain((text * 3 for text in tied), overlapping, ("".join(pair) for pair in pairwise(tied)))
    library = tokenizers.Tokenizer.from_str(json.dumps({"model": model, "added_tokens": []}))
    for text in islice(texts, _MOST_TIED_TEXTS):
        if library.encode(text, add_special_tokens=False).tokens != merge_by_score(text, places, vocabulary.scores):
            raise UnsupportedModelError(
                f"{vocabulary.key('scores')} has tokens of the same score, such as {text[:40]!r}, whose order can't be "
                "expressed",
                hint=_FOLDER,
            )


def merge_by_score(text: str, places: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    """Returns the tokens of a text by SentencePiece's merging; unknown characters stay single.

    ``places``: token -> its id. ``scores``: the score of each id; the pair with the highest score is merged first.

    Kudo and Richardson, SentencePiece: A simple and language independent subword tokenizer (2018).
    """
    symbols = list(text)
    after, before = list(range(1, len(symbols) + 1)), list(range(-1, len(symbols) - 1))
    waiting: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < len(symbols):
            pair = symbols[left] + symbols[right]
            if pair in places:
                heapq.heappush(waiting, (-scores[places[pair]], left, right, pair))

    for i in range(len(symbols) - 1):
        offer(i, i + 1)
    while waiting:
        _, left, right, pair = heapq.heappop(waiting)
        if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != pair:
            continue
        symbols[left], symbols[right] = pair, ""
        after[left] = after[right]
        if after[right] < len(symbols):
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in symbols if symbol]


def _wordpiece(vocabulary: Vocabulary) -> Json:
    """Returns a WordPiece tokenizer, which takes the longest token at each position of a word.

    Tokens at the beginning of words begin with U+2581.
    """
    accents = [_replace(Regex(rf"[{first}-{last}]"), jamo) for first, last, jamo in _hangul()]
    steps = [
        *([*accents, {"type": "NFD"}] if vocabulary.strip_accents else []),
        _replace(Regex(r"[[\p{Cc}\p{Cf}\p{Co}\x{FFFD}]&&[^\s]]"), ""),
        *([_replace(Regex(r"\p{M}"), "")] if vocabulary.strip_accents else []),
        *([{"type": "Lowercase"}] if vocabulary.lowercase else []),
        _replace(Regex(rf"(?<![^\s{_WORDS_OF_ONE}]){_SPACE}"), _SPACE * 2),  # where it is there, Metaspace adds none
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                _split(r"\s+", "Removed"),
                _split(rf"[{_WORDS_OF_ONE}]", "Isolated"),
                {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": False},
            ],
        },
        "decoder": _characters_decoder(strip=True),
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[_id(vocabulary, "unk")],
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": {text: i for i, text in enumerate(vocabulary.tokens)},
        },
    }


_IDEOGRAPHS = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B920}-\x{2CEAF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
"""Characters that are words, as in BERT, whose table skips U+2B820 to U+2B91F."""
_WORDS_OF_ONE = rf"\p{{P}}$+<=>^`|~{_IDEOGRAPHS}"


def _hangul() -> Iterable[tuple[str, str, str]]:
    """Yields ranges of syllables (first, last) and the consonant to which llama.cpp reduces them when it strips
    accents.
    """
    for i in range(19):
        yield chr(0xAC00 + 588 * i), chr(0xAC00 + 588 * i + 587), chr(0x1100 + i)


def _unigram(vocabulary: Vocabulary) -> Json:
    """Returns SentencePiece's Unigram, which takes the tokens with the highest sum of scores."""
    kinds, scores = vocabulary.kinds, list(vocabulary.scores)
    if any(kind & Kind.BYTE for kind in kinds):
        raise UnsupportedModelError(f"{vocabulary.key('token_type')} has tokens of bytes in a t5 model", hint=_FOLDER)
    for i, kind in enumerate(kinds):
        if kind & Kind.USER_DEFINED:
            scores[i] = 0.0
    steps = _charsmap(vocabulary)
    if vocabulary.merge_spaces:
        steps += [_replace(Regex(r"\A +| +\z"), ""), _replace(Regex(" +"), _SPACE)]
        steps.append({"type": "Prepend", "prepend": _SPACE})
    else:
        steps.append(_replace(" ", _SPACE))
        if vocabulary.space_prefix:
            steps.append({"type": "Prepend", "prepend": _SPACE})
            steps.append(_replace(Regex(rf"\A{_SPACE}(?={_SPACE}*\z)"), ""))  # not before spaces alone
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "decoder": _characters_decoder(strip=vocabulary.space_prefix),
        "model": {
            "type": "Unigram",
            "unk_id": _id(vocabulary, "unk"),
            "vocab": [[text, score] for text, score in zip(vocabulary.tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _charsmap(vocabulary: Vocabulary) -> list[Json]:
    """Returns SentencePiece's normalisation by a table, which replaces the longest entry at each position.

    The library looks up a letter together with its accents, uses the shortest matching entry, and drops the rest. So
    the text is first converted to the Unicode form of the table, whose letters have no entries. This sorts accents into
    Unicode's order, and may compose them with letters that llama.cpp leaves alone.
    """
    if not vocabulary.charsmap:
        return []
    form = "NFC" if _by_table(vocabulary, _COMPATIBLE) == _COMPATIBLE else "NFKC"
    table = base64.b64encode(vocabulary.charsmap).decode()
    return [{"type": form}, {"type": "Precompiled", "precompiled_charsmap": table}]


def _by_table(vocabulary: Vocabulary, text: str) -> str:
    """Normalises a text with SentencePiece's table. Raises SourceError if the table is damaged."""
    with _library_errors(vocabulary):
        normalized: str = normalizers.Precompiled(vocabulary.charsmap).normalize_str(text)
    return normalized


def _library_errors(vocabulary: Vocabulary) -> AbstractContextManager[None]:
    return what_tokenizers_raises(
        lambda e: SourceError(f"{vocabulary.path}: the tokenizer can't be read: {e}", hint=_FOLDER)
    )


class Regex(str):
    """A regular expression, where a plain string is a text."""

    __slots__ = ()


def _pattern(pattern: str) -> Json:
    return {"Regex": as_in_unicode_15(pattern)} if isinstance(pattern, Regex) else {"String": pattern}


def _replace(pattern: str, content: str) -> Json:
    return {"type": "Replace", "pattern": _pattern(pattern), "content": content}


def _split(expression: str, behavior: str) -> Json:
    return {"type": "Split", "pattern": _pattern(Regex(expression)), "behavior": behavior, "invert": False}


def _class(characters: Iterable[str], *, negated: bool = False) -> str:
    """Returns a regular expression for one or more of the characters, or if negated, of all others."""
    codes = "".join(rf"\x{{{ord(one):X}}}" for one in sorted(characters))
    return f"[{'^' if negated else ''}{codes}]+"


def _characters_decoder(*, strip: bool) -> Json:
    """Returns a decoder that turns U+2581 into a space, and tokens of bytes into these bytes.

    ``strip``: True removes the space that the tokenizer puts before a text.
    """
    first = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strip else []
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *first]
    return {"type": "Sequence", "decoders": decoders}


def _bpe(
    places: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    *,
    byte_fallback: bool,
    ignore_merges: bool = False,
    unknown: str | None = None,
) -> Json:
    pairs = list(merges)
    # The library's older form, "a b" for ["a", "b"], is read in three quarters of the time.
    as_texts = not any(" " in text for pair in pairs for text in pair)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": dict(places),
        "merges": [f"{left} {right}" for left, right in pairs] if as_texts else pairs,
    }
