"""A tokenizer by tables gives the tokens and texts that the library gives."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from enginewright.optimizer.capture.tokenizer import with_tables
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.bundle.tokenizer_tables import TokenizerTables, tables_of
from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.text.quick_tokenizer import QuickTokenizer
from enginewright.runtime.text.tokenizer import Tokenizer

WORDS = (
    "the quick brown fox jumps over the lazy dog and the other foxes thank them aaaa aaa aabab naïve 東京 12 123 1212"
)
LETTERS = [
    *"aabehtnox  .,!\n\t12",
    "é",
    "e\u0301",
    "京",
    "東",
    "😀",
    "\u00a0",
    "<|end|>",
    "<s>",
    "<0x41>",
    "Z",
    "the",
    "他",
]
SPECIAL = ["<s>", "<|end|>"]


def byte_level(*, ignore_merges: bool = False, added: bool = False) -> tokenizers.Tokenizer:
    """Makes one as GPT-2, SmolLM2 and Llama 3 have: its pieces are letters that stand for bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [WORDS] * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    if ignore_merges:
        vocab, merges = _saved(backend)
        # Some tokens can't be merged any more, so that a piece is one of them only as a whole.
        backend.model = models.BPE(vocab, [pair for i, pair in enumerate(merges) if i % 3], ignore_merges=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if added:
        backend.add_tokens([AddedToken("fox", single_word=True), AddedToken("12", lstrip=True, normalized=True)])
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A <s>", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def _saved(made: tokenizers.Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def sentencepiece(*, byte_fallback: bool = True, fuse: bool = True) -> tokenizers.Tokenizer:
    """Makes one as Llama 2 and Gemma have: the whole text is one piece, and an unknown letter is its bytes."""
    first = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    first.normalizer = normalizers.Replace(" ", "▁")
    first.train_from_iterator(
        [WORDS, *WORDS.split()], trainers.BpeTrainer(vocab_size=140, special_tokens=["<unk>"], show_progress=False)
    )
    vocab, merges = _saved(first)
    if byte_fallback:
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=fuse, byte_fallback=byte_fallback)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(SPECIAL)
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "whole_pieces": lambda: byte_level(ignore_merges=True),
    "added": lambda: byte_level(added=True),
    "sentencepiece": sentencepiece,
    "unknown": lambda: sentencepiece(byte_fallback=False),
    "unknown_apart": lambda: sentencepiece(byte_fallback=False, fuse=False),
}


def quick_one(whole: tokenizers.Tokenizer) -> QuickTokenizer:
    tables = tables_of(whole.to_str())
    assert tables is not None
    return QuickTokenizer(TokenizerTables(tables), lambda: whole)


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return KINDS[request.param]()


def texts(seed: int, n: int) -> list[str]:
    rng = random.Random(seed)
    words = [*LETTERS, *WORDS.split(), " "]
    return ["".join(rng.choices(words, k=rng.randint(1, 30))) for _ in range(n)]


def test_tokens_are_the_librarys(whole: tokenizers.Tokenizer) -> None:
    quick = quick_one(whole)
    for text in ["", WORDS, *texts(0, 600)]:
        for special in (False, True):
            expected = whole.encode(text, add_special_tokens=special).ids
            assert quick.merged(text, add_special_tokens=special) == expected, text


def test_texts_are_the_librarys(whole: tokenizers.Tokenizer) -> None:
    quick, rng = quick_one(whole), random.Random(1)
    size = whole.get_vocab_size()
    for _ in range(300):
        ids = [rng.randrange(size + 5) for _ in range(rng.randint(0, 12))]
        for skip in (False, True):
            assert quick.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip), ids


def test_names_are_the_librarys(whole: tokenizers.Tokenizer) -> None:
    quick, size = quick_one(whole), whole.get_vocab_size()
    assert quick.get_vocab(with_added_tokens=True) == whole.get_vocab(with_added_tokens=True)
    assert [quick.id_to_token(i) for i in range(size + 2)] == [whole.id_to_token(i) for i in range(size + 2)]
    for name in [*whole.get_vocab(), "no such token", ""]:
        assert quick.token_to_id(name) == whole.token_to_id(name)
    names, expected = quick.get_added_tokens_decoder(), whole.get_added_tokens_decoder()
    assert {i: str(token) for i, token in names.items()} == {i: str(token) for i, token in expected.items()}


