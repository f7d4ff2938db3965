from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from enginewright.optimizer.calibration.text_file import LEAST_TOKENS, read_sequences
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

VOCABULARY = 259
WORDS = "Rain fell on the hills, and the river rose over its banks. "


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle: Path) -> Tokenizer:
    """One token a byte, and no BOS before a text."""
    return Tokenizer(Bundle.open(tiny_bundle).tokenizer_files())


def written(tmp_path: Path, text: str, name: str = "text.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("length", "count"), [(32, 7), (64, 4)])
def test_a_text_is_cut_into_sequences(length: int, count: int, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = (WORDS * 4)[:223]
    sequences = read_sequences(written(tmp_path, text), tokenizer, VOCABULARY, 4096, length)
    assert [len(s) for s in sequences] == [length] * (count - 1) + [223 - length * (count - 1)]
    assert torch.cat(sequences).tolist() == tokenizer.encode(text)
    assert all(s.dtype == torch.int32 for s in sequences)


@pytest.mark.parametrize("tokens", [256, 512])
def test_a_long_text_is_thinned_out_evenly(tokens: int, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "".join(chr(97 + i // 100) * 100 for i in range(2600))
    sequences = read_sequences(written(tmp_path, text), tokenizer, VOCABULARY, tokens, 32)
    assert sum(len(s) for s in sequences) == tokens
    letters = sorted({tokenizer.decode(s.tolist())[0] for s in sequences})
    assert letters[0] == "a"
    assert letters[-1] > "v"


def test_documents_of_jsonl_are_not_mixed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [{"text": "a" * 100}, {"text": "b" * 40}, {"messages": [{"role": "user", "content": "hello"}]}]
    path = written(tmp_path, "\n\n".join(json.dumps(line) for line in lines) + "\n", "documents.jsonl")
    sequences = read_sequences(path, tokenizer, VOCABULARY, 4096, 64)
    assert [len(s) for s in sequences] == [64, 36, 40, len(tokenizer.encode("<s>[user] hello\n"))]
    assert tokenizer.decode(sequences[2].tolist()) == "b" * 40
    assert tokenizer.decode(sequences[3].tolist(), skip_special_tokens=False) == "<s>[user] hello\n"


def test_a_prefix_begins_every_sequence(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, text, add_special_tokens=True: [1] * add_special_tokens + encode(self, text),
    )
    sequences = read_sequences(written(tmp_path, WORDS * 4), tokenizer, VOCABULARY, 4096, 64)
    assert all(s[0] == 1 and len(s) <= 64 for s in sequences)
    assert sum(len(s) - 1 for s in sequences) == 4 * len(WORDS)


@pytest.mark.parametrize(
    ("data", "name", "says"),
    [
        (b"", "a.txt", "is empty"),
        (b" \n\n ", "a.txt", "is empty"),
        (b"GGUF\x00\x01" * 100, "a.txt", "is binary"),
        (b"caf\xe9 " * 100, "a.txt", "is not UTF-8 at byte 3"),
        (b"a short one", "a.txt", f"it has 11 tokens, and {LEAST_TOKENS} are the least"),
        (b'{"text": "x"}\nno json', "a.jsonl", "line 2 isn't JSON"),
        (b'{"text": "x"}\n\n{"body": "x"}', "a.jsonl", 'line 3 has neither "text" nor "messages"'),
        (b'{"text": 7}', "a.jsonl", 'line 1: "text" is not a string'),
        (b'{"messages": "x"}', "a.jsonl", 'line 1: "messages" is not a list'),
        (b'{"messages": [{"role": "user"}, 3]}', "a.jsonl", 'line 1: "messages" is not a list'),
        (b'["text"]', "a.jsonl", "line 1 has neither"),
    ],
)
def test_bad_files_are_named(data: bytes, name: str, says: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(RequestError) as error:
        read_sequences(path, tokenizer, VOCABULARY, 4096, 64)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert error.value.hint


def test_what_is_no_file_at_all(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("built-in")):
        with pytest.raises(RequestError, match="can't be read"):
            read_sequences(path, tokenizer, VOCABULARY, 4096, 64)


def test_a_model_without_a_tokenizer_is_given_text(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the model has no tokenizer"):
        read_sequences(written(tmp_path, WORDS * 9), None, VOCABULARY, 4096, 64)


def test_a_tokenizer_of_another_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the model has a vocabulary of 100"):
        read_sequences(written(tmp_path, WORDS * 9), tokenizer, 100, 4096, 64)
