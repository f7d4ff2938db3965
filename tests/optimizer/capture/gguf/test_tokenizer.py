"""Tokenizers built from GGUF files. What llama.cpp makes of texts was written down with its own tokens' names."""

from __future__ import annotations

import pytest

from enginewright.optimizer.capture.gguf.header import read_header
from enginewright.optimizer.capture.gguf.tokenizer import build_files, merge_by_score
from enginewright.optimizer.capture.gguf.vocabulary import read_vocabulary
from enginewright.optimizer.capture.tokenizer import with_tables
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from enginewright.runtime.text.tokenizer import Tokenizer

from .gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    charsmap,
    sentencepiece,
    write_keys,
)


def build(tmp_path, keys):
    path = write_keys(tmp_path / "t.gguf", keys)
    header = read_header(path).keys
    vocabulary = read_vocabulary(path, header)
    files = build_files(vocabulary, header)
    return Tokenizer(with_tables(files)), vocabulary.tokens, files


def tokens_of(built, text, **options):
    tokenizer, tokens, _ = built
    return [tokens[i] for i in tokenizer.encode(text, **options)]


def test_markers_beyond_the_alphabet_of_bytes(tmp_path):
    special = {"<｜begin▁of▁sentence｜>": CONTROL, "<｜User｜>": USER_DEFINED, "éé": USER_DEFINED}
    keys = byte_level(["hello"], special, "deepseek-r1-qwen", add_bos_token=True)
    keys["bos_token_id"] = keys["tokens"].index("<｜begin▁of▁sentence｜>")
    built = build(tmp_path, keys)
    assert tokens_of(built, "<｜User｜>hello") == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "hello"]
    tokenizer = built[0]
    assert tokenizer.decode(tokenizer.encode("<｜User｜>hello éé")) == "<｜User｜>hello éé"
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("aé🙂éé", add_special_tokens=False)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "aé🙂éé"


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("glm4", True), ("dbrx", False)])
def test_merges_are_ignored_for_what_is_a_token(tmp_path, pre, whole):
    keys = byte_level(["xy"], {"ab": NORMAL, "<s>": CONTROL}, pre, add_bos_token=False)
    assert tokens_of(build(tmp_path, keys), "ab") == (["ab"] if whole else ["a", "b"])


@pytest.mark.parametrize("stated", [True, False, None])
def test_the_space_before_a_text(tmp_path, stated):
    keys = sentencepiece(["▁hello", "hello"], {"<x>": CONTROL}, add_space_prefix=stated, add_bos_token=False)
    built = build(tmp_path, keys)
    first = "hello" if stated is False else "▁hello"
    assert tokens_of(built, "hello") == [first]
    assert tokens_of(built, "hello<x>hello") == [first, "<x>", first]
    assert built[0].decode(built[0].encode("hello hello")) == "hello hello"


def test_tokens_are_put_around_a_text_as_the_file_says(tmp_path):
    built = build(tmp_path, sentencepiece(["▁a"], add_eos_token=True))
    assert tokens_of(built, "a") == ["<s>", "▁a", "</s>"] and tokens_of(built, "a", add_special_tokens=False) == ["▁a"]
    assert tokens_of(built, "<s>a") == ["<s>", "<s>", "▁a", "</s>"]  # as in llama.cpp


