"""The manifest is stable text, and says which field is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginewright.plugins.contracts import ModelInfo
from enginewright.plugins.errors import BundleError
from enginewright.runtime.bundle.manifest import FORMAT_VERSION, FileSection, Manifest, TargetManifest, check_path


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
        ({"model": {"name": "x"}}, "m.json: model.architecture: "),
        ({"targets": ["../cpu"]}, "m.json: targets.0: "),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}}, "m.json: files./etc/passwd"),
        ({"files": {"a": {"bytes": -1, "sha256": "0" * 64}}}, "m.json: files.a.bytes: "),
        ({"files": {"a": {"bytes": 1, "sha256": "xyz"}}}, "m.json: files.a.sha256: "),
        ({"format_version": "1"}, "format_version is missing or wrong"),
        ({"format_version": True}, "format_version is missing or wrong"),
        ({"format_version": 0}, "format_version is missing or wrong"),
        ({"format_version": FORMAT_VERSION + 1}, r"format_version is 2, .* reads up to 1\n.*newer enginewright"),
    ],
)
def test_wrong_fields_are_named(manifest: Manifest, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(changed(manifest, **fields), source="m.json")


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
