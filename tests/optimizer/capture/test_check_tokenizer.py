"""Every export compares the bundle's tokenizer with the source's, and both with the model's table of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from enginewright.optimizer.capture.check_tokenizer import TEXTS, SourceTokenizer, check_tokenizer
from enginewright.optimizer.capture.tokenizer import load_tokenizer, tokenizer_files
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer


def byte_level(split: Any = None, *, first: int = 0) -> Tokenizer:
    """A byte-level BPE with merges that cross what another pre-tokenizer would keep apart."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [
        ("1", "2"),
        ("12", "3"),
        ("Ġ", "t"),
        ("Ġt", "h"),
        ("a", "a"),
        ("aa", "aa"),
        ("Ġ", "Ġ"),
        ("'", "s"),
        ("s", "!"),
    ]
    names = ["<|endoftext|>", "<s>", *letters, *(a + b for a, b in pairs)]
    backend = Tokenizer(models.BPE({name: first + i for i, name in enumerate(names)}, pairs))
    backend.add_special_tokens(["<|endoftext|>", "<s>"])
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = byte if split is None else pre_tokenizers.Sequence([split, byte])
    backend.decoder = decoders.ByteLevel()
    return backend


def digits() -> Tokenizer:
    """SmolLM2's, StarCoder2's and Granite-code's shape: digits apart, before GPT-2's own pattern."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def threes() -> Tokenizer:
    return byte_level(pre_tokenizers.Split(Regex(r"\p{N}{1,2}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"))


def prefixed() -> Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def normalized() -> Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("1", "2")])
    return backend


def started() -> Tokenizer:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def with_added() -> Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken("123", normalized=False), AddedToken("fox", lstrip=True, single_word=True)])
    return backend


CASES: dict[str, Callable[[], Tokenizer]] = {
    **{"digits": digits, "threes": threes, "prefix": prefixed, "normalizer": normalized},
    **{"start": started, "added": with_added, "plain": byte_level},
}
CLASSES = (
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "PreTrainedTokenizerFast",
    None,
)


def save(folder: Path, backend: Tokenizer, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("case", CASES)
def test_tokenizer_json_decides_whatever_the_class(case: str, name: str | None, tmp_path: Path) -> None:
    backend = CASES[case]()
    config: dict[str, Any] = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    save(tmp_path, backend, add_prefix_space=False, add_bos_token=False, **config)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    files = tokenizer_files(loaded)
    bundled = RuntimeTokenizer(files)
    for text in TEXTS:
        assert bundled.encode(text) == backend.encode(text).ids, text
    original = SourceTokenizer.of_json(backend.to_str())
    assert check_tokenizer(files, original, 512, end_tokens=(0,), source="x") == []


def test_a_class_names_the_special_tokens_that_its_files_do_not(tmp_path: Path) -> None:
    """openai-community/gpt2 says of its special tokens nothing; its class does. Llama's aren't in this vocabulary."""
    for name, expected in (("GPT2Tokenizer", "<|endoftext|>"), ("LlamaTokenizer", None)):
        save(tmp_path / name, byte_level(), tokenizer_class=name)
        loaded = load_tokenizer(tmp_path / name)
        assert loaded is not None and tokenizer_files(loaded).special_tokens["eos_token"] == expected
        assert len(loaded) == byte_level().get_vocab_size(), "nothing is added"


def test_files_without_tokenizer_json_are_read_by_their_class(tmp_path: Path) -> None:
    backend = byte_level()
    document = json.loads(backend.to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in document["model"]["merges"])
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    files = tokenizer_files(loaded)
    texts = [text for text in TEXTS if "<s>" not in text]  # which is a special token in tokenizer.json alone
    assert [RuntimeTokenizer(files).encode(text) for text in texts] == [backend.encode(text).ids for text in texts]
    assert not check_tokenizer(files, SourceTokenizer.of_transformers(loaded), 512, source="x")


def files_of(backend: Tokenizer, **special: Any) -> TokenizerFiles:
    return tokenizer_files(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


def test_other_tokens_are_an_error() -> None:
    original = SourceTokenizer.of_json(digits().to_str())
    with pytest.raises(SourceError, match=r"folder: the tokenizer doesn't survive the export: .* has the tokens"):
        check_tokenizer(files_of(byte_level()), original, 512, source="folder")
    moved = SourceTokenizer(SourceTokenizer.of_json(byte_level().to_str()).encode, {"<s>": 7}.get)
    with pytest.raises(SourceError, match=r"bos_token is token 7, and the bundle's tokenizer has 1"):
        check_tokenizer(files_of(byte_level(), bos_token="<s>"), moved, 512, source="folder")


def test_tokens_beyond_the_model() -> None:
    """One that a text has is an error, as is a start or end token; others are named in a warning."""
    backend = byte_level()
    original = SourceTokenizer.of_json(backend.to_str())
    size = backend.get_vocab_size()
    with pytest.raises(SourceError, match=r"the tokenizer gives token \d+ .* and the model has tokens 0 to 99"):
        check_tokenizer(files_of(backend), original, 100, source="folder")
    more = byte_level()
    more.add_special_tokens(["<image>", "<end>"])
    of_more = SourceTokenizer.of_json(more.to_str())
    [warning] = check_tokenizer(files_of(more), of_more, size, source="folder")
    assert "has 2 tokens that the model" in warning and "'<image>', '<end>'" in warning
    with pytest.raises(SourceError, match=rf"eos_token is '<end>', token {size + 1}, and the model has tokens"):
        check_tokenizer(files_of(more, eos_token="<end>"), of_more, size, source="folder")


def test_two_ends_of_a_text_are_reported() -> None:
    files = files_of(byte_level(), eos_token="<|endoftext|>")
    original = SourceTokenizer.of_json(byte_level().to_str())
    assert not check_tokenizer(files, original, 512, end_tokens=(5, 0), source="x")
    [warning] = check_tokenizer(files, original, 512, end_tokens=(5,), source="x")
    assert "eos_token is token 0" in warning and "ends texts at 5" in warning
