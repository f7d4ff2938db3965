"""Building in a process of its own: what comes back, and what is said when nothing does."""

from __future__ import annotations

import os
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginewright.plugins.engines.plan import HEADER_BYTES, PlanHeader
from enginewright.plugins.tensorrt_rtx.compile import build_engine as module
from enginewright.plugins.tensorrt_rtx.compile.build_engine import EngineRequest, build_engine
from enginewright.runtime.shared.errors import CapacityError, MissingDependencyError, TargetError

FOLDER_LENGTHS = ("a", "a-much-longer-name")


def _graph(folder: Path, kind: str = "Relu") -> Path:
    """x [T, 4] times a constant, and an operator behind it; nothing reads y."""
    x, y, z = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)
        for name, shape in (("x", ["T", 4]), ("y", ["T"]), ("z", ["T", 4]))
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="model.layers.0.mlp/MatMul_1"),
        helper.make_node(kind, ["a"], ["z"], name=f"model.layers.0.mlp/{kind}_2"),
    ]
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float16), "w")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x, y], [z], [weight]), opset_imports=[helper.make_opsetid("", 24)], ir_version=12
    )
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def _request(graph: Path) -> EngineRequest:
    profiles = ({"T": (1, 4, 8)}, {"T": (9, 16, 32)})
    return EngineRequest(graph, graph.parent / "e.plan", ("8.0", "8.9"), profiles, ("x",), ("z",), name="engine e")


def test_an_engine_and_what_is_said_of_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    calls: list[tuple[int, int, str]] = []
    plans = []
    for name in FOLDER_LENGTHS:
        request = _request(_graph(tmp_path / name))
        built = build_engine(request, lambda *step: calls.append(step))
        plans.append(request.plan.read_bytes())
        header = PlanHeader.parse(plans[-1][:HEADER_BYTES], "e.plan")
        assert (header.bytes, header.version) == (built.bytes, built.version) and len(plans[-1]) == built.bytes
        assert header.compute_capabilities == ("8.0", "8.9")
        assert built.layers > 0 and built.attentions == 0 and built.seconds > 0
        assert 50 << 20 < built.peak_rss_bytes < 4 << 30
    assert plans[0] == plans[1]  # whatever the folder
    assert calls and all(0 < done <= total for done, total, _ in calls)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"inputs": ("x", "absent")}, "Relu", r"engine e: .* input absent: the library dropped it"),
        ({"outputs": ("z", "k")}, "Relu", r"engine e: .* output k: the library dropped it"),
        ({"compute_capabilities": ("9.0",)}, "Relu", r"compute capability 9\.0 is unknown to this version, 1\."),
        ({"profiles": ({"B": (1, 1, 1)},)}, "Relu", r"input x: nothing says the size of T"),
        ({}, "Nonsense", r"engine e: TensorRT-RTX doesn't build it: Nonsense at model.layers.0.mlp: "),
    ],
)
def test_what_the_library_does_not_take(change: dict[str, object], kind: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    request = replace(_request(_graph(tmp_path, kind)), **change)  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=message):
        build_engine(request)
    assert not request.plan.exists()


def test_a_full_disk(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(CapacityError, match=r"engine e: the engine can't be written: .*full: No space left"):
        build_engine(replace(_request(_graph(tmp_path)), plan=Path("/dev/full")))


def _child(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Another program in the place of the one that builds."""
    (folder / "other_child.py").write_text("import json, os, signal, sys\n" + textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(module, "CHILD", "other_child")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("os.abort()", TargetError, r"engine e: the process that builds it died of SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", TargetError, r"died of SIGSEGV\n.*please report it"),
        ("os.kill(os.getpid(), signal.SIGKILL)", CapacityError, r"was killed; most likely there was no memory"),
        ("sys.exit('the last words')", TargetError, r"ended with exit status 1: the last words"),
        ("print(json.dumps({'kind': 'missing', 'error': 'no module'}))", MissingDependencyError, r"\[tensorrt-rtx\]"),
    ],
)
def test_a_child_that_dies(
    text: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = _request(_graph(tmp_path))
    _child(monkeypatch, tmp_path, f"sys.stdin.readline()\n{text}")
    with pytest.raises(error, match=message):
        build_engine(request)


def test_a_child_that_is_dead_before_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.wait()

    request = _request(_graph(tmp_path))
    _child(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(subprocess, "Popen", Dead)
    with pytest.raises(CapacityError, match="was killed; most likely there was no memory"):
        build_engine(request)


def test_ctrl_c_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = _request(_graph(tmp_path))
    _child(
        monkeypatch,
        tmp_path,
        """
        open("pid", "w").write(str(os.getpid()))
        print(json.dumps({"phase": "building", "step": 1, "steps": 9}), flush=True)
        signal.pause()
        """,
    )

    def interrupted(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(request, interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
