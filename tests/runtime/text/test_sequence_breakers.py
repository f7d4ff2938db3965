"""Sequence breakers as tokens, beside llama.cpp's rule, applied to one token after the other."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.sequence_breakers import SequenceBreakers
from enginewright.runtime.text.tokenizer import BYTES_OF_LETTERS, Tokenizer

WORDS = [*"abcx\n:", "ab", "xab", "bc", "abc", "xabcx", ":\n", "cab", "Ċ:", "abca"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Words of a few letters, and all bytes, as a byte-level tokenizer has them; nothing is merged."""
    letters = {byte: letter for letter, byte in BYTES_OF_LETTERS.items()}
    spelled = ["".join(letters[byte] for byte in word.encode()) for word in WORDS] + sorted(BYTES_OF_LETTERS)
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(spelled))}
    backend = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(TokenizerFiles(backend.to_str(), None, {"eos_token": "<|end|>"}))


@pytest.mark.parametrize("texts", [["\n"], ["ab"], ["abc"], ["\n", ":", "cab"], ["<|end|>"], ["é"], ["zz", "aa"], []])
def test_tokens_are_those_of_llama_cpps_rule(tokenizer: Tokenizer, texts: list[str]) -> None:
    size = len(tokenizer.vocabulary)
    expected: dict[int, set[tuple[int, ...]]] = {}
    for text in (text.encode() for text in texts):
        for token in range(size):
            word = tokenizer.token_bytes(token)
            if text in word:
                expected.setdefault(token, set()).add(())
                continue
            for length in range(1, len(text)):
                try:
                    rest = text[length:].decode()
                except UnicodeDecodeError:
                    continue
                if word.endswith(text[:length]):
                    tail = tuple(tokenizer.encode(rest, add_special_tokens=False))
                    expected.setdefault(token, set()).add(tail)
    lists = SequenceBreakers(tokenizer, size).find(texts)
    assert {token: set(tails) for token, tails in lists.items()} == expected
    assert bool(lists) == bool(set(texts) - {"é"})  # of which no token has more than one byte


def test_a_tail_has_twenty_tokens_at_most(tokenizer: Tokenizer) -> None:
    lists = SequenceBreakers(tokenizer, len(tokenizer.vocabulary)).find(["q" * 40])
    (tails,) = lists.values()
    assert {len(tail) for tail in tails} == {20}
