"""The tables of a tokenizer: what they hold, and damage."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import models

from enginewright.runtime.bundle.tokenizer_tables import TokenizerTables, tables_of
from enginewright.runtime.shared.errors import BundleError


@pytest.fixture(scope="module")
def data() -> bytes:
    vocab = {"a": 0, "é": 1, "aé": 5, "aéa": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("aé", "a"), ("a", "é")]))
    tables = tables_of(backend.to_str())
    assert tables is not None
    return tables


def test_what_is_in_them(data: bytes) -> None:
    tables = TokenizerTables(data)
    assert [tables.text(index) for index in range(-1, 7)] == [None, "a", "é", None, "aéa", None, "aé", None]
    assert [tables.find(name) for name in ("a", "é", "aé", "aéa", "b", "", "aéaa")] == [0, 1, 5, 3, None, None, None]
    assert tables.merge(0, 1) == (1, 5)
    assert tables.merge(5, 0) == (0, 3)
    assert tables.merge(0, 0) is tables.merge(1, 0) is tables.merge(3, 3) is None


def test_the_same_tokenizer_has_the_same_bytes(data: bytes) -> None:
    vocab = {"aéa": 3, "aé": 5, "é": 1, "a": 0}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("aé", "a"), ("a", "é")]))
    assert tables_of(backend.to_str()) == data


def test_damage_is_found(data: bytes) -> None:
    rng = random.Random(0)
    damaged = [b"", data[:7], data[:30], data[:-1], data + b"\0"]
    for _ in range(200):
        at = rng.randrange(len(data))
        damaged.append(data[:at] + bytes([data[at] ^ rng.randint(1, 255)]) + data[at + 1 :])
    for one in damaged:
        with pytest.raises(BundleError, match=r"tokenizer/tables\.bin: the file is damaged"):
            TokenizerTables(one)
