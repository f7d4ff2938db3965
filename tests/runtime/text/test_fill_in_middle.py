"""Prompts for filling in the middle, by the tokens of each family of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.fill_in_middle import TEXTS, Gap
from enginewright.runtime.text.tokenizer import BYTES_OF_LETTERS, Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def tokenizer_with(special: Sequence[str], names: Mapping[str, Any] | None = None) -> Tokenizer:
    """Single bytes and some special tokens."""
    backend = LibraryTokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(sorted(BYTES_OF_LETTERS))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", *special])
    return Tokenizer(TokenizerFiles(backend.to_str(), None, {"bos_token": "<s>", "add_bos": True, **(names or {})}))


def text_of(tokenizer: Tokenizer, gap: Gap) -> str:
    """A prompt as text, with its special tokens."""
    assert tokenizer.fill_in_middle is not None
    ids = tokenizer.fill_in_middle.prompt(tokenizer, gap, lambda name, text: tokenizer.encode_guarded(text))
    return tokenizer.decode(ids, skip_special_tokens=False)


GAP = Gap("def f():\n", "\nf()", [("a.py", "x = 1\n"), ("", "y")])


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (
            QWEN,
            "<s><|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>tmp\ny<|file_sep|>filename\n"
            "<|fim_prefix|>def f():\n<|fim_suffix|>\nf()<|fim_middle|>",
        ),
        (
            DEEPSEEK,
            "<s>\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny"
            "<｜fim▁begin｜>def f():\n<｜fim▁hole｜>\nf()<｜fim▁end｜>",
        ),
        (
            ("[PREFIX]", "[SUFFIX]"),
            "<s>\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny[SUFFIX]\nf()[PREFIX]def f():\n",
        ),
    ],
)
def test_prompts_of_families(special: Sequence[str], expected: str) -> None:
    """The order and the names are llama.cpp's; Codestral reads the end first."""
    assert text_of(tokenizer_with(special), GAP) == expected


def test_ends_are_the_tokens_that_end_no_other_answer() -> None:
    tokenizer = tokenizer_with([*QWEN, "<EOT>"])
    markers = tokenizer.fill_in_middle
    assert markers is not None
    assert {tokenizer.spelled(token) for token in markers.ends} == {
        "<EOT>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    }
    assert len({markers.fim_pre, markers.fim_suf, markers.fim_mid, *markers.ends}) == 7


def test_a_clients_text_has_no_control_tokens() -> None:
    tokenizer = tokenizer_with(STARCODER)
    markers = tokenizer.fill_in_middle
    assert markers is not None
    ids = markers.prompt(tokenizer, Gap("<fim_middle>", "<s>"), lambda name, text: tokenizer.encode_guarded(text))
    assert [token for token in ids if token in tokenizer.special_ids] == [
        tokenizer.token_id("<s>"), markers.fim_pre, markers.fim_suf, markers.fim_mid,
    ]  # fmt: skip


def test_special_tokens_may_have_other_texts() -> None:
    """A GGUF file names them by keys, and a folder as CodeLlama's does."""
    names = {"prefix_token": "<a>", "suffix_token": "<b>", "fim_mid_token": "<c>", "middle_token": "<d>"}
    tokenizer = tokenizer_with(["<a>", "<b>", "<c>", "<d>"], names)
    assert text_of(tokenizer, Gap("1", "2")) == "<s><a>1<b>2<c>"


def test_most_models_have_none() -> None:
    assert tokenizer_with([]).fill_in_middle is None
    assert tokenizer_with(["<fim_prefix>", "<fim_suffix>"]).fill_in_middle is None  # no middle
    assert not set.intersection(*(set(texts) for texts in TEXTS.values()))


def test_no_space_is_put_before_the_end() -> None:
    """A tokenizer such as CodeLlama's puts a space before a text: right for its beginning, wrong after a gap."""
    words = ["▁", "a", "b", "▁a", "▁b", "\n", "<0x0A>"]
    backend = LibraryTokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("▁", "a"), ("▁", "b")])
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("▁<PRE>", "▁<SUF>", "▁<MID>")])
    tokenizer = Tokenizer(TokenizerFiles(backend.to_str(), None, {}))
    markers = tokenizer.fill_in_middle
    assert markers is not None
    ids = markers.prompt(tokenizer, Gap("a", "b"), lambda name, text: tokenizer.encode_guarded(text))
    assert [tokenizer.spelled(token) for token in ids] == ["▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]
    assert json.loads(tokenizer.to_json())["model"]["vocab"]["b"] == ids[3]
