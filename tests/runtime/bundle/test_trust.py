"""Code that a bundle carries runs for a caller who said so, and for nobody else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, cast

import pytest

from enginewright.optimizer.check_bundle import check_bundle
from enginewright.plugins.tvm.compile.tune import tune
from enginewright.runtime.bundle import trust
from enginewright.runtime.bundle.manifest import target_manifest_path
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.trust import read_code
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import TARGETS, carried_code, choose_target, make_executor, running
from enginewright.runtime.shared.errors import BundleError, RequestError, TrustError
from tests.runtime.bundle import code_targets
from tests.runtime.bundle.code_targets import name_targets, with_target

LIBRARY = f"targets/tvm/{code_targets.LIBRARY}"
DATA = ("cpu", "onnx")


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "a.bundle"))


def test_every_target_says_what_it_carries() -> None:
    assert [name for name in TARGETS if carried_code(name) is None] == list(DATA)


@pytest.mark.parametrize("target", [name for name in running() if name not in DATA])
def test_a_target_with_code_is_opened_for_who_said_so(target: str, bundle: Path) -> None:
    path = with_target(bundle, target)
    opened = Bundle.open(path)
    assert choose_target(opened, None) == "cpu"
    ways: list[Callable[[], object]] = [
        lambda: choose_target(opened, target),
        lambda: make_executor(opened, target, {}, 16),
        lambda: LLM(path, target=target),
        lambda: LLM(path, target=target, verify=True),
        lambda: check_bundle(path, targets=[target]),
        lambda: read_code(opened, f"targets/{target}/step-v2.so"),
    ]
    for way in ways:
        with pytest.raises(TrustError) as error:
            way()
        assert str(path) in error.value.message and 'trust="code"' in str(error.value.hint)
    with pytest.raises(TrustError, match=r"nobody has said(.|\n)*target 'cpu', which needs no trust"):
        choose_target(opened, target)
    assert choose_target(Bundle.open(path, trust.CODE), target) == target
    assert choose_target(Bundle.open(path, opened.hash), target) == target


def test_a_bundle_of_code_alone_is_refused_with_what_to_do(bundle: Path) -> None:
    path = with_target(bundle, "tvm")
    name_targets(path, "tvm")
    with pytest.raises(TrustError, match=rf"{path}: target 'tvm' carries compiled libraries, and nobody"):
        LLM(path)
    with pytest.raises(TrustError):
        tune(Bundle.open(path))


def test_verify_looks_at_code_and_does_not_run_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_target(bundle, "tvm")
    monkeypatch.setattr(trust, "read_regular", lambda *a, **k: pytest.fail("code was read to be run"))
    reasons = {check.target: check.why_not for check in check_bundle(path).targets}
    assert reasons == {"cpu": None, "tvm": "it carries compiled libraries, which run only for who trusts them"}
    (path / LIBRARY).write_bytes(b"\x7fELG")
    with pytest.raises(BundleError, match=r"step-v2.so: SHA-256"):
        check_bundle(path)


def test_a_hash_allows_one_bundle(bundle: Path, tmp_path: Path) -> None:
    path = with_target(bundle, "tvm")
    named = Bundle.open(path).hash
    moved = Path(shutil.copytree(path, tmp_path / "moved"))
    assert Bundle.open(moved, named).hash == named
    other = Path(shutil.copytree(path, tmp_path / "other"))
    manifest = other / target_manifest_path("tvm")
    manifest.write_text(manifest.read_text().replace('"version": "0"', '"version": "1"'))
    with pytest.raises(TrustError, match="it is another bundle than sha256:"):
        LLM(other, target="tvm", trust=named)
    # What the manifests list is compared, whatever it is.
    for file, reads in ((LIBRARY, "tvm"), ("targets/tvm/programs/decode.json", None), ("tokenizer/tables.bin", "cpu")):
        if not (moved / file).exists():
            continue
        before = (moved / file).read_bytes()
        (moved / file).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(BundleError, match="SHA-256 is not the one"):
            LLM(moved, target=reads, trust=named)
        (moved / file).write_bytes(before)
    # The whole tokenizer is read when the tables don't do.
    with LLM(moved, target="cpu", trust=named) as llm:
        assert llm.tokenizer is not None
        file = moved / "tokenizer/tokenizer.json"
        file.write_bytes(file.read_bytes().replace(b'"dropout":null', b'"dropout":0.10'))
        with pytest.raises(BundleError, match="SHA-256 is not the one"):
            llm.tokenizer.encode("a" * 100_000)


def test_what_says_nothing_is_refused(bundle: Path) -> None:
    deep = reduce(lambda inner, _: [inner], range(3000), cast(Any, []))  # of which Python can't make text
    for value in (deep, "", "Code", "sha256:", "sha256:" + "A" * 64, "sha256:" + "0" * 63, 3, True, b"code"):
        with pytest.raises(RequestError, match=r"trust: .* doesn't say what may run"):
            LLM(bundle, trust=value)  # type: ignore[arg-type]


def test_a_listed_file_of_gigabytes_is_not_read(bundle: Path) -> None:
    path = with_target(bundle, "tvm")
    size = trust.MOST_CODE_BYTES + 1
    with open(path / LIBRARY, "r+b") as file:
        file.truncate(size)
    manifest = path / target_manifest_path("tvm")
    document = json.loads(manifest.read_text())
    document["files"]["step-v2.so"]["bytes"] = size
    manifest.write_text(json.dumps(document))
    opened = Bundle.open(path, trust.CODE)
    with pytest.raises(BundleError, match=r"step-v2.so: cannot be read: it has .* bytes, more than"):
        read_code(opened, LIBRARY)


def test_code_is_what_was_listed_and_lies_in_the_bundle(bundle: Path, tmp_path: Path) -> None:
    path = with_target(bundle, "tvm")
    opened = Bundle.open(path, trust.CODE)
    assert read_code(opened, LIBRARY) == b"\x7fELF"
    with pytest.raises(BundleError, match="isn't the file that the manifest lists"):
        read_code(opened, "manifest.json")
    (path / LIBRARY).write_bytes(b"\x7fELG")
    with pytest.raises(BundleError, match="isn't the file that the manifest lists"):
        read_code(opened, LIBRARY)
    (tmp_path / "elsewhere.so").write_bytes(b"\x7fELF")
    (path / LIBRARY).unlink()
    (path / LIBRARY).symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(BundleError, match="a link to a file outside"):
        read_code(opened, LIBRARY)
