"""Adapters as users name them: folders and weights, and what isn't one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.capture.model_source import Adapter, ModelSource, check_adapters, parse_adapters
from enginewright.runtime.shared.errors import EnginewrightError, RequestError


def test_a_weight_follows_the_last_equals_sign_and_a_folder_may_have_one(tmp_path: Path) -> None:
    (tmp_path / "a=2").mkdir()
    adapters = parse_adapters(["a", "b=0.5", Path("c"), ("d", 2), f"{tmp_path}/a=2", f"{tmp_path}/a=2=-1e-1x"[:-1]][:5])
    folders = [Path("a"), Path("b"), Path("c"), Path("d"), tmp_path / "a=2"]
    assert adapters == tuple(map(Adapter, folders, [1.0, 0.5, 1.0, 2.0, 1.0]))
    assert parse_adapters([f"{tmp_path}/a=2=-0.1"]) == (Adapter(tmp_path / "a=2", -0.1),)
    assert parse_adapters(None) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a=x"], "'x' isn't a weight of a"),
        (["a=nan"], "the weight of a is nan"),
        ([("a", math.inf)], "the weight of a is inf"),
        ([("a", True)], "the weight of a is True"),
        ([("a", "1")], "the weight of a is '1'"),
        (["a", "b", "./a=2"], "a is named twice"),
        ([5], "5 isn't an adapter"),
        ("a", "'a' isn't a list of adapters"),
    ],
)
def test_what_isnt_an_adapter_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^lora: {message}"):
        parse_adapters(given)


def _folder(path: Path, *names: str, content: bytes = b"tensors") -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_bytes(content)
    if "adapter_config.json" in names:
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return path


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        (["README.md"], "has no adapter_config.json", "that PEFT saved"),
        (["config.json", "model.safetensors"], "is a whole model, and no PEFT adapter", "that PEFT saved"),
        (["adapter_config.json", "adapter_model.bin"], "in adapter_model.bin only, a pickle", "save_pretrained"),
        (["adapter_config.json"], "has no adapter_model.safetensors", "Download"),
    ],
)
def test_a_folder_that_is_no_adapter_says_what_to_do(files: list[str], message: str, hint: str, tmp_path: Path) -> None:
    source = ModelSource("base", (Adapter(_folder(tmp_path / "adapter", *files)),))
    with pytest.raises(EnginewrightError, match=message) as caught:
        check_adapters(source)
    assert caught.value.hint is not None and hint in caught.value.hint


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    (tmp_path / "lora.gguf").write_bytes(b"GGUF")
    for name, message in (("nix", "doesn't exist"), ("lora.gguf", "is a GGUF file, not a folder")):
        with pytest.raises(EnginewrightError, match=message):
            check_adapters(ModelSource("base", (Adapter(tmp_path / name),)))


def test_the_same_adapter_in_two_folders_is_refused(tmp_path: Path) -> None:
    files = ("adapter_config.json", "adapter_model.safetensors")
    one, two = _folder(tmp_path / "one", *files), _folder(tmp_path / "two", *files)
    with pytest.raises(EnginewrightError, match=r"one and .*two are the same adapter"):
        check_adapters(ModelSource("base", (Adapter(one), Adapter(two, 0.5))))
    (two / "adapter_model.safetensors").write_bytes(b"others")
    check_adapters(ModelSource("base", (Adapter(one), Adapter(two, 0.5))))
