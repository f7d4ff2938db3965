"""Tokenizers of every kind: what streams, piece by piece, is what the whole decodes to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.output_text import OutputText
from enginewright.runtime.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world! It's a fine day, isn't it? Hello there, world.",
    "Grüße aus Zürich — 世界你好 😀👍🏽 👨‍👩‍👧 naïve café e\u0301",
    "def f(x):\n    return x + 1\n\n\tprint('a  b')   \n",
    "नमस्ते दुनिया, مرحبا بالعالم, שלום עולם, 안녕하세요",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def byte_level(add_prefix_space: bool) -> tokenizers.Tokenizer:
    """GPT-2's kind; Llama 3's, Qwen's and many others'."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if not add_prefix_space:  # which would put one behind each such token
        tokenizer.add_tokens([AddedToken(" 世界", normalized=False)])
    return tokenizer


def pieces(texts: list[str]) -> list[str]:
    """Words with their space as ▁, parts of words, and characters."""
    words = {("▁" + w) for t in texts for w in t.split()}
    parts = {w[i:j] for w in words for i in range(len(w)) for j in (i + 1, i + 3) if j <= len(w)}
    return sorted(words | parts)


def llama() -> tokenizers.Tokenizer:
    """SentencePiece's BPE as Llama 2 has it: words carry their space, unknown characters are bytes."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *BYTES, *pieces(TEXTS[:2])])}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def gemma() -> tokenizers.Tokenizer:
    """Llama's tokenizer without a space before the first word, and so without one to strip."""
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram(prepend: str) -> tokenizers.Tokenizer:
    """SentencePiece's unigram model, with Metaspace."""
    scores = [(token, 0.0) for token in SPECIAL] + [(p, -1.0 / len(p)) for p in ["▁", *pieces(TEXTS)]]
    unique = list(dict(scores).items())
    tokenizer = tokenizers.Tokenizer(models.Unigram(unique, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    """BERT's kind, which tidies the spaces before full stops up."""
    words = ["Hello", "world", "!", ".", ",", "'", "s", "n't", "##s", "##er", "day", "It", "a", "?", "世", "界"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({t: i for i, t in enumerate([*SPECIAL, *words])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def suffixes() -> tokenizers.Tokenizer:
    """The first GPT's kind: words carry their end."""
    words = ["hello</w>", "world</w>", "wor", "ld</w>", "!</w>", "a</w>", "b"]
    model = models.BPE(
        {t: i for i, t in enumerate([*SPECIAL, *words])}, [], unk_token="<unk>", end_of_word_suffix="</w>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def words() -> tokenizers.Tokenizer:
    """Makes one without a decoder: tokens with spaces between them."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, "a", "b", "c"])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": lambda: byte_level(False),
    "byte level with a prefix space": lambda: byte_level(True),
    "llama": llama,
    "gemma": gemma,
    "unigram always": lambda: unigram("always"),
    "unigram first": lambda: unigram("first"),
    "unigram never": lambda: unigram("never"),
    "wordpiece": wordpiece,
    "suffixes": suffixes,
    "words": words,
}


@pytest.fixture(scope="module", params=KINDS)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(TokenizerFiles(backend.to_str(), None, {}))


def sequences(backend: tokenizers.Tokenizer, count: int, seed: str) -> Iterator[list[int]]:
    """Tokens of texts and of parts of them, random tokens, and mixtures."""
    rng = random.Random(seed)
    size = backend.get_vocab_size()
    for _ in range(count):
        ids: list[int] = []
        for _ in range(rng.randint(1, 4)):
            text = rng.choice(TEXTS)
            start, length = rng.randrange(len(text)), rng.randint(1, 12)
            encoded = backend.encode(text[start : start + length], add_special_tokens=False).ids
            ids += rng.choice((encoded, encoded, [rng.randrange(size) for _ in range(rng.randint(1, 6))]))
        yield ids


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def contains_in_order(text: str, part: str) -> bool:
    characters = iter(text)
    return all(c in characters for c in part)


def test_streams_are_what_the_whole_decodes_to(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    clean = 0
    for ids in sequences(backend, 1500, "whole"):
        whole, got = tokenizer.decode(ids), "".join(stream(tokenizer, ids, []))
        if "\ufffd" in whole and "<0x80>" in backend.get_vocab():
            # A run of bytes that isn't text becomes nothing but U+FFFD, with the characters before the fault. What was
            # given out before it stays.
            assert contains_in_order(got.replace("\ufffd", ""), whole.replace("\ufffd", "")), ids
        else:
            clean += 1
            assert got == whole, ids
    assert clean > 500


def test_streams_go_on_behind_a_prompt(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    rng = random.Random("prompt")
    compared = 0
    for ids in sequences(backend, 1500, "prompt"):
        cut = rng.randint(0, len(ids))
        before, whole = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
        got = "".join(stream(tokenizer, ids[cut:], ids[:cut]))
        if "\ufffd" in whole + before or not whole.startswith(before):
            continue
        compared += 1
        assert before + got == whole, (ids, cut)
    assert compared > 500


def test_pieces_have_whole_characters(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    """U+FFFD only comes out for bytes that aren't text, and no piece takes back what another gave."""
    for ids in sequences(backend, 500, "characters"):
        whole = tokenizer.decode(ids)
        if "\ufffd" in whole:
            continue
        text = ""
        for piece in stream(tokenizer, ids, []):
            assert "\ufffd" not in piece
            text += piece
            assert whole.startswith(text), ids


def test_special_tokens_have_no_text(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    for ids in sequences(backend, 300, "special"):
        marked = [t for i in ids for t in ((i, 1) if i % 3 else (i,))]
        assert stream(tokenizer, marked, [])[-1] == stream(tokenizer, ids, [])[-1]
        assert "".join(stream(tokenizer, marked, [])) == "".join(stream(tokenizer, ids, []))
        shown = tokenizer.decode(marked, skip_special_tokens=False)
        assert shown.count("<s>") >= marked.count(1)


def test_stop_strings_end_the_text_wherever_tokens_do(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    rng = random.Random("stop")
    stopped = 0
    for ids in sequences(backend, 500, "stop"):
        whole = "".join(stream(tokenizer, ids, []))
        if not whole:
            continue
        at, length = rng.randrange(len(whole)), rng.randint(1, 6)
        stop = whole[at : at + length]
        output = OutputText(tokenizer.detokenizer(), (stop, "never to be found"))
        text = ""
        for token in ids:
            ended = output.push(token)
            text += output.take()
            assert stop not in text
            if ended:
                break
        else:
            ended = output.finish()
            text += output.take()
        assert ended and text == whole[: whole.index(stop)], (ids, stop)
        stopped += 1
    assert stopped > 300


def test_an_emoji_comes_when_its_last_byte_does(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    family = "👨‍👩‍👧"
    vocabulary = backend.get_vocab()
    if "<0xF0>" in vocabulary:
        ids = [vocabulary[f"<0x{b:02X}>"] for b in family.encode()]
    elif isinstance(backend.decoder, decoders.ByteLevel):
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(family)[0][0]
        ids = [vocabulary[letter] for letter in letters]
    else:
        pytest.skip("this kind has no bytes")
    pieces = stream(tokenizer, ids, [])
    assert [p for p in pieces if p] == list(family)
    assert stream(tokenizer, ids[:-1], [])[-1].strip("\ufffd") == ""


def test_every_text_comes_back(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    """A text of known tokens comes back, except for a first space that some tokenizers add and some strip."""
    if backend.token_to_id("<0x80>") is None and not isinstance(backend.decoder, decoders.ByteLevel):
        pytest.skip("this kind has no tokens for everything")
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids).lstrip(" ") == text
        assert "".join(stream(tokenizer, ids, [])).lstrip(" ") == text


def test_the_start_token_is_not_doubled(backend: tokenizers.Tokenizer) -> None:
    """A chat template that writes it, and a post-processor that adds it to texts."""
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "add_bos": True}
    tokenizer = Tokenizer(TokenizerFiles(backend.to_str(), "{{ bos_token }}{{ messages[0].content }}", special))
    assert tokenizer.encode("a").count(1) == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1