def test_bytes_of_characters_without_a_token(tmp_path):
    built = build(tmp_path, sentencepiece(["▁a"], add_bos_token=False))
    assert tokens_of(built, "aé\n") == ["▁a", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert built[0].decode(built[0].encode("aé\n🙂")) == "aé\n🙂"


def test_a_control_token_is_text_where_it_must_be(tmp_path):
    keys = sentencepiece(["▁<x", "<x", "x>"], {"<x>": CONTROL}, add_bos_token=False)
    built = build(tmp_path, keys)
    assert tokens_of(built, "a<x>")[-1] == "<x>"
    assert [built[1][i] for i in built[0].encode_guarded("<x>")][-1] == ">"
    merged = byte_level(["<|>"], {"<s>": CONTROL}, "gpt-2")
    merged["token_type"][merged["tokens"].index("<|>")] = CONTROL
    built = build(tmp_path, merged)
    assert tokens_of(built, "<|>") == ["<|>"]
    assert [built[1][i] for i in built[0].encode_guarded("<|>")] == ["<|", ">"]


def test_every_chat_template(tmp_path):
    keys = byte_level([], {"<s>": CONTROL}, "gpt-2") | {
        "tokenizer.chat_template": "one",
        "tokenizer.chat_template.tool_use": "two",
        "tokenizer.chat_templates": ["tool_use"],
    }
    files = build(tmp_path, keys)[2]
    assert files.chat_template == "one" and files.other_templates == {"tool_use": "two"}
    with pytest.raises(SourceError, match=r"tokenizer\.chat_template\.rag isn't a text"):
        build(tmp_path, keys | {"tokenizer.chat_template.rag": 3})


def test_a_letter_that_no_token_has_is_left_out_and_keeps_its_neighbours_apart(tmp_path):
    keys = byte_level(["ac"], {"<s>": CONTROL}, "gpt-2")
    keys["tokens"][keys["tokens"].index("b")] = "<unused>"
    assert tokens_of(build(tmp_path, keys), "abcac") == ["a", "c", "ac"]


def test_words_of_bert(tmp_path):
    special = {"[PAD]": CONTROL, "[UNK]": CONTROL, "[CLS]": CONTROL, "[SEP]": CONTROL}
    words = ["▁hello", "▁wor", "ld", "▁,", "▁東", "▁e", "e", "▁\u1100"]
    ids = {"padding_token_id": 0, "unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    keys = {"model": "bert", "tokens": [*special, *words], "token_type": [*special.values(), *[NORMAL] * len(words)]}
    built = build(tmp_path, keys | ids)
    assert tokens_of(built, "Hello, WORLD東\u00e9 xyz 가\x07") == [
        *("[CLS]", "▁hello", "▁,", "▁wor", "ld", "▁東", "▁e", "[UNK]", "▁\u1100", "[SEP]"),
    ]
    built = build(tmp_path, keys | ids | {"normalizer.lowercase": None, "tokenizer.ggml.normalizer.lowercase": False})
    assert tokens_of(built, "Hello é", add_special_tokens=False) == ["[UNK]", "[UNK]"]


def test_a_word_that_begins_with_the_sign_of_words(tmp_path):
    special = {"[UNK]": CONTROL, "[CLS]": CONTROL, "[SEP]": CONTROL}
    words = ["▁a", "a", "▁,", "▁b"]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "seperator_token_id": 2}
    keys = {"model": "bert", "tokens": [*special, *words], "token_type": [*special.values(), *[NORMAL] * len(words)]}
    built = build(tmp_path, keys | ids)
    assert tokens_of(built, "a ▁a, ▁ a▁a,▁a,a", add_special_tokens=False) == [
        *("▁a", "[UNK]", "▁,", "[UNK]", "▁a", "▁a", "▁,", "[UNK]", "▁,", "▁a"),
    ]


PHI_3 = ["<|end|> \n\t a", "<x> \xa0", "</s>\xa0 a", "<s> a", "<|end|>▁a", "a<|end|>  ", "<y z> a", "▁a<x><x>\u3000"]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (
            True,
            [
                *(["<|end|>", "▁a"], ["<x>", "▁", "\xa0"], ["</s>", "▁", "\xa0", "▁a"], ["<s>", "▁", "▁a"]),
                *(["<|end|>", "▁", "▁a"], ["▁a", "<|end|>"], ["<y z>", "▁a"], ["▁", "▁a", "<x>", "<x>", "▁", "\u3000"]),
            ],
        ),
        (
            False,
            [
                *(["<|end|>", "a"], ["<x>", "\xa0"], ["</s>", "\xa0", "▁a"], ["<s>", "▁a"]),
                *(["<|end|>", "▁a"], ["a", "<|end|>"], ["<y z>", "a"], ["▁a", "<x>", "<x>", "\u3000"]),
            ],
        ),
    ],
)
def test_white_space_after_control_tokens_of_phi_3(tmp_path, prefix, expected):
    special = {"<|end|>": CONTROL, "<x>": USER_DEFINED, "<y z>": CONTROL, "<|endoftext|>": CONTROL}
    keys = sentencepiece(["▁a", "a", "\xa0", "\u3000"], special, add_space_prefix=prefix, add_bos_token=False)
    built = build(tmp_path, keys | {"general.name": "Phi-3-mini"})
    assert [tokens_of(built, text) for text in PHI_3] == expected
    tokenizer, tokens, _ = built
    ids = tokenizer.encode_guarded(tokenizer.guarded("<|end|>") + " a")
    assert [tokens[i] for i in ids] == ["<|end|>", "▁a" if prefix else "a"]
    of_a_message = tokenizer.encode_guarded("<|end|> a")
    assert tokens[of_a_message[-1]] == "▁a" and "<|end|>" not in {tokens[i] for i in of_a_message}


def test_white_space_before_a_mask(tmp_path):
    built = build(tmp_path, byte_level(["a", " "], {"<mask>": CONTROL}, "jina-v2-de", add_bos_token=False))
    assert tokens_of(built, "a \t\n<mask>\x0b a") == ["a", "<mask>", "ċ", "Ġ", "a"]
    assert tokens_of(built, "a\u3000 <mask>")[1:-1] == ["ã", "Ģ", "Ģ"]


