"""Reads the vocabulary of a GGUF file: tokens, kinds, scores, merges and special tokens, with llama.cpp's defaults.

Reference: llama.cpp, ``llama_vocab::impl::load`` in src/llama-vocab.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from enginewright.runtime.text import fill_in_middle

from .header import GgufArray
from .pretokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_AGAIN = "Download or convert the file again."
_FOLDER = "Export from the model's Hugging Face directory."
_NO_TOKEN = (0xFFFFFFFF, -1)
"""Ids that converters write if there is no such token."""

_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
    "fim_pre": "fim_pre_token_id",
    "fim_suf": "fim_suf_token_id",
    "fim_mid": "fim_mid_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
_OLDER_IDS = {"fim_pre": "prefix_token_id", "fim_suf": "suffix_token_id", "fim_mid": "middle_token_id"}
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
    "gemma4": {},
}
"""Model of a tokenizer that can be read -> its special tokens that a file needn't name, with their ids."""
_WITHOUT_DEFAULT_BOS = ("chatglm-bpe", "glm4", "glm5")
_OTHER_MODELS = ("rwkv", "plamo2", "hybriddna", "whitespace", "test")
_NO_TOKENIZER = ("no_vocab", "none")

_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
"""Tokens that end an answer in any model, by their texts."""
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Kind(IntFlag):
    """The kind of a token. A control token may also be an unused one."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    UNUSED = 16
    BYTE = 32


_KINDS = {1: Kind.NORMAL, 2: Kind.UNKNOWN, 3: Kind.CONTROL, 4: Kind.USER_DEFINED, 5: Kind.UNUSED, 6: Kind.BYTE}
"""Kinds by their numbers in ``tokenizer.ggml.token_type``."""


@dataclass(frozen=True)
class Vocabulary:
    """The checked vocabulary of a file.

    Attributes:
        path: the file.
        model: ``tokenizer.ggml.model``: "llama" (SentencePiece's BPE), "gpt2" (byte-level BPE), "gemma4" (BPE of
            characters), "bert" (WordPiece) or "t5" (Unigram).
        pre: the pre-tokenizer of a "gpt2" or "gemma4" model.
        tokens: the text of each id.
        kinds: the kind of each id.
        scores: the score of each id, a float32's value.
        merges: pairs of tokens in the order of merging, without repeated pairs.
        ids: special tokens by name ("bos", "eos", "unk", ...), with llama.cpp's defaults.
        stated: names in ``ids`` that the file itself has.
        end_ids: tokens that end an answer, the file's own first.
        add_bos: True if texts begin with the start token.
        add_eos: True if texts end with the end token.
        add_sep: True if a separator is put between the two texts of a pair, after the end token.
        space_prefix: True if a space is put before a text, and after each special token.
        merge_spaces: True if white space is reduced to one space between words.
        lowercase: True if the "bert" model lowers letters.
        strip_accents: True if the "bert" model removes accents.
        strip_before: ids that remove the white space before them.
        strip_after: ids that remove the white space after them.
        charsmap: SentencePiece's table of normalisations, empty if there is none.
    """

    path: Path
    model: str
    pre: PreTokenizer | None
    tokens: Sequence[str]
    kinds: Sequence[Kind]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    ids: Mapping[str, int]
    stated: frozenset[str]
    end_ids: Sequence[int]
    add_bos: bool
    add_eos: bool
    add_sep: bool
    space_prefix: bool
    merge_spaces: bool
    lowercase: bool
    strip_accents: bool
    strip_before: frozenset[int]
    strip_after: frozenset[int]
    charsmap: bytes

    def key(self, name: str) -> str:
        """Returns the path of the file with the name of one of its tokenizer's keys, for messages."""
        return f"{self.path}: {_PREFIX}{name}"


