"""``optimize build --check``: a tiny model on engines that are computed in memory, compared with the cpu target."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from enginewright.optimizer.check_engine import check
from enginewright.runtime.bundle.reader import Bundle
from tests.optimizer.check_engine import fake_engines
from tests.optimizer.check_engine.test_check_cuda import DIFFERENT, run
from tests.plugins.doctor.test_examine import WITH_GPU
from tests.plugins.tensorrt.bindings_process import make_package
from tests.plugins.tensorrt.compile.test_build_engines import exported

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[cuda]'")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"torch": "2.14.0", "torch_tensorrt": "2.14.0"}
    machine = replace(WITH_GPU, packages={**WITH_GPU.packages, **packages}, torch_cuda="13.0")
    monkeypatch.setattr(check, "look_at_machine", lambda: machine)


@pytest.mark.usefixtures("machine")
def test_tensorrt_rtx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", fake_engines.site(tmp_path, "tensorrt_rtx"))
    code, report, printed = run("build", "--target", "tensorrt-rtx", "--check", "--json")
    assert code == 0, printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert report["passed"] and report["model"] == "tiny" and report["versions"]["tensorrt_rtx"] == "1.7.1.116"
    assert report["gpus"] == [{"name": "NVIDIA RTX 4090", "capability": "8.9", "memory_bytes": 24 << 30}]
    assert report["driver"] == "580.95.05"
    assert stages["decode"]["tokens"] == stages["reference"]["tokens"]
    assert stages["graph"]["status"] == "passed" and stages["graph"]["runs_with"]["graph_launches"] > 0


@pytest.mark.usefixtures("machine")
def test_wrong_logits_of_tensorrt_rtx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", fake_engines.site(tmp_path, "wrong_tensorrt_rtx"))
    code, report, printed = run("build", "--target", "tensorrt-rtx", "--check")
    assert code == DIFFERENT, printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert [name for name, stage in stages.items() if stage["status"] == "failed"] == ["prompt", "decode", "graph"]
    assert "target tensorrt-rtx failed" in printed


@pytest.mark.usefixtures("machine")
def test_torch_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", fake_engines.site(tmp_path, "torch_tensorrt"))
    code, report, printed = run("build", "--target", "torch-tensorrt", "--check", "--json")
    assert code == 0, printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert stages["decode"]["tokens"] == stages["reference"]["tokens"]
    assert stages["graph"]["status"] == "skipped"  # PyTorch runs it call by call
    assert stages["decode"]["runs_with"] == {"library": "torch_tensorrt 2.14.0"}


@pytest.mark.usefixtures("machine")
def test_wrong_logits_of_torch_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", fake_engines.site(tmp_path, "wrong_torch_tensorrt"))
    code, report, printed = run("build", "--target", "torch-tensorrt", "--check", "--json")
    assert code == DIFFERENT, printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert [name for name, stage in stages.items() if stage["status"] == "failed"] == ["prompt", "decode", "graph"]


@pytest.fixture(scope="module")
def needs_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose target tensorrt must be built, in 32-bit floats, which numpy computes."""
    folder = tmp_path_factory.mktemp("bundle")
    return exported(folder, "Llama")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("wrong", [False, True])
def test_tensorrt(wrong: bool, needs_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check builds the bundle's engines first. A wrong engine is found."""
    make_package(tmp_path)
    bundle = shutil.copytree(needs_build, tmp_path / "b")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", fake_engines.site(tmp_path, "tensorrt", str(bundle), wrong))
    code, report, printed = run("build", bundle, "--target", "tensorrt", "--check", "--trust", "code", "--json")
    assert code == (DIFFERENT if wrong else 0), printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert len(stages["build"]["engines"]) == 2 and report["model"] == "own"
    assert Bundle.open(bundle).targets["tensorrt"].state == "ready"
    statuses = [stages[name]["status"] for name in ("prompt", "decode", "graph")]
    assert statuses == ["failed" if wrong else "passed"] * 3
    assert wrong or stages["decode"]["tokens"] == stages["reference"]["tokens"]
