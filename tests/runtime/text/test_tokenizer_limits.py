"""A tokenizer.json that multiplies text, or takes endless time, is refused before the library reads it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.bundle.tokenizer_tables import tables_of
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.text.tokenizer import Tokenizer, library_tokenizer
from enginewright.runtime.text.tokenizer_limits import MOST_TOKEN_CHARACTERS, check_tokenizer_json

Json = dict[str, Any]


def document(**parts: Any) -> Json:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]} | parts.pop("model", {})
    return {"version": "1.0", "added_tokens": [], "model": model, **parts}


def replace(pattern: str, content: str, kind: str = "String") -> Json:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def nested(part: Json, inner: str, times: int) -> Json:
    for _ in range(times):
        part = {"type": "Sequence", inner: [part, part]}
    return part


def charsmap(*texts: str) -> Json:
    data = (4).to_bytes(4, "little") + bytes(4) + "\0".join(texts).encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(*pieces: Json) -> Json:
    special = {"<s>": {"id": "<s>", "ids": [0] * 100, "tokens": ["<s>"] * 100}}
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": special}


TEXT, SPECIAL = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}

HOSTILE: dict[str, tuple[Json, str]] = {
    "decoder empty": ({"decoder": replace("", "xx")}, "decoder: its pattern matches nothing"),
    "decoder empty regex": ({"decoder": replace("b*", "xx", "Regex")}, "decoder: its pattern matches nothing"),
    "decoder longer": (
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "aaaa")] * 6}},
        r"decoder\.decoders\[3\]: with the parts before it, it makes more than 128",
    ),
    "decoder nested": ({"decoder": nested(replace("a", "aa"), "decoders", 8)}, "makes more than 128"),
    "decoder suffixes": (
        {"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 10}},
        "it adds more than 64",
    ),
    "decoder delimiters": (
        {"decoder": {"type": "Sequence", "decoders": [{"type": "CTC", "word_delimiter_token": ""}] * 10}},
        "it adds more than 64",
    ),
    "decoder unknown": ({"decoder": {"type": "Repeat"}}, "decoder: its type is 'Repeat', which isn't known"),
    "decoder of long tokens": (
        {"decoder": replace("a", "a" * 100), "model": {"vocab": {"a" * 1000: 0}, "merges": []}},
        "decoder: it makes up to 100,000 characters of one token",
    ),
    "normalizer empty": ({"normalizer": replace("", "x")}, "normalizer: its pattern matches nothing"),
    "normalizer prepends": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 40}] * 2}},
        r"normalizer\.normalizers\[1\]: with the parts before it, it adds more than 64",
    ),
    "normalizer chain": (
        {"normalizer": {"type": "Sequence", "normalizers": [charsmap("a" * 20), replace("a", "a" * 20)]}},
        "makes more than 128",
    ),
    "charsmap": ({"normalizer": charsmap("a", "b" * 200)}, "makes more than 128"),
    "charsmap damaged": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "precompiled_charsmap is damaged",
    ),
    "bytes of bytes": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 5}},
        "makes more than 128",
    ),
    "split": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        r"pre_tokenizer: the regular expression '\(a\+\)\+\$' can't be used: it repeats a part",
    ),
    "parts": ({"normalizer": nested({"type": "NFC"}, "normalizers", 11)}, "has more than 512 parts"),
    "list": ({"normalizer": []}, "normalizer: it isn't an object"),
    "texts twice": ({"post_processor": template(TEXT, TEXT)}, "post_processor.single: it has a text more than once"),
    "special tokens": ({"post_processor": template(*[SPECIAL] * 3, TEXT)}, "single: it adds 300 tokens"),
    "long token": (
        {"model": {"vocab": {"a" * (MOST_TOKEN_CHARACTERS + 1): 0}, "merges": []}},
        "a token has 16,385 characters",
    ),
    "long suffix": ({"model": {"end_of_word_suffix": "x" * 65}}, "model.end_of_word_suffix has more than 64"),
    "word piece": (
        {"model": {"type": "WordPiece", "max_input_chars_per_word": 1 << 30}},
        "max_input_chars_per_word is above 1,000",
    ),
    "ids": ({"model": {"vocab": {"a": 0, "b": 0}, "merges": []}}, "two tokens have the id 0"),
    "large id": ({"model": {"vocab": {"a": 1 << 40}, "merges": []}}, "a token has the id 1099511627776"),
    "added": ({"added_tokens": [{"content": "x", "id": 2}]}, "two tokens have the id 2"),
    "another vocabulary": (
        {"model": {"vocab": 3}, "decoder": replace("", "xx")},
        "decoder: its pattern matches nothing",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_name(name: str) -> None:
    parts, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message):
        check_tokenizer_json(json.dumps(document(**parts)))
    with pytest.raises(BundleError, match=message):
        library_tokenizer(json.dumps(document(**parts)))


@pytest.mark.parametrize(
    "parts",
    [
        {"decoder": {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}},
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    *(replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),
                    *(charsmap("x" * 33), replace(" {2,}", " ", "Regex"), {"type": "Prepend", "prepend": "▁"}),
                ],
            }
        },
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}},
        {"post_processor": template(SPECIAL, TEXT, SPECIAL)},
    ],
    ids=["llama", "bert", "albert", "metaspace", "template"],
)
def test_parts_in_use_pass(parts: Json) -> None:
    check_tokenizer_json(json.dumps(document(**parts)))


def test_not_a_tokenizer() -> None:
    for text in ("[]", "1", "{", '{"model": {"vocab": ' + "[" * 100_000):
        with pytest.raises(ValueError, match=r"it isn't|nested too deep"):
            check_tokenizer_json(text)


def test_tables_are_checked_like_the_whole() -> None:
    """tables.bin has a tokenizer.json of its own, which is what a bundle opens first."""
    text = json.dumps(document(decoder=replace("a", "aaa")))
    tables = tables_of(tokenizers.Tokenizer.from_str(text).to_str())
    assert tables is not None
    Tokenizer(TokenizerFiles(tables=tables), lambda: text)
    hostile = tables_of(json.dumps(document(decoder=replace("", "xx"))))
    long = tables_of(json.dumps(document(model={"vocab": {"a": 0, "a" * 20_000: 1}, "merges": []})))
    for data, message in ((hostile, "matches nothing"), (long, "a token has 20,000 characters")):
        assert data is not None
        with pytest.raises(BundleError, match=f"tables.bin: .*{message}"):
            Tokenizer(TokenizerFiles(tables=data), lambda: text)