def read_vocabulary(path: Path, keys: Mapping[str, Any]) -> Vocabulary | None:
    """Reads the vocabulary of a file; None if it has none.

    Args:
        path: the file, for messages.
        keys: the keys of its header, arrays as ``GgufArray``.

    Raises:
        UnsupportedModelError: the tokenizer or pre-tokenizer can't be read; names it.
        SourceError: a key is missing or wrong; names it.
    """
    if f"{_PREFIX}model" not in keys:
        return None
    reader = _Reader(path, keys)
    model = reader.text("model") or ""
    if model in _NO_TOKENIZER:
        return None
    if model not in _DEFAULT_IDS:
        known = ", ".join(_DEFAULT_IDS)
        reason = "can't be read from GGUF files" if model in _OTHER_MODELS else f"isn't known; {known} are"
        raise UnsupportedModelError(f"{path}: {_PREFIX}model {model!r} {reason}", hint=_FOLDER)
    pre_name, pre = reader.pre_tokenizer(model)
    tokens = reader.tokens()
    kinds = reader.kinds(len(tokens))
    defaults = {name: i for name, i in _DEFAULT_IDS[model].items() if i < len(tokens)}
    if pre_name in _WITHOUT_DEFAULT_BOS:
        defaults.pop("bos", None)
    stated = reader.ids(len(tokens))
    ids = {**defaults, **stated}
    # llama.cpp takes token 11 for the end of texts that name none, which is a comma or some such.
    ends = ids if model != "gpt2" else {**ids, "eos": stated.get("eos", -1)}
    end_ids = _adjust_kinds(tokens, kinds, ids, ends)
    strip_before, strip_after = _stripping(keys, tokens, kinds)
    lowercase = reader.flag("normalizer.lowercase", True)
    add_bos = reader.flag("add_bos_token", model in ("llama", "bert") or (pre is not None and pre.add_bos))
    vocabulary = Vocabulary(
        path=path,
        model=model,
        pre=pre,
        tokens=tokens,
        kinds=kinds,
        scores=reader.scores(len(tokens)),
        merges=reader.merges(required=pre_name != "kimi-k2") if pre is not None else (),
        ids=ids,
        stated=frozenset(stated),
        end_ids=end_ids,
        add_bos=add_bos or model == "bert" or (pre is not None and pre.always_bos),
        add_eos=reader.flag("add_eos_token", model == "t5"),
        add_sep=reader.flag("add_sep_token", False),
        space_prefix=reader.flag("add_space_prefix", model == "llama"),
        merge_spaces=reader.flag("remove_extra_whitespaces", False),
        lowercase=lowercase,
        strip_accents=reader.flag("normalizer.strip_accents", lowercase),
        strip_before=strip_before,
        strip_after=strip_after,
        charsmap=reader.charsmap() if model == "t5" else b"",
    )
    for added, name in ((vocabulary.add_bos, "bos"), (vocabulary.add_eos, "eos")):
        if added and name not in ids:
            raise SourceError(f"{vocabulary.key(_IDS[name])} is missing, and texts have that token added", hint=_AGAIN)
    return vocabulary


