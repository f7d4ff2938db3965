"""The splitting of texts, compared with parts that llama.cpp's rules give by hand."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, pre_tokenizers

from enginewright.optimizer.capture.gguf.header import read_header
from enginewright.optimizer.capture.gguf.pretokenizers import PRE_TOKENIZERS, as_in_unicode_15
from enginewright.optimizer.capture.gguf.tokenizer import build_files
from enginewright.optimizer.capture.gguf.vocabulary import read_vocabulary
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.optimizer.capture.random_texts import TRICKY_TEXTS, spared

from .gguf_vocabularies import GOLDEN_TOKENS, digest, tricky_vocabulary, write_keys


def parts(pre, text):
    splits = []
    for one in PRE_TOKENIZERS[pre].splits:
        pattern = Regex(as_in_unicode_15(one.expression))
        behavior = {"Isolated": "isolated", "MergedWithPrevious": "merged_with_previous"}[one.behavior]
        splits.append(pre_tokenizers.Split(pattern, behavior))
    return [part for part, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "a  12", ["a", "  ", "1", "2"]),
        ("gpt-2", "a  12 it's", ["a", " ", " 12", " it", "'s"]),
        ("falcon", "a, 1234", ["a", ",", " ", "123", "4"]),
        ("llama-bpe", "12345 IT'LL\r\n\n x", ["123", "45", " IT", "'LL", "\r\n\n", " x"]),
        ("qwen2", "a 12\n\n  b", ["a", " ", "1", "2", "\n\n", " ", " b"]),
        ("deepseek-v3", "abc日本12345!x", ["abc", "日本", "123", "45", "!x"]),
        ("deepseek-llm", "aéb 12", ["a", "é", "b", " ", "12"]),
        ("tekken", "HelloWorld ABc", ["Hello", "World", " ABc"]),
        ("afmoe", "ab 1234567", ["ab", " ", "1", "234", "567"]),
        ("superbpe", "x1234567y12³456", ["x", "1", "234", "567", "y", "12³", "456"]),
        ("kimi-k2", "漢字ab's12", ["漢字", "ab's", "12"]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("laguna", "a\n\n b", ["a", "\n\n", " b"]),
        ("whitespace", "ab c", ["ab", " ", "c"]),
    ],
)
def test_parts(pre, text, expected):
    assert parts(pre, text) == expected


@pytest.mark.parametrize("category", ["L", "N", "M", "P", "S"])
def test_categories_are_those_of_unicode_15(category):
    counts = {"L": 66_100, "N": 1_831, "M": 2_210, "P": 842, "S": 7_775}
    text = "".join(chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)
    split = pre_tokenizers.Split(Regex(as_in_unicode_15(rf"\p{{{category}}}+")), "removed")
    assert len(text) - sum(len(part) for part, _ in split.pre_tokenize_str(text)) == counts[category]


def test_every_name_has_llama_cpps_tokens(tmp_path):
    """Names with equal splits and defaults are tried once. The soak test compares each name with llama.cpp itself."""
    keys, digests = tricky_vocabulary(), {}
    for name, pre in PRE_TOKENIZERS.items():
        if pre not in digests:
            path = write_keys(tmp_path / "tricky.gguf", keys | {"pre": name})
            tokenizer = Tokenizer(build_files(read_vocabulary(path, read_header(path).keys), {}))
            digests[pre] = digest([tokenizer.encode(text) for text in spared(TRICKY_TEXTS, name)])
    assert {name: digests[pre] for name, pre in PRE_TOKENIZERS.items()} == json.loads(GOLDEN_TOKENS.read_text())


def test_the_number_of_names():
    assert len(PRE_TOKENIZERS) == 91
    assert {"default", "smollm", "llama-bpe", "tekken", "kimi-k2", "gemma4"} <= PRE_TOKENIZERS.keys()