def test_merges_that_meet() -> None:
    """The first of equal ranks goes first; a pair whose tokens have become others since is left."""
    letters = {letter: i for i, letter in enumerate("abc")}
    names = ["aa", "ab", "bc", "aab", "aaaa", "abc"]
    vocab = letters | {name: i + len(letters) for i, name in enumerate(names)}
    merges = [("a", "a"), ("a", "b"), ("b", "c"), ("aa", "b"), ("aa", "aa"), ("ab", "c"), ("a", "bc"), ("a", "a")]
    whole = tokenizers.Tokenizer(models.BPE(vocab, merges))
    quick, rng = quick_one(whole), random.Random(2)
    for _ in range(2_000):
        text = "".join(rng.choices("aaabbc", k=rng.randint(1, 24)))
        assert quick.merged(text, add_special_tokens=False) == whole.encode(text).ids, text


def test_the_whole_is_read_when_that_takes_less_time() -> None:
    backend, read = byte_level(), []
    tables = tables_of(backend.to_str())
    assert tables is not None

    def reads() -> tokenizers.Tokenizer:
        read.append(backend)
        return backend

    quick = QuickTokenizer(TokenizerTables(tables), reads)
    for n in range(2 * backend.get_vocab_size() // 10):
        assert quick.encode("the foxes ", add_special_tokens=True).ids == backend.encode("the foxes ").ids
        assert not read, n
    assert quick.encode("the foxes ", add_special_tokens=True).ids == backend.encode("the foxes ").ids
    assert quick.encode("a", add_special_tokens=True).ids == backend.encode("a").ids
    assert len(read) == 1


@pytest.mark.parametrize(
    "model",
    [
        models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False),
        models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
        models.BPE({"a": 0, "##b": 1, "ab": 2}, [("a", "##b")], continuing_subword_prefix="##"),
        models.BPE({"a": 0, "b</w>": 1, "ab</w>": 2}, [("a", "b</w>")], end_of_word_suffix="</w>"),
        models.BPE({"a": 0, "bc": 1}, [], ignore_merges=True),
    ],
)
def test_others_are_left_to_the_library(model: models.Model) -> None:
    backend = tokenizers.Tokenizer(model)
    assert tables_of(backend.to_str()) is None
    files = TokenizerFiles(backend.to_str())
    assert with_tables(files) is files


def test_an_added_letter_is_left_to_the_library() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.add_tokens(["c"])
    assert tables_of(backend.to_str()) is None


def test_a_tokenizer_that_differs_gets_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    files = TokenizerFiles(byte_level().to_str())
    assert with_tables(files).tables is not None
    monkeypatch.setattr(QuickTokenizer, "merged", lambda *_, **__: [0])
    assert with_tables(files) is files


def test_the_tokenizer_of_a_bundle_by_tables() -> None:
    files = with_tables(TokenizerFiles(byte_level().to_str(), special_tokens={"eos_token": "<|end|>", "add_eos": True}))
    json_text = files.tokenizer_json or ""
    whole, quick = Tokenizer(files), Tokenizer(files, lambda: json_text)
    assert quick.vocabulary == whole.vocabulary and quick.special_ids == whole.special_ids
    for text in texts(3, 100):
        ids = whole.encode(text)
        assert quick.encode(text) == ids
        assert quick.decode(ids) == whole.decode(ids)
        assert [quick.token_bytes(index) for index in ids] == [whole.token_bytes(index) for index in ids]
    with pytest.raises(RequestError, match="isn't a character"):
        quick.encode("\udce9")
    assert quick.to_json() == whole.to_json()


def test_what_is_wrong_with_the_file_is_named_when_it_is_read() -> None:
    files = with_tables(TokenizerFiles(byte_level().to_str()))
    quick = Tokenizer(files, lambda: "{}")
    with pytest.raises(BundleError, match=r"tokenizer/tokenizer\.json: "):
        quick.encode("the fox " * 1_000)