class _Reader:
    """Reads the keys of a tokenizer. Each method raises SourceError naming a key of another type or length."""

    def __init__(self, path: Path, keys: Mapping[str, Any]) -> None:
        self._path, self._keys = path, keys

    def text(self, name: str) -> str | None:
        value = self._keys.get(_PREFIX + name)
        if value is not None and not isinstance(value, str):
            self._fail(name, f"is {_shown(value)}, and no text")
        return value

    def pre_tokenizer(self, model: str) -> tuple[str, PreTokenizer | None]:
        """Returns the name and the settings of the pre-tokenizer; "" and None for models that have none.

        Raises UnsupportedModelError for an unknown name.
        """
        if model not in ("gpt2", "gemma4"):
            return "", None
        name = "gemma4" if model == "gemma4" else self.text("pre") or "default"
        if name not in PRE_TOKENIZERS:
            raise UnsupportedModelError(f"{self._path}: {_PREFIX}pre {name!r} isn't known", hint=_FOLDER)
        return name, PRE_TOKENIZERS[name]

    def flag(self, name: str, default: bool) -> bool:
        value = self._keys.get(_PREFIX + name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._fail(name, f"is {_shown(value)}, and neither true nor false")
        return value

    def ids(self, count: int) -> dict[str, int]:
        """Reads the ids of special tokens by name. An older name of a key counts if the newer one is missing."""
        ids: dict[str, int] = {}
        for name in _IDS:
            for key in (_IDS[name], _OLDER_IDS.get(name)):
                value = self._keys.get(f"{_PREFIX}{key}") if key else None
                if key is None or value is None or name in ids or value in _NO_TOKEN:
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
                    self._fail(key, f"is {_shown(value)}, and ids are from 0 to {count - 1}")
                ids[name] = value
        return ids

    def tokens(self) -> list[str]:
        array = self._array("tokens", strings=True)
        if array is None or not len(array):
            self._fail("tokens", "is missing" if array is None else "is empty")
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self._texts("tokens", array))]
        if len(set(tokens)) < len(tokens):
            places: dict[str, int] = {}
            for i, text in enumerate(tokens):
                if (first := places.setdefault(text, i)) != i:
                    self._fail("tokens", f"has {text[:40]!r} twice, as {first} and {i}")
        return tokens

    def kinds(self, count: int) -> list[Kind]:
        numbers = self._numbers("token_type", count, float_too=False)
        return [Kind.NORMAL] * count if numbers is None else [_KINDS.get(n, Kind.UNDEFINED) for n in numbers]

    def scores(self, count: int) -> list[float]:
        numbers = self._numbers("scores", count, float_too=True)
        if numbers is None:
            return [0.0] * count
        for i, score in enumerate(numbers):
            if not math.isfinite(score):
                self._fail("scores", f"has {score} as {i}")
        return [float(score) for score in numbers]

    def merges(self, *, required: bool) -> list[tuple[str, str]]:
        array = self._array("merges", strings=True)
        if array is None:
            if required:
                self._fail("merges", "is missing")
            return []
        pairs: dict[tuple[str, str], None] = {}
        for i, text in enumerate(self._texts("merges", array)):
            at = text.find(" ", 1)
            if at < 0:
                self._fail("merges", f"has {text[:40]!r} as {i}, and no two tokens")
            pairs[text[:at], text[at + 1 :]] = None
        return list(pairs)

    def charsmap(self) -> bytes:
        numbers = self._numbers("precompiled_charsmap", 0, float_too=False)
        if not numbers:
            return b""
        if not all(-128 <= n < 256 for n in numbers):
            self._fail("precompiled_charsmap", "has numbers that aren't bytes")
        table = bytes(n & 255 for n in numbers)
        if len(table) < 4 or struct.unpack_from("<I", table)[0] + 4 >= len(table):
            self._fail("precompiled_charsmap", "is damaged")
        return table

    def _array(self, name: str, *, strings: bool) -> GgufArray | None:
        value = self._keys.get(_PREFIX + name)
        if value is None:
            return None
        if not isinstance(value, GgufArray) or value.of_strings != strings:
            kind = "texts" if strings else "numbers"
            self._fail(name, f"is {'another array' if isinstance(value, GgufArray) else _shown(value)}, not {kind}")
        return value

    def _texts(self, name: str, array: GgufArray) -> list[str]:
        texts = []
        for i, text in enumerate(array.read_bytes()):
            try:
                texts.append(text.decode())
            except UnicodeDecodeError:
                self._fail(name, f"has {text[:40]!r} as {i}, which isn't UTF-8")
        return texts

    def _numbers(self, name: str, count: int, *, float_too: bool) -> list[Any] | None:
        array = self._array(name, strings=False)
        if array is None:
            return None
        if len(array) < count:
            self._fail(name, f"has {len(array):,} numbers, and there are {count:,} tokens")
        numbers: list[Any] = array.read()
        if numbers and (isinstance(numbers[0], bool) or (isinstance(numbers[0], float) and not float_too)):
            self._fail(name, "has values of another type")
        return numbers[:count] if count else numbers

    def _fail(self, name: str, reason: str) -> NoReturn:
        raise SourceError(f"{self._path}: {_PREFIX}{name} {reason}", hint=_AGAIN)


def _shown(value: object) -> str:
    return "an array" if isinstance(value, GgufArray) else f"{value!r:.60}"


