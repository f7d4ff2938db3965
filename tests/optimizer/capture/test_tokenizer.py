"""Tokenizers on their way into a bundle."""

from __future__ import annotations

import json
import os

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from enginewright.optimizer.capture import capture
from enginewright.optimizer.capture import tokenizer as capture_tokenizer
from enginewright.optimizer.capture.tokenizer import load_tokenizer, quick_to_read, tokenizer_files
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import BundleError, SourceError
from enginewright.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer


def make_tokenizer(words, *, template=None, adds_bos=False):
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("words", [["a", "b"], ["a", "cat", "sat", "on", "mat"]])
def test_files_have_what_the_tokenizer_has(words):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer(words, template=template)
    files = tokenizer_files(tokenizer)
    assert files.chat_template == template
    assert files.tokenizer_json is not None
    text = " ".join(words)
    assert Tokenizer.from_str(files.tokenizer_json).encode(text).ids == tokenizer(text)["input_ids"]
    assert files.special_tokens["eos_token"] == "</s>"
    assert files.special_tokens["pad_token"] is None
    assert files.special_tokens["add_bos"] is False


def test_the_default_of_several_templates():
    tokenizer = make_tokenizer(["a"])
    tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    files = tokenizer_files(tokenizer)
    assert files.chat_template == "one" and files.other_templates == {"tool_use": "two"}
    tokenizer.chat_template = {"rag": "three", "empty": ""}
    files = tokenizer_files(tokenizer)
    assert files.chat_template is None and files.other_templates == {"rag": "three"}


def test_named_special_tokens_of_a_model():
    backend = make_tokenizer(["a"]).backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", image_token="<image>")
    assert tokenizer_files(tokenizer).special_tokens["image_token"] == "<image>"


def test_a_directory_brings_its_tokenizer(tiny_model, tmp_path):
    tiny_model("Llama").save_pretrained(tmp_path)
    make_tokenizer(["a", "b"], template="{{ bos_token }}").save_pretrained(tmp_path)
    files = capture(tmp_path).tokenizer_files
    assert files is not None and files.chat_template == "{{ bos_token }}"
    other = capture(tmp_path, tokenizer=make_tokenizer(["c"])).tokenizer_files
    assert other is not None and json.loads(other.tokenizer_json or "")["model"]["vocab"]["c"] == 3


def test_a_live_model_takes_one_from_a_directory(tiny_model, tmp_path):
    make_tokenizer(["a"]).save_pretrained(tmp_path)
    files = capture(tiny_model("Llama"), tokenizer=tmp_path).tokenizer_files
    assert files is not None and files.tokenizer_json is not None


def test_damaged_or_missing(tmp_path):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(SourceError, match="a directory with a tokenizer"):
        capture(tmp_path, tokenizer=tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match=r"tokenizer\.json.*model is missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("parts", "as_texts"), [(("a", "b"), True), (("b", " "), False)])
def test_merges_are_texts_where_that_means_the_same(parts, as_texts):
    first, second = parts
    vocabulary = {"a": 0, "b": 1, " ": 2, first + second: 3, "ab" + first: 4}
    backend = Tokenizer(models.BPE(vocabulary, [(first, second)]))
    before = backend.to_str()
    text = quick_to_read(before)
    assert json.loads(before)["model"]["merges"] == [[first, second]]
    assert json.loads(text)["model"]["merges"] == ([f"{first} {second}"] if as_texts else [[first, second]])
    again = Tokenizer.from_str(text)
    assert again.to_str() == before and again.encode("ab a").ids == backend.encode("ab a").ids


def test_a_large_vocabulary_is_read_once_to_see_that_it_is_the_same(monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(capture_tokenizer.tokenizers, "Tokenizer", Reading(read))
    text = quick_to_read(Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).to_str())
    assert read == [text]


class Reading:
    """Keeps what ``Tokenizer.from_str`` is given."""

    def __init__(self, read):
        self._read = read

    def from_str(self, text):
        self._read.append(text)
        return Tokenizer.from_str(text)


def test_a_tokenizer_without_merges_stays_as_it_is():
    text = make_tokenizer(["a"]).backend_tokenizer.to_str()
    assert quick_to_read(text) is text


def _two_of_one_id(change):
    tokenizer = json.loads(make_tokenizer(["a", "b", "c"]).backend_tokenizer.to_str())
    change(tokenizer)
    return json.dumps(tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model"]["vocab"].update(b=3), "two tokens have the id 3: '[ab]' and '[ab]'"),
        (lambda t: t["model"]["vocab"].update(c=0), "two tokens have the id 0"),
        (lambda t: t["added_tokens"][1].update(content="<x>", id=2), "two tokens have the id 2"),
        (lambda t: t["added_tokens"].append(t["added_tokens"][0] | {"content": "<x>", "id": 4}), "have the id 4: 'b'"),
    ],
)
def test_two_tokens_of_one_id_are_refused(change, message, tmp_path):
    """The library takes one of them, raises a bare Exception or panics, by chance: so it is tried several times."""
    text = _two_of_one_id(change)
    (tmp_path / "tokenizer.json").write_text(text)
    for _ in range(8):
        with pytest.raises(SourceError, match=f"tokenizer.json: .*{message}"):
            load_tokenizer(tmp_path)
        with pytest.raises(BundleError, match=f"tokenizer.json: .*{message}"):
            RuntimeTokenizer(TokenizerFiles(text, None, {}))


def test_what_the_library_panics_of_is_an_error_of_ours(monkeypatch):
    """Also where the damage comes with a tokenizer object, which was never a file."""

    class PanicException(BaseException):
        pass

    def panics(_):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(capture_tokenizer, "quick_to_read", panics)
    with pytest.raises(SourceError, match="the tokenizer can't be kept: called"):
        tokenizer_files(make_tokenizer(["a"]))


def test_no_file_of_a_tokenizer_is_waited_for(tmp_path):
    make_tokenizer(["a"]).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        data = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        if name != "tokenizer.json":  # else there is none
            with pytest.raises(SourceError, match=f"{name}: can't be read: it is a pipe"):
                load_tokenizer(tmp_path)
        (tmp_path / name).unlink()
        if data is not None:
            (tmp_path / name).write_bytes(data)


@pytest.mark.filterwarnings("error")
def test_a_response_template_is_kept_and_what_cannot_be_read_is_named():
    tokenizer = make_tokenizer(["a"])
    assert tokenizer_files(tokenizer).response_template is None
    calls = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    tokenizer.response_template = {"fields": {"tool_calls": calls}}
    text = tokenizer_files(tokenizer).response_template
    assert json.loads(text) == tokenizer.response_template
    tokenizer.response_template = {"fields": {"tool_calls": calls | {"content": "kv-lines"}}}
    with pytest.warns(UserWarning, match=r"response_template\.fields\.tool_calls\.content: kv-lines"):
        assert tokenizer_files(tokenizer).response_template is not None
