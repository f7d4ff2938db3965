"""Every file of a bundle, of each target: a bit that changed, a missing end or a missing file is found and named."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from enginewright.runtime.bundle.manifest import Manifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError
from tests.plugins.steps import tiny_onnx
from tests.runtime.tensorrt_bundles import plan, section, write_engines


def check(path: Path) -> None:
    Bundle.open(path).verify_hashes()


@pytest.fixture(params=["cpu", "onnx", "tensorrt-rtx"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path, tiny_bundle: Path, manifest: Manifest) -> Path:
    """A copy that may be damaged; the plan of an engine is made up, but for its header."""
    path = tmp_path / "a.bundle"
    if request.param == "cpu":
        shutil.copytree(tiny_bundle, path, ignore=shutil.ignore_patterns("report"))
    elif request.param == "onnx":
        tiny_onnx.write_bundle(path)
    else:
        write_engines(path, manifest, section(plan()), plan())
    assert request.param in Bundle.open(path).targets
    return path


def test_any_damage_to_any_file_is_found_and_the_file_named(bundle: Path) -> None:
    check(bundle)
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    assert {"manifest.json"} < {path.name for path in files} and len(files) > 2
    for path in files:
        name, data = path.relative_to(bundle).as_posix(), path.read_bytes()
        named = re.escape(f"a.bundle/{name}")
        # Anywhere in the file; bit 0, so that a letter or digit of JSON is one still.
        for at in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(BundleError, match=f"{named}|{re.escape(name)}"):
                check(bundle)
        for length in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises(BundleError, match=named):
                check(bundle)
        path.write_bytes(data + b"\n")
        with pytest.raises(BundleError, match=named):
            check(bundle)
        path.unlink()
        with pytest.raises(BundleError, match=named):
            check(bundle)
        path.write_bytes(data)
    check(bundle)


def test_a_manifest_that_reads_well_and_was_altered(bundle: Path) -> None:
    manifests = [bundle / "manifest.json", *bundle.glob("targets/*/manifest.json")]
    for path in manifests:
        text = path.read_bytes()
        data = json.loads(text)
        if "model" in data:
            data["model"]["context_length"] += 1
        else:
            data["needs"] = "nothing"
        path.write_text(json.dumps(data, sort_keys=True, indent=1) + "\n")
        Bundle.open(bundle)  # nobody can tell from what it says
        with pytest.raises(
            BundleError, match=f"{path.parent.name}/manifest.json: SHA-256 is not the one that it states"
        ):
            check(bundle)
        path.write_bytes(text)
    check(bundle)


def test_a_bundle_that_was_moved(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    os.rename(bundle, tmp_path / "deep" / "other name")
    check(tmp_path / "deep" / "other name")


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Raises within, where something hangs."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_no_file_is_read_that_is_not_a_regular_file_of_the_bundle(bundle: Path) -> None:
    outside = bundle.with_name("outside")
    for path in sorted(path for path in bundle.rglob("*") if path.is_file()):
        data = path.read_bytes()
        outside.write_bytes(data)
        for kind in ("pipe", "/dev/zero", str(outside), "folder"):
            path.unlink()
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to(kind)
            with _within(10), pytest.raises(BundleError, match=re.escape(path.name)):
                check(bundle)
            if kind == "folder":
                path.rmdir()
                path.touch()
            path.unlink()
            path.write_bytes(data)
    check(bundle)


@pytest.mark.parametrize("name", ["manifest.json", "targets/cpu/manifest.json", "targets/cpu/programs/decode.json"])
def test_a_file_of_gigabytes_is_not_read(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    path, size = tmp_path / "a.bundle", 3 << 30
    shutil.copytree(tiny_bundle, path)
    os.truncate(path / name, size)
    listed = path / "targets/cpu/manifest.json"
    if name.endswith("programs/decode.json"):
        document = json.loads(listed.read_text())
        document["files"]["programs/decode.json"]["bytes"] = size
        listed.write_text(json.dumps(document))
    with pytest.raises(BundleError, match=f"{re.escape(name)}: cannot be read: it has 3,221,225,472 bytes, more than"):
        Bundle.open(path)
