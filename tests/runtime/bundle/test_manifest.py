"""The manifest is stable text, and says which field is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginewright.runtime.bundle.manifest import FORMAT_VERSION, FileSection, Manifest, TargetManifest, check_path
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import BundleError

MODEL = {"name": "x", "architecture": "X", "vocab_size": 5, "context_length": 9}


def changed(manifest: Manifest, **fields: Any) -> str:
    return json.dumps(json.loads(manifest.to_json()) | fields)


def test_round_trip(manifest: Manifest, model_info: ModelInfo) -> None:
    listed = manifest.model_copy(update={"files": {"a/b.json": FileSection(bytes=1, sha256="0" * 64)}})
    again = Manifest.from_json(listed.to_json())
    assert again == listed
    assert again.to_json() == listed.to_json()
    assert again.model.to_info() == model_info


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra": 1}, "m.json: extra: "),
        ({"targets": ["cpu", "cpu"]}, "m.json: targets: one is named twice: cpu, cpu"),
        ({"model": MODEL | {"context_length": 2**62}}, "m.json: model.context_length: "),
        ({"model": MODEL | {"context_length": 2**70}}, "m.json: model.context_length: "),
        ({"model": MODEL | {"vocab_size": 2**31}}, "m.json: model.vocab_size: "),
        ({"model": MODEL | {"eos_token_ids": [-1]}}, "m.json: model.eos_token_ids.0: "),
        ({"model": MODEL | {"eos_token_ids": [2, 2**70]}}, "m.json: model.eos_token_ids.1: "),
        ({"model": MODEL | {"eos_token_ids": [2, 5]}}, "m.json: model.eos_token_ids: 5 is outside the vocabulary of 5"),
        ({"model": MODEL | {"bos_token_id": 5}}, "m.json: model.bos_token_id: 5 is outside the vocabulary of 5"),
        ({"model": {"name": "x"}}, "m.json: model.architecture: "),
        ({"targets": ["../cpu"]}, "m.json: targets.0: "),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}}, "m.json: files./etc/passwd"),
        ({"files": {"a": {"bytes": -1, "sha256": "0" * 64}}}, "m.json: files.a.bytes: "),
        ({"files": {"a": {"bytes": 1, "sha256": "xyz"}}}, "m.json: files.a.sha256: "),
        ({"format_version": "1"}, "format_version is missing or wrong"),
        ({"format_version": True}, "format_version is missing or wrong"),
        ({"format_version": 0}, "format_version is missing or wrong"),
        ({"format_version": FORMAT_VERSION + 1}, r"format_version is 3, .* reads up to 2\n.*newer enginewright"),
    ],
)
def test_wrong_fields_are_named(manifest: Manifest, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(changed(manifest, **fields), source="m.json")


def test_a_manifest_without_its_hash_is_refused(manifest: Manifest) -> None:
    for one in (manifest, TargetManifest()):
        fields = {key: value for key, value in json.loads(one.to_json()).items() if key != "sha256"}
        with pytest.raises(BundleError, match=r"m\.json: sha256 is missing"):
            type(one).from_json(json.dumps(fields), source="m.json")
        with pytest.raises(BundleError, match=r"m\.json: format_version 1 is unsupported"):
            type(one).from_json(json.dumps(fields | {"format_version": 1}), source="m.json")


def test_target_manifest() -> None:
    one = TargetManifest(state="needs-build", needs="a GPU", files={"p.json": FileSection(bytes=1, sha256="0" * 64)})
    assert TargetManifest.from_json(one.to_json(), source="t.json") == one
    for fields, message in (({"state": "half"}, "t.json: state: "), ({"format_version": 99}, "newer enginewright")):
        with pytest.raises(BundleError, match=message):
            TargetManifest.from_json(json.dumps(json.loads(one.to_json()) | fields), source="t.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", b"\xff\xfe"])
def test_what_is_no_manifest(text: str | bytes) -> None:
    with pytest.raises(BundleError, match=r"^manifest\.json: "):
        Manifest.from_json(text)


@pytest.mark.parametrize("path", ["a", "a/b.c", "targets/tensorrt-rtx/engine_0.bin"])
def test_paths_inside(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize("path", ["", "/a", "../a", "a/../b", "a/", "a//b", ".a", "a/.b", "a\\b", "c:/x", "a\n"])
def test_paths_outside(path: str) -> None:
    with pytest.raises(ValueError, match="not a path inside a bundle"):
        check_path(path)