_INNER_ENDS: tuple[tuple[str, tuple[frozenset[str], ...], Kind], ...] = (
    # A turn of OpenAI's and Upstage's formats has several parts, each of which ends with this token.
    (
        "<|end|>",
        tuple(map(frozenset, product(("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>")))),
        Kind.USER_DEFINED,
    ),
    ("</s>", (frozenset({"<|tool_response>"}), frozenset({"<|plamo:eos|>"})), Kind.NORMAL),
)
"""End tokens that end only a part of an answer in some models: (text, sets of texts, kind of the token then).

They don't end an answer if the vocabulary has all texts of one of the sets.
"""


def _adjust_kinds(
    tokens: Sequence[str], kinds: list[Kind], ids: dict[str, int], ends: Mapping[str, int]
) -> tuple[int, ...]:
    """Changes kinds of tokens with known texts as llama.cpp does, and returns the ids that end an answer.

    Args:
        tokens: the text of each id.
        kinds: the kind of each id, which is changed.
        ids: special tokens by name; special tokens for filling in the middle are added.
        ends: the file's end tokens by name.
    """
    places = {text: i for i, text in enumerate(tokens)}
    for name, texts in fill_in_middle.TEXTS.items():
        known = sorted(places[text] for text in texts if text in places)
        if name not in ids and known:
            ids[name] = known[0]
            kinds[known[0]] |= Kind.CONTROL
    for i, text in enumerate(tokens):
        if kinds[i] & Kind.CONTROL and "unused" in text:
            kinds[i] |= Kind.UNUSED
    end_ids = {places[text] for text in _END_TEXTS if text in places}
    for i in end_ids:
        kinds[i] |= Kind.CONTROL
    for text in _SHOWN_TEXTS:
        if text in places:
            kinds[places[text]] = Kind.USER_DEFINED
    end_ids |= {ids[name] for name in ("fim_pad", "fim_rep", "fim_sep") if name in ids}
    return _without_inner_ends(tokens, kinds, end_ids, ends)


def _without_inner_ends(
    tokens: Sequence[str], kinds: list[Kind], end_ids: set[int], ends: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the ids that end an answer, the file's own first, without those that end only a part of an answer.

    ``end_ids``: ids of known end texts. The other parameters are those of ``_adjust_kinds``.
    """
    end_ids |= {ends[name] for name in ("eos", "eot", "eom") if ends.get(name, -1) >= 0}
    texts_of_ends = {tokens[i] for i in end_ids}
    for text, beside, kind in _INNER_ENDS:
        if text in texts_of_ends and any(texts <= texts_of_ends for texts in beside):
            end_ids.remove(tokens.index(text))
            kinds[tokens.index(text)] = kind
    named = [ends[name] for name in ("eos", "eot", "eom") if ends.get(name, -1) in end_ids]
    return tuple(dict.fromkeys([*named, *sorted(end_ids)]))


def _stripping(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[Kind]
) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the ids that remove the white space before them, and the ids that remove the white space after them.

    Files don't have this setting; as in llama.cpp, the model's name decides.
    """
    name, architecture = (str(keys.get(f"general.{key}", "")) for key in ("name", "architecture"))
    pre, name = str(keys.get(f"{_PREFIX}pre", "")), name.lower()
    before: set[int] = set()
    after: set[int] = set()
    if any(one in pre for one in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        one in architecture for one in ("nomic-bert-moe", "jina-bert-v3")
    ):
        before = {i for i, text in enumerate(tokens) if text == "<mask>"}
    elif "phi-3" in name or "phi3" in name:
        special = Kind.CONTROL | Kind.USER_DEFINED | Kind.UNKNOWN
        after = {i for i, text in enumerate(tokens) if kinds[i] & special or text == "</s>"}
        after -= {i for i in after if tokens[i] in ("<unk>", "<s>", "<|endoftext|>")}
    elif "modern-bert" in name:
        before = {i for i, text in enumerate(tokens) if text == "[MASK]"}
    return frozenset(before), frozenset(after)
