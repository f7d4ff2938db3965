"""Text to tokens and back; streamed text has whole characters and all its spaces."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders, models

from enginewright.optimizer.capture.tokenizer import quick_to_read
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

BOS, EOS, START, END = 256, 257, 258, 259
TEXT = "Grüße, 世界! 😀👍 e\u0301 — ok"


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt or [])
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A tokenizer like Llama's: words carry their space, unknown characters are bytes, a text's first space is
    stripped.
    """
    vocab = {"<unk>": 0, "<s>": 1, "▁Hello": 2, "▁world": 3, "!": 4}
    vocab |= {f"<0x{b:02X}>": 5 + b for b in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(TokenizerFiles(tokenizer.to_str(), None, {}))


def as_bytes(text: str) -> list[int]:
    return [5 + b for b in text.encode()]


def test_round_trip(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bytes_that_are_no_utf8_are_refused(tokenizer: Tokenizer) -> None:
    text = b"caf\xe9".decode(errors="surrogateescape")  # as Python reads arguments and pipes
    with pytest.raises(RequestError, match=r"prompt: '\\udce9' isn't a character"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match=r"prompt: '\\udce9' isn't a character"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_special_tokens_are_recognised_and_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|start|>a<|end|>")
    assert ids == [START, ord("a"), END]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>a<|end|>"


def test_tokens_that_the_post_processor_does_not_add(tokenizer_files: TokenizerFiles) -> None:
    special = dict(tokenizer_files.special_tokens) | {"add_bos": True, "add_eos": True}
    tokenizer = Tokenizer(replace(tokenizer_files, special_tokens=special))
    assert tokenizer.encode("a") == [BOS, ord("a"), EOS]
    assert tokenizer.encode("<|bos|>a<|eos|>") == [BOS, ord("a"), EOS]
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]


def test_streamed_text_has_whole_characters(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert all(len(p) <= 1 and "\ufffd" not in p for p in pieces)


def test_bytes_that_are_no_text_come_out_as_replacements(tokenizer: Tokenizer) -> None:
    for count in (1, 5, 63, 64, 65, 300):
        ids = [0x80] * count + [ord("a")]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert stream(tokenizer, [ord("a"), 0xF0, 0x9F])[-1] == "\ufffd"  # held back to the end
    long = tokenizer.detokenizer()
    assert sum(len(long.push(0x80)) for _ in range(300)) > 200  # and not all of it until then


def test_the_space_after_the_prompt_is_kept(sentencepiece: Tokenizer) -> None:
    assert stream(sentencepiece, [3, 4, 3], [1, 2]) == [" world", "!", " world", ""]
    assert stream(sentencepiece, [2, 3, 1, 3]) == ["Hello", " world", "", " world", ""]


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_words_and_bytes(sentencepiece: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    choices = [as_bytes(c) for c in "é世😀a"] + [[3], [4], [1]]
    for _ in range(200):
        ids = [2, *(i for _ in range(rng.randint(0, 12)) for i in rng.choice(choices))]
        pieces = stream(sentencepiece, ids, [1])
        assert "".join(pieces) == sentencepiece.decode(ids)
        assert not any("\ufffd" in p for p in pieces)
        cut = rng.randint(0, len(ids))
        after = "".join(stream(sentencepiece, ids[cut:], ids[:cut]))
        if not sentencepiece.decode(ids[:cut]).endswith("\ufffd"):
            assert sentencepiece.decode(ids).endswith(after)


def test_a_prompt_of_bytes_is_cut_at_a_character(sentencepiece: Tokenizer) -> None:
    pieces = stream(sentencepiece, as_bytes("世界"), [2, *as_bytes("你好你好")])
    assert pieces == ["", "", "世", "", "", "界", ""]


def test_chat(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [BOS, START, *b"user\nhi", END, START, *b"assistant\n"]


def test_a_model_without_template_or_tokenizer(tokenizer_files: TokenizerFiles) -> None:
    plain = Tokenizer(replace(tokenizer_files, chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(BundleError, match=r"tokenizer/tokenizer\.json is missing"):
        Tokenizer(replace(tokenizer_files, tokenizer_json=None))


@pytest.mark.parametrize("text", ["", "{", '{"model": 3}'])
def test_a_damaged_tokenizer(tokenizer_files: TokenizerFiles, text: str) -> None:
    with pytest.raises(BundleError, match=r"tokenizer/tokenizer\.json: "):
        Tokenizer(replace(tokenizer_files, tokenizer_json=text))


@pytest.mark.parametrize("place", ["vocabulary", "added"])
def test_a_token_with_a_huge_id(tokenizer_files: TokenizerFiles, place: str) -> None:
    """The library would make a table with a place for each number up to it."""
    data = json.loads(tokenizer_files.tokenizer_json or "")
    if place == "vocabulary":
        data["model"]["vocab"]["a"] = 2**31
    else:
        data["added_tokens"][0]["id"] = 2**31
    with pytest.raises(BundleError, match=r"tokenizer/tokenizer\.json: a token has the id 2147483648"):
        Tokenizer(replace(tokenizer_files, tokenizer_json=json.dumps(data)))


def test_large_numbers_that_are_no_ids(tokenizer_files: TokenizerFiles) -> None:
    text = (tokenizer_files.tokenizer_json or "").replace('"<|start|>"', '"start: 123456789"')
    assert Tokenizer(replace(tokenizer_files, tokenizer_json=text)).encode("start: 123456789") == [START]


def test_words_without_tokens() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(RequestError, match="prompt: the tokenizer can't take it: WordLevel error: Missing"):
        Tokenizer(TokenizerFiles(words.to_str(), None, {})).encode("b")


def test_a_panic_of_the_library_is_an_error(tokenizer_files: TokenizerFiles) -> None:
    data = json.loads(tokenizer_files.tokenizer_json or "")
    second = [{"Sequence": {"id": "B", "type_id": 0}}]  # of one text, that is
    data["post_processor"] = {"type": "TemplateProcessing", "single": second, "pair": second, "special_tokens": {}}
    with pytest.raises(RequestError, match="prompt: the tokenizer can't take it: index out of bounds"):
        Tokenizer(replace(tokenizer_files, tokenizer_json=json.dumps(data))).encode("a")


def test_a_token_to_add_that_is_not_there(tokenizer_files: TokenizerFiles) -> None:
    special = {"bos_token": "<none>", "add_bos": True}
    with pytest.raises(BundleError, match="no token '<none>'"):
        Tokenizer(replace(tokenizer_files, special_tokens=special))


def test_a_damaged_template_is_named_when_a_conversation_needs_it(tokenizer_files: TokenizerFiles) -> None:
    broken = Tokenizer(replace(tokenizer_files, chat_template="ok", other_templates={"tool_use": "\n{% if %}"}))
    assert broken.chat_template().render([{"role": "user", "content": "a"}]) == "ok"
    assert broken.encode("start") and set(broken.chat_templates) == {"default", "tool_use"}
    with pytest.raises(BundleError, match=r"tokenizer/chat_templates/tool_use\.jinja: line 2: "):
        broken.encode_chat([{"role": "user", "content": "a"}], tools=[])


def test_no_merge_is_left_out_at_random() -> None:
    """A tokenizer may come with what was for its training."""
    merged = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    files = TokenizerFiles(tokenizer_json=merged.to_str())
    assert {tuple(Tokenizer(files).encode("ab")) for _ in range(20)} == {(2,)}
    exported = json.loads(quick_to_read(merged.to_str()))
    assert exported["model"]["dropout"] is None and exported["model"]["merges"] == ["a b"]
