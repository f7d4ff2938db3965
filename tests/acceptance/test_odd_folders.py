"""Folders that are odd or damaged are read right, or refused by an error of ours that names the file or the field."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

from enginewright.optimizer.capture import capture
from enginewright.runtime.shared.errors import EnginewrightError

Change = Callable[[Path], Any]
RIGHT = ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("Llama").save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(["<s>", "</s>", *letters])}, [], unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(path / "tokenizer.json"))
    write(path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def text(name: str, value: Any) -> Change:
    """A file with another content."""
    return lambda folder: write(folder, name, value)


def edit(name: str, **fields: Any) -> Change:
    """A JSON file with other fields."""

    def change(folder: Path) -> None:
        path = folder / name
        document = json.loads(path.read_text()) if path.exists() else {}
        write(folder, name, document | fields)

    return change


def raw(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def link(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.symlink(name, folder / name)

    return change


def directory(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def index(weight_map: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        write(folder, "model.safetensors.index.json", {"weight_map": weight_map})

    return change


def tokenizer(**fields: Any) -> Change:
    return edit("tokenizer.json", **fields)


def token(content: str, place: int) -> Change:
    def change(folder: Path) -> None:
        document = json.loads((folder / "tokenizer.json").read_text())
        added = {"content": content, "id": place, "special": True, "normalized": False}
        added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        write(folder, "tokenizer.json", document | {"added_tokens": [*document["added_tokens"], added]})

    return change


CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENS, SETTINGS = "tokenizer.json", "tokenizer_config.json"
REPLACE = {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
DEEP = "[" * 100_000

CASES: dict[str, tuple[Change, str]] = {
    "as it is": (lambda _: None, RIGHT),
    "no generation settings": (lambda folder: (folder / GENERATION).unlink(missing_ok=True), RIGHT),
    "byte order mark": (raw(CONFIG, lambda b: b"\xef\xbb\xbf" + b), "config.json: can't be read as JSON"),
    "not UTF-8": (raw(CONFIG, lambda b: b.replace(b"llama", b"\xff\xfe")), "config.json: can't be read as JSON"),
    "a key twice": (raw(CONFIG, lambda b: b'{"vocab_size": 9,' + b[1:]), "the key 'vocab_size' is there twice"),
    "nested deep": (text(CONFIG, DEEP), "config.json: can't be read as JSON: it is nested too deep"),
    "a list": (text(CONFIG, []), "config.json: must be a JSON object"),
    "config is a folder": (directory(CONFIG), "config.json"),
    "config is its own link": (link(CONFIG), "config.json"),
    "a size that is a text": (edit(CONFIG, hidden_size="64"), "config.json"),
    "a size below 0": (edit(CONFIG, num_attention_heads=-4), "num_attention_heads is -4"),
    "a size that is not-a-number": (edit(CONFIG, intermediate_size=float("nan")), "config.json"),
    "a size beyond reason": (edit(CONFIG, hidden_size=1 << 40), "hidden_size is 1099511627776"),
    "sizes that don't fit": (edit(CONFIG, num_attention_heads=7), "heads"),
    "no layers": (edit(CONFIG, num_hidden_layers=0), "layers.0"),
    "a context below 0": (edit(CONFIG, max_position_embeddings=-1), "max_position_embeddings"),
    "an epsilon that is not-a-number": (edit(CONFIG, rms_norm_eps=float("nan")), "rms_norm_eps"),
    "an epsilon below 0": (edit(CONFIG, rms_norm_eps=-1.0), "rms_norm_eps"),
    "a rope without end": (
        edit(CONFIG, rope_parameters={"rope_type": "default", "rope_theta": float("inf")}),
        "rope_theta",
    ),
    "quantization []": (edit(CONFIG, quantization_config=[]), "quantization_config isn't an object"),
    "quantization 4": (edit(CONFIG, quantization_config=4), "quantization_config isn't an object"),
    "quantization {}": (edit(CONFIG, quantization_config={}), RIGHT),
    "quantized by nobody": (text("quantize_config.json", {"bits": 4}), "quantize_config.json says that the weights"),
    "architectures 5": (edit(CONFIG, architectures=5), "architectures is 5"),
    "code of its own": (edit(CONFIG, auto_map={"AutoModel": "x.Y"}), "auto_map"),
    "eos is a text": (edit(GENERATION, eos_token_id="</s>"), "generation_config.json: eos_token_id is '</s>'"),
    "eos in lists": (edit(GENERATION, eos_token_id=[[1]]), "generation_config.json: eos_token_id is [[1]]"),
    "eos is true": (edit(GENERATION, eos_token_id=True), "generation_config.json: eos_token_id is True"),
    "eos with null": (edit(GENERATION, eos_token_id=[1, None]), RIGHT),
    "bos is an object": (edit(GENERATION, bos_token_id={"a": 1}), "generation_config.json: bos_token_id is"),
    "temperature is a text": (edit(GENERATION, temperature="hot"), "generation_config.json: temperature is 'hot'"),
    "top_k is not-a-number": (edit(GENERATION, top_k=float("nan")), "generation_config.json: top_k is nan"),
    "settings are a list": (text(GENERATION, []), "generation_config.json: must be a JSON object"),
    "settings are a folder": (directory(GENERATION), "generation_config.json: can't be read"),
    "a template that is a number": (edit(SETTINGS, chat_template=5), "tokenizer_config.json: chat_template is 5"),
    "a template that is a list": (edit(SETTINGS, chat_template=[1]), "tokenizer_config.json: chat_template is [1]"),
    "a template without its name": (edit(SETTINGS, chat_template=[{"template": "x"}]), "tokenizer_config.json"),
    "templates with names": (edit(SETTINGS, chat_template=[{"name": "default", "template": "x"}]), RIGHT),
    "tokenizer settings are a list": (text(SETTINGS, "[]"), "tokenizer_config.json: must be a JSON object"),
    "a class that isn't there": (edit(SETTINGS, tokenizer_class="NoSuchTokenizer"), RIGHT),
    "a class that is a number": (edit(SETTINGS, tokenizer_class=5), RIGHT),
    "bos is a number": (edit(SETTINGS, bos_token=5), "tiny"),
    "tokenizer is a folder": (directory(TOKENS), "tokenizer.json: can't be read: it is a folder"),
    "tokenizer without its model": (text(TOKENS, "{}"), "tokenizer.json: model is missing"),
    "tokenizer that nests": (text(TOKENS, DEEP), "tokenizer.json"),
    "decoder multiplies": (tokenizer(decoder=REPLACE), "tokenizer.json: decoder: its pattern matches nothing"),
    "normalizer multiplies": (tokenizer(normalizer=REPLACE), "tokenizer.json: normalizer: its pattern matches nothing"),
    "splits without end": (tokenizer(pre_tokenizer=SPLIT), "tokenizer.json: pre_tokenizer: the regular expression"),
    "padded without end": (tokenizer(padding={"strategy": {"Fixed": 1 << 40}, "direction": "Right"}), "tiny"),
    "a token of the model's last id and more": (token("<image>", 256), RIGHT),
    "a token of a great id": (token("<image>", 1 << 30), "tokenizer.json: a token has the id 1073741824"),
    "two tokens of one id": (token("<image>", 5), "tokenizer.json: two tokens have the id 5"),
    "index without files": (
        index({"a": "model-00002-of-00002.safetensors"}),
        "model-00002-of-00002.safetensors is missing",
    ),
    "index leads out": (index({"a": "../model.safetensors"}), "'../model.safetensors', which isn't a file name"),
    "index names numbers": (index({"a": 5}), "a is in 5, which isn't a file name"),
    "index is empty": (index({}), "index.json: weight_map is missing"),
    "index of another tensor": (index({"a": "model-00001-of-00001.safetensors"}), "tensor a is missing"),
    "weights are cut": (
        raw("model.safetensors", lambda b: b[: len(b) // 2]),
        "model.safetensors: damaged or truncated",
    ),
    "weights are empty": (raw("model.safetensors", lambda _: b""), "model.safetensors: damaged or truncated"),
    "weights with a long header": (raw("model.safetensors", lambda b: b"\xff" * 8 + b[8:]), "model.safetensors"),
    "weights are a folder": (directory("model.safetensors"), "no weights"),
    "weights are their own link": (link("model.safetensors"), "model.safetensors"),
}
QUICK = (
    "as it is",
    "a key twice",
    "eos is a text",
    "decoder multiplies",
    "index leads out",
    "a template that is a number",
)


def check(change: Change, named: str, folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(folder, tmp_path / "tiny", symlinks=True))
    change(source)
    if named == RIGHT:
        captured = capture(source)
        assert captured.model_info.vocab_size == 256
        return
    with pytest.raises(EnginewrightError) as caught:
        capture(source)
    assert named in caught.value.message, caught.value.message


@pytest.mark.parametrize("name", QUICK)
def test_some_odd_folders(name: str, folder: Path, tmp_path: Path) -> None:
    check(*CASES[name], folder, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_odd_folders(name: str, folder: Path, tmp_path: Path) -> None:
    check(*CASES[name], folder, tmp_path)
