"""Tokens of many texts and pairs, next to those of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from enginewright.optimizer.capture.tokenizer import with_tables
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import ContextError, RequestError
from enginewright.runtime.text import text_batch
from enginewright.runtime.text.text_batch import Text, encode_texts
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.runtime.pooled_toy import bert_tokenizer, text_tokenizer
from tests.runtime.text.test_quick_tokenizer import byte_level


def words(draw: random.Random, most: int) -> str:
    return " ".join("".join(draw.choices("abcdefg", k=draw.randint(1, 3))) for _ in range(draw.randint(1, most)))


def names(count: int) -> list[str]:
    return [f"texts[{i}]" for i in range(count)]


@pytest.mark.parametrize("pairs", [False, True])
def test_texts_are_cut_as_transformers_cuts_them(pairs: bool) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=bert_tokenizer(),
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids"],
    )
    draw = random.Random(3)
    texts: list[Text] = [(words(draw, 20), words(draw, 20)) if pairs else words(draw, 30) for _ in range(300)]
    ours = encode_texts(text_tokenizer(), texts, names(300), 24, truncate=True)
    columns: Any = [list(part) for part in zip(*texts, strict=True)] if pairs else [texts]
    theirs = reference(*columns, truncation=True, max_length=24)
    for one, ids, kinds in zip(ours, theirs["input_ids"], theirs["token_type_ids"], strict=True):
        assert one.ids == ids and (list(one.types) or [0] * len(ids)) == kinds
    assert {len(one.ids) for one in ours} > {24}
    alone = [encode_texts(text_tokenizer(), [text], ["text"], 24, truncate=True)[0] for text in texts[:50]]
    assert alone == ours[:50]


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 999_999 + "a", "ab " * 333_333, "\u6f6e" * 1_000_000])
@pytest.mark.parametrize("truncate", [False, True])
def test_a_million_characters_are_not_tokenized(text: str, truncate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if they have few tokens, as blanks and unknown words."""
    encode, count = text_batch._encode, 0

    def counted(tokenizer: Tokenizer, text: Text, name: str, **options: Any) -> tokenizers.Encoding:
        nonlocal count
        count += sum(map(len, text_batch._parts(text)))
        return encode(tokenizer, text, name, **options)

    monkeypatch.setattr(text_batch, "_encode", counted)
    texts: list[Text] = ["a b", text, ("a", text)]
    if truncate:
        results = encode_texts(text_tokenizer(), texts, names(3), 24, truncate=True)
        assert all(len(one.ids) <= 24 for one in results)
        assert results[0] == encode_texts(text_tokenizer(), ["a b"], names(1), 24)[0]
    else:
        for i in (1, 2):
            with pytest.raises(ContextError, match=r"^texts\[0\]: it(s first)? .* characters"):
                encode_texts(text_tokenizer(), texts[i : i + 1], names(1), 24)
    assert 0 < count <= 8 * text_batch.longest_text(24)


def test_a_tokenizer_without_a_token_names_the_text() -> None:
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(TokenizerFiles(plain.to_str(), None, {}))
    assert [one.ids for one in encode_texts(tokenizer, ["a", "a a"], names(2), 9)] == [[0], [0, 0]]
    for texts in (["a", "b"], [("a", "a"), ("a", "b")]):
        with pytest.raises(RequestError, match=r"^texts\[1\]: the tokenizer can't take it"):
            encode_texts(tokenizer, texts, names(2), 9)
    with pytest.raises(RequestError, match=r"^texts\[0\]: the tokenizer can't take it"):
        encode_texts(tokenizer, ["b"], names(1), 9)


def test_tokens_that_the_library_does_not_add() -> None:
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_bos": True, "add_eos": True}
    tokenizer = Tokenizer(TokenizerFiles(plain.to_str(), None, special))
    texts = ["a a", "a"]
    assert [one.ids for one in encode_texts(tokenizer, texts, names(2), 9)] == [[1, 0, 0, 2], [1, 0, 2]]
    assert [one.ids for one in encode_texts(tokenizer, ["a " * 9, "a"], names(2), 5, truncate=True)] == [
        [1, 0, 0, 0, 2],
        [1, 0, 2],
    ]
    with pytest.raises(RequestError, match="2 tokens have no room for a text"):
        encode_texts(tokenizer, ["a a", "a"], names(2), 2, truncate=True)
    with pytest.raises(ContextError, match=r"texts\[0\]: it has 4 tokens; a text may have 3"):
        encode_texts(tokenizer, texts, names(2), 3)


def test_a_tokenizer_by_tables_gives_the_same_tokens() -> None:
    """One text alone is tokenized by the tables, and several by the library, which the first batch reads."""
    library = byte_level()
    files = with_tables(TokenizerFiles(library.to_str(), None, {}))
    texts = ["the quick fox", "12 123 brown", "naïve the the the the the the the the the"]
    reads: list[str] = []

    def read() -> str:
        reads.append("")
        return library.to_str()

    tokenizer = Tokenizer(files, read)
    expected = [library.encode(text).ids for text in texts]
    alone = [encode_texts(tokenizer, [text], ["text"], 50)[0].ids for text in texts]
    assert alone == expected and not reads
    assert [one.ids for one in encode_texts(tokenizer, texts, names(3), 50)] == expected and len(reads) == 1
    library.enable_truncation(6)
    cut = [library.encode(text).ids for text in texts]
    assert [one.ids for one in encode_texts(tokenizer, texts, names(3), 6, truncate=True)] == cut
