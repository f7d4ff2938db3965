"""Kernels are as good as was recorded, as far as can be told without a GPU; see static_performance.py.

A sample runs in CI's tier, all of them with `-m soak`, where Triton 3.6 has its turn too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

from enginewright.plugins.gpu.compile_ahead import compile_kernel, spec_document
from enginewright.plugins.gpu.specs import attention_spec
from enginewright.plugins.gpu.tiles import Tile
from tests.plugins.gpu import static_performance as static
from tests.plugins.gpu import step_specs

SAMPLE = {
    ("decode 128", 90),
    ("decode 128 fp8", 89),
    ("prefill 128", 80),
    ("prefill 128", 100),
    ("prefill 64 f16", 120),
    ("prefill 128 f32", 90),
    ("write 128 int8", 80),
    ("combine 128", 120),
    ("rope, write fp8", 89),
    ("product int4, 16 rows", 90),
    ("experts int8, 4,096 rows", 80),
    ("narrow, cuts", 100),
    ("convolution, 4 taps", 90),
    ("scan, Mamba-2", 80),
    ("KDA 128", 120),
}
RECORDED_BY = "3.9."
"""The version of Triton; other versions make other code, of which only the rules hold."""


def every_kernel() -> Iterator[object]:
    for name in static.KERNELS:
        for capability in static.CAPABILITIES:
            tier = pytest.mark.matrix if (name, capability) in SAMPLE else pytest.mark.soak
            yield pytest.param(name, capability, marks=tier)


@pytest.mark.parametrize(("name", "capability"), list(every_kernel()))
def test_a_kernel_is_as_good_as_recorded(name, capability):
    compiled = static.KERNELS[name].make(capability)
    assert static.broken(static.KERNELS[name], compiled) == []
    if not version("triton").startswith(RECORDED_BY):
        return
    was, now = static.recorded()[name, capability], static.figures_of(name, compiled)
    assert now.tile == was.tile and now.stack == was.stack == 0
    assert now.registers <= was.registers + 8
    assert now.shared_memory <= was.shared_memory
    assert now.instructions <= 1.05 * was.instructions


def test_there_is_a_record_of_every_kernel():
    assert set(static.recorded()) == {(name, c) for name in static.KERNELS for c in static.CAPABILITIES}
    assert set(static.recorded()) >= SAMPLE


@pytest.mark.parametrize(
    ("tile", "split_keys", "said"),
    [
        (Tile(1, 16, 64, 4, 1), 512, "aren't copied to shared memory ahead"),
        (Tile(1, 16, 128, 8, 4), 512, "bytes of shared memory"),
    ],
)
def test_a_bad_kernel_breaks_a_rule(tile, split_keys, said):
    """Must not match: what the rules are for."""
    compiled = compile_kernel(attention_spec(static.LLAMA, 80, tile, split_keys))
    assert any(said in broken for broken in static.broken(static.KERNELS["decode 128"], compiled))


def test_stack_and_ptx_that_no_old_driver_takes_break_a_rule():
    compiled = static.KERNELS["combine 128"].make(90)
    assert static.broken(static.KERNELS["combine 128"], compiled) == []
    assert static.broken(static.KERNELS["combine 128"], replace(compiled, stack=8)) == ["8 bytes of stack"]
    newer = replace(compiled, ptx=compiled.ptx.replace(".version 8.4", ".version 9.0"))
    assert static.broken(static.KERNELS["combine 128"], newer) == ["PTX 9.0, newer than 84"]


def test_loops_are_what_jumps_lead_back_to():
    ptx = "$A:\n one\n$B:\n two\n @%p bra $B;\n three\n @%p bra.uni $A;\n bra $C;\n$C:\n ret;"
    assert list(static.loops(ptx)) == ["$B:\n two\n @%p bra $B;"]


@pytest.mark.soak
def test_triton_3_6_compiles_them_all(repository: Path, tmp_path: Path) -> None:
    """In an environment of its own with nothing else: that version is on machines whose torch is 2.11."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    installed = subprocess.run([*pip, "triton==3.6.*"], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    paths = os.pathsep.join((str(repository / "src"), str(repository)))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    specs = [(name, c, spec_document(spec)) for name, c, spec in step_specs.every(static.CAPABILITIES)]
    (tmp_path / "specs.json").write_text(json.dumps(specs))
    command = [python, "-m", "tests.plugins.gpu.static_performance", "--specs", str(tmp_path / "specs.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == len(static.KERNELS) * len(static.CAPABILITIES)
