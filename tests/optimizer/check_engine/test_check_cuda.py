"""``optimize doctor BUNDLE --run``: the cuda target in Triton's interpreter gives the cpu target's tokens, or fails."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.check_engine import check
from enginewright.optimizer.check_engine.check import without_places
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.plugins.cuda.compile import emitter as emitting
from enginewright.plugins.gpu.compile_ahead import CompiledKernel
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.specs import KernelSpec
from tests.conftest import make_tiny_model
from tests.plugins.doctor.test_examine import PLAIN, WITH_GPU

CAN_T_CHECK, MISSING, DIFFERENT = 15, 10, 11


def stand_in(spec: KernelSpec) -> CompiledKernel:
    """Stands in for Triton: the interpreter takes no machine code."""
    return CompiledKernel(spec, f"{spec.kernel}_kernel", "", b"\x7fELF", 64, "none")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for the cpu target and the cuda target, with kernels that only the interpreter runs."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[cuda]'")
    folder = tmp_path_factory.mktemp("check")
    recipe = folder / "small.toml"
    recipe.write_text('name = "small"\n[weights.default]\nstorage = "f32"\n[engines]\nrequests = 4\nchunk = 64\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitting, "KernelCompiler", lambda n: KernelCompiler(1, compiler=stand_in))
        export(make_tiny_model("Llama"), folder / "b", recipe=recipe, targets=("cpu", "cuda"), gpus=["8.0"])
    return folder / "b"


def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report, and what was printed."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    report = result.stdout[result.stdout.find("{") :]
    return result.exit_code, json.loads(report or "{}"), result.stdout + result.stderr


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.usefixtures("interpreted")
def test_the_cuda_target_has_the_cpu_target_s_tokens(bundle: Path) -> None:
    code, report, printed = run("doctor", bundle, "--run", "--trust", "code")
    assert code == 0, printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert list(stages) == ["build", "reference", "open", "prompt", "decode", "graph"]
    assert stages["decode"]["tokens"] == stages["reference"]["tokens"]
    assert [len(answer) for answer in stages["decode"]["tokens"]] == [8, 8]
    assert stages["decode"]["compared"] == "16 of 16"
    assert 0 < stages["prompt"]["kl"] < 1e-3  # bf16
    assert stages["graph"]["status"] == "skipped"  # the CPU has no CUDA graphs
    assert report["passed"] and report["target"] == "cuda" and report["versions"].keys() >= {"torch", "triton"}
    assert "decode    passed" in printed
    for secret in (str(bundle), str(Path.home()), socket.gethostname()):
        assert secret not in printed


PLANTED = """
import sys
if any("check_engine.child" in word for word in sys.orig_argv):
    from enginewright.optimizer.check_engine import stages
    tokens = stages._Served.tokens
    def planted(self, prompts):
        answers = tokens(self, prompts)
        if self._llm.target == "cuda":
            {what}
        return answers
    stages._Served.tokens = planted
"""


WRONG_NORM = """
import sys
if any("check_engine.child" in word for word in sys.orig_argv):
    from enginewright.plugins.cuda.serve import executor
    load = executor.weight_tensor
    def planted(use, *given):
        weight = load(use, *given)
        return weight.new_ones(weight.shape) if "norm" in use.name else weight
    executor.weight_tensor = planted
"""


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("answers[1][5] = (answers[1][5] + 1) % 256", r"token 5 of answer 1 is "),
        ("answers[0].pop()", "answer 0 has 7 tokens, and must have 8"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its process died of SIGKILL"),
    ],
)
def test_a_planted_fault_fails_its_stage(
    what: str, error: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong token, a lost token, and an engine that ends its process."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(what=what))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, report, printed = run("doctor", bundle, "--run", "--trust", "code", "--json")
    assert code == DIFFERENT, printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert stages["prompt"]["status"] == "passed"
    assert error in stages["decode"]["error"]
    assert stages["graph"]["status"] == ("skipped" if "SIGKILL" in error else "failed")


@pytest.mark.usefixtures("interpreted")
def test_wrong_logits_are_found(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's logits are wrong: norms' weights are taken for ones."""
    (tmp_path / "sitecustomize.py").write_text(WRONG_NORM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, report, printed = run("doctor", bundle, "--run", "--trust", "code", "--json")
    assert code == DIFFERENT, printed
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert stages["reference"]["status"] == stages["open"]["status"] == "passed"
    assert "the logits differ from the cpu target's" in stages["prompt"]["error"]
    expected = stages["reference"]["tokens"][0][0]
    assert f"must be {expected}; the cpu target's logits" in stages["decode"]["error"]


@pytest.mark.parametrize(
    ("machine", "arguments", "exit_code", "says"),
    [
        (PLAIN, ("doctor", "--run", "--target", "cuda"), MISSING, "pip install 'enginewright[cuda]'"),
        (PLAIN, ("build", "--check", "--target", "tensorrt"), MISSING, "pip install 'enginewright[tensorrt]'"),
        (PLAIN, ("build", "--check", "--target", "tensorrt-rtx"), MISSING, "pip install 'enginewright[tensorrt-rtx]'"),
        (
            *(PLAIN, ("build", "--check", "--target", "torch-tensorrt"), MISSING),
            "pip install 'enginewright[torch-tensorrt]'",
        ),
        (PLAIN, ("build", "--check", "--target", "tvm"), 2, "Take one of tensorrt-rtx, tensorrt, cuda"),
        (PLAIN, ("build", "--check"), 8, "Pass one of tensorrt-rtx, tensorrt, cuda"),
        (PLAIN, ("build",), 2, "only --check works without one"),
        (WITH_GPU, ("doctor", "BUNDLE", "--run", "--target", "tensorrt"), 7, "it has no target 'tensorrt'"),
    ],
)
def test_what_is_missing_is_said(
    machine: Any,
    arguments: tuple[str, ...],
    exit_code: int,
    says: str,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "look_at_machine", lambda: machine)
    code, _, printed = run(*(str(tiny_bundle) if word == "BUNDLE" else word for word in arguments))
    assert code == exit_code, printed
    assert says in " ".join(printed.split())


@pytest.mark.usefixtures("interpreted")
def test_code_needs_trust(bundle: Path) -> None:
    code, _, printed = run("doctor", bundle, "--run")
    assert code == 7 and "--trust code" in printed


def test_reports_have_no_places() -> None:
    text = f"open('/home/somebody/a b/x.so') on {socket.gethostname()}: /usr/lib/libnvinfer.so.11: no such file"
    assert without_places({"a": [text]}) == {"a": ["open('a b/x.so') on HOST: libnvinfer.so.11: no such file"]}
    paths = f"PATH=/usr/lib:/home/somebody/lib:/opt/x, file:///home/somebody/y.so, {Path.home()}: https://a.b/c/d/e"
    assert without_places(paths) == "PATH=lib:lib:x, y.so, ~: https://a.b/c/d/e"
