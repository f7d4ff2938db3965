"""Kernels compiled in processes of their own: the same as in this one, errors and Ctrl-C included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.specs import AttentionShape, KernelSpec, combine_spec, write_spec
from enginewright.runtime.shared.errors import CapacityError, MissingDependencyError, TargetError

SHAPE = AttentionShape(4, 2, 32, 32, 32, "f16", "f16", 0.125)
SPECS = [combine_spec(SHAPE, 90), combine_spec(SHAPE, 80), write_spec(SHAPE, 90)]


@pytest.mark.matrix
def test_the_number_of_workers_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for workers in (1, 2):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / str(workers)))  # nothing was compiled before
        with KernelCompiler(workers) as compiler:
            tasks = [compiler.start(spec) for spec in (*SPECS, SPECS[0])]
            assert tasks[0] is tasks[3]
            outputs.append([kernel.result() for kernel in tasks])
            assert list(compiler.each(compiler.compile, SPECS[::-1])) == outputs[-1][2::-1]
            assert len(compiler._workers) == (2 if workers == 2 else 0)
    assert outputs[0] == outputs[1]
    assert [kernel.spec for kernel in outputs[1]] == [*SPECS, SPECS[0]]

    (folder,) = (tmp_path / "2").glob("enginewright-*")
    monkeypatch.setattr(subprocess, "run", None)  # the assembler's turn
    with KernelCompiler(1) as compiler:
        assert compiler.compile(SPECS[0]) == outputs[0][0]  # from Triton's cache
    for file in folder.rglob("*.json"):
        file.write_text("damaged")
    with KernelCompiler(1) as compiler, pytest.raises(TypeError):
        compiler.compile(SPECS[0])


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with KernelCompiler(1) as compiler:
        assert compiler.compile(SPECS[0]).cubin[:4] == b"\x7fELF"


def test_errors_are_those_of_the_process_that_had_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with KernelCompiler(2) as compiler, pytest.raises(TargetError, match="interprets kernels") as refused:
        compiler.compile(SPECS[0])
    assert refused.value.hint == "Unset TRITON_INTERPRET and start anew."


def test_a_process_that_dies_is_said() -> None:
    unknown: KernelSpec = replace(SPECS[0], kernel="nothing")  # type: ignore[arg-type]
    with (
        KernelCompiler(2) as compiler,
        pytest.raises(TargetError, match=r"(?s)ended with exit status 1: .*KeyError") as caught,
    ):
        compiler.compile(unknown)
    assert "nothing for compute capability 90" in str(caught.value)


def test_a_process_that_is_killed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe that it leaves behind hides nothing: `optimize` would take it for its own reader that is gone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    message = r"kv_write for compute capability 80: the process that compiles it was killed"
    with pytest.raises(CapacityError, match=message) as error, KernelCompiler(2) as compiler:
        compiler.compile(SPECS[0])
        (worker,) = compiler._workers
        worker.kill()
        worker._child.wait()
        compiler.compile(write_spec(SHAPE, 80))
    assert error.value.hint is not None and "memory" in error.value.hint
    assert worker._child.stdin is not None and worker._child.stdin.closed


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match="needs triton"):
        KernelCompiler(2)


KERNELS = 64
SCRIPT = f"""
from concurrent.futures import wait
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.specs import AttentionShape, combine_spec
with KernelCompiler(2) as compiler:  # at a script's top: no process runs it again
    shapes = [AttentionShape(1, 1, 16, 16 + i, 16, 'f16', 'f16', 1.0) for i in range({KERNELS})]
    asked = [compiler.start(combine_spec(shape, 90)) for shape in shapes]
    wait(asked, return_when="FIRST_COMPLETED")
    print(*(worker._child.pid for worker in compiler._workers), flush=True)
    [kernel.result() for kernel in asked]
"""


def test_ctrl_c_ends_it_and_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        workers = [int(pid) for pid in running.stdout.readline().split()]
        running.send_signal(signal.SIGINT)
        _, output = running.communicate()
    assert 0 < len(list((tmp_path / "cache").rglob("*.cubin"))) < KERNELS, "it didn't wait for the rest"
    assert running.returncode != 0
    assert output.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert len(workers) == 2
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