@pytest.mark.parametrize(
    ("merges", "prefix", "expected"),
    [
        (True, True, ["▁a", "▁b"]),
        (False, True, ["▁", "▁a", "▁", "▁b", "▁"]),
        (False, False, ["▁a", "▁", "▁b", "▁"]),
    ],
)
def test_unigrams(tmp_path, merges, prefix, expected):
    special = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN}
    keys = {
        "model": "t5",
        "tokens": [*special, "▁", "a", "b", "▁a", "▁b"],
        "token_type": [*special.values(), *[NORMAL] * 5],
        "scores": [0.0, 0.0, 0.0, -1.0, -4.0, -4.0, -2.0, -2.0],
        "remove_extra_whitespaces": merges,
        "add_space_prefix": prefix,
    }
    built = build(tmp_path, keys)
    assert tokens_of(built, " a  b ") == [*expected, "</s>"]
    assert tokens_of(built, "acc", add_special_tokens=False)[-1] == "<unk>"


def test_white_space_before_a_mask_of_unigrams(tmp_path):
    special = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN, "<mask>": CONTROL}
    keys = {
        "model": "t5",
        "general.architecture": "nomic-bert-moe",
        "tokens": [*special, "▁", "▁a", "a", "\x85"],
        "token_type": [*special.values(), *[NORMAL] * 4],
        "scores": [0.0] * 4 + [-2.0, -1.0, -2.0, -1.0],
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": charsmap({"\t": " ", "\n": " ", "\v": "", "\f": " ", "\r": " "}),
    }
    built = build(tmp_path, keys)
    assert tokens_of(built, "a \t\r<mask> \n<mask>a\x85<mask>", add_special_tokens=False) == [
        *("▁a", "<mask>", "<mask>", "▁a", "\x85", "<mask>"),
    ]


@pytest.mark.parametrize(
    ("entries", "text", "expected"),
    [
        ({"ﬁ": "fi", "½": "1⁄2"}, "ﬁ½\u0301", ["f", "i", "1", "⁄", "2", "\u0301"]),  # the accent isn't lost
        ({"½": "1⁄2"}, "ﬁ½", ["ﬁ", "1", "⁄", "2"]),
        ({}, "ﬁ½\u0301", ["ﬁ", "½", "\u0301"]),
    ],
)
def test_texts_are_normalised_by_the_table(tmp_path, entries, text, expected):
    special = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN}
    characters = ["▁", "f", "i", "ﬁ", "1", "⁄", "2", "½", "\u0301"]
    keys = {
        "model": "t5",
        "tokens": [*special, *characters],
        "token_type": [*special.values(), *[NORMAL] * len(characters)],
        "scores": [0.0] * 3 + [-1.0] * len(characters),
        "precompiled_charsmap": charsmap(entries) if entries else None,
    }
    assert tokens_of(build(tmp_path, keys), text, add_special_tokens=False) == expected


def test_runs_of_equal_score_are_merged_from_the_left(tmp_path):
    keys = sentencepiece(["▁a"], {"▁▁": NORMAL, "▁▁▁": NORMAL, "▁▁▁▁": NORMAL}, add_space_prefix=False)
    keys["scores"][-3:] = [-1e9] * 3
    built = build(tmp_path, keys)
    places = {text: i for i, text in enumerate(built[1])}
    for count in range(1, 30):
        expected = merge_by_score("▁" * count, places, keys["scores"])
        assert tokens_of(built, " " * count, add_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (byte_level([], {"<s>": CONTROL}, "gpt-2", merges=["a b"]), SourceError, "merges: pair 0 has 'ab'"),
        (sentencepiece(["ab"], {"zz": NORMAL}), UnsupportedModelError, r"tokens: token \d+ has the character 'z'"),
        (
            sentencepiece([], {"a": 1, "b": 1, "c": 1, "ab": 1, "bc": 1, "ca": 1, "abc": 1}, scores=[0.0] * 300),
            UnsupportedModelError,
            "scores has tokens of the same score",
        ),
        (
            {"model": "t5", "tokens": ["<unk>", "</s>", "a"], "token_type": [2, 3, BYTE], "unknown_token_id": 0},
            UnsupportedModelError,
            "token_type has tokens of bytes",
        ),
        (
            byte_level([], {"<0xFF>": NORMAL, "<s>": CONTROL}, "sarvam-moe"),
            UnsupportedModelError,
            "tokens has 1 of the 256 tokens of bytes",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(tmp_path, keys, error, message):
    with pytest.raises(error, match=rf"t\.gguf: tokenizer\.ggml\.{message}"):
        build(tmp_path, keys)
