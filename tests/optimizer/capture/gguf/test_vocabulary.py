"""The keys of a GGUF file's tokenizer: defaults, kinds of tokens, and errors that name the key."""

from __future__ import annotations

import pytest

from enginewright.optimizer.capture.gguf.header import read_header
from enginewright.optimizer.capture.gguf.vocabulary import Kind, read_vocabulary
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .gguf_vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, sentencepiece, write_keys


def read(tmp_path, keys):
    path = write_keys(tmp_path / "v.gguf", keys)
    return read_vocabulary(path, read_header(path).keys)


@pytest.mark.parametrize(
    ("pre", "stated", "adds"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("chameleon", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("qwen2", True, True),
        ("gemma4", False, True),
        (None, None, False),
    ],
)
def test_the_start_token_is_llama_cpps_default_of_the_pre_tokenizer(tmp_path, pre, stated, adds):
    assert read(tmp_path, byte_level([], {"<s>": CONTROL}, pre, add_bos_token=stated)).add_bos is adds


def test_defaults_of_models(tmp_path):
    vocabulary = read(tmp_path, sentencepiece(["▁a"]))
    assert (vocabulary.add_bos, vocabulary.add_eos, vocabulary.space_prefix) == (True, False, True)
    assert vocabulary.ids == {"bos": 1, "eos": 2, "unk": 0} and vocabulary.end_ids == (2,)
    assert read(tmp_path, {"model": None}) is None and read(tmp_path, {"model": "no_vocab"}) is None


def test_tokens_that_end_a_turn_are_those_of_llama_cpp(tmp_path):
    special = dict.fromkeys(["<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|file_sep|>", "<other>"], CONTROL)
    special |= {"<|message|>": CONTROL, "</s>": NORMAL}
    keys = byte_level([], special, "qwen2", eos_token_id=256 + 4, eot_token_id=256 + 1)
    vocabulary = read(tmp_path, keys)
    assert vocabulary.end_ids == (260, 257, 256, 258, 259, 262)
    assert vocabulary.kinds[262] & Kind.CONTROL and vocabulary.kinds[261] == Kind.USER_DEFINED
    channels = dict.fromkeys(["<|return|>", "<|call|>", "<|end|>", "<|channel|>"], CONTROL)
    vocabulary = read(tmp_path, byte_level([], channels, "gpt-4o", eos_token_id=256))
    assert vocabulary.end_ids == (256, 257) and vocabulary.kinds[258] == Kind.USER_DEFINED


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "rwkv"}, UnsupportedModelError, "model 'rwkv' can't be read"),
        ({"model": "new"}, UnsupportedModelError, "model 'new' isn't known"),
        ({"model": 3}, SourceError, "model is 3, and no text"),
        ({"pre": "no-such"}, UnsupportedModelError, "pre 'no-such' isn't known"),
        ({"pre": True}, SourceError, "pre is True, and no text"),
        ({"tokens": None}, SourceError, "tokens is missing"),
        ({"tokens": [1, 2]}, SourceError, "tokens is another array, not texts"),
        ({"tokens": "abc"}, SourceError, "tokens is 'abc', not texts"),
        ({"tokens": ["a", "b", "a"]}, SourceError, "tokens has 'a' twice, as 0 and 2"),
        ({"tokens": [b"a", b"\xff\xfe"]}, SourceError, r"tokens has b'\\xff\\xfe' as 1, which isn't UTF-8"),
        ({"token_type": [1, 1]}, SourceError, "token_type has 2 numbers, and there are 257 tokens"),
        ({"token_type": [1.0] * 257}, SourceError, "token_type has values of another type"),
        ({"scores": [1.0]}, SourceError, "scores has 1 numbers, and there are 257 tokens"),
        ({"scores": [float("nan")] * 257}, SourceError, "scores has nan as 0"),
        ({"merges": None}, SourceError, "merges is missing"),
        ({"merges": [3]}, SourceError, "merges is another array, not texts"),
        ({"merges": ["ab"]}, SourceError, "merges has 'ab' as 0, and no two tokens"),
        ({"bos_token_id": 257}, SourceError, "bos_token_id is 257, and ids are from 0 to 256"),
        ({"eos_token_id": "x"}, SourceError, "eos_token_id is 'x', and ids are from 0 to 256"),
        ({"add_bos_token": 1}, SourceError, "add_bos_token is 1, and neither true nor false"),
        ({"pre": "glm4", "bos_token_id": None, "add_bos_token": True}, SourceError, "bos_token_id is missing"),
    ],
)
def test_a_wrong_key_is_named(tmp_path, change, error, message):
    keys = byte_level([], {"<s>": CONTROL}, "smollm") | change
    with pytest.raises(error, match=rf"v\.gguf: tokenizer\.ggml\.{message}"):
        read(tmp_path, keys)


def test_an_id_that_says_none(tmp_path):
    keys = byte_level([], {"<s>": CONTROL}, "smollm", padding_token_id=0xFFFFFFFF)
    assert "pad" not in read(tmp_path, keys).ids


def test_a_first_merge_counts_and_an_empty_token_has_a_name(tmp_path):
    keys = byte_level(["ab"], {"": USER_DEFINED, "<s>": CONTROL}, "smollm")
    keys["merges"] *= 2
    vocabulary = read(tmp_path, keys)
    assert vocabulary.merges == [("a", "b")] and vocabulary.tokens[257] == "[EMPTY_257]"
