"""The code of a write that takes the caches' addresses from its inputs: it assembles, and reads no others."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from enginewright.plugins.gpu.compile_ahead import CompiledKernel
from enginewright.plugins.gpu.specs import AttentionShape, write_spec
from enginewright.plugins.tensorrt.ordered_write import writing_to_inputs
from enginewright.runtime.shared.errors import TargetError

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[cuda]'")

from enginewright.plugins.gpu import compile_ahead


@pytest.fixture(scope="module")
def kernel() -> CompiledKernel:
    return compile_ahead.compile_kernel(write_spec(AttentionShape(4, 2, 64, 64, 32, "f16", "f16", 0.125), 89))


def loaded(kernel: CompiledKernel) -> set[str]:
    """Names of the parameters that the code reads."""
    names = [name for name, _ in kernel.spec.arguments]
    return {names[int(n)] for n in re.findall(rf"\[{kernel.entry}_param_(\d+)\]", kernel.ptx)}


def test_the_caches_that_go_in_are_written(kernel: CompiledKernel, tmp_path: Path) -> None:
    changed = writing_to_inputs(kernel)
    caches = {"k_cache", "v_cache"}
    assert caches <= loaded(kernel) and not {f"{name}_before" for name in caches} & loaded(kernel)
    assert loaded(changed) == loaded(kernel) - caches | {f"{name}_before" for name in caches}
    assert changed.ptx.count(".param ") == kernel.ptx.count(".param ")
    assert len(changed.ptx.splitlines()) == len(kernel.ptx.splitlines())
    differing = [a for a, b in zip(kernel.ptx.splitlines(), changed.ptx.splitlines(), strict=True) if a != b]
    assert len(differing) == 2 and all("ld.param" in line for line in differing)
    source, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(changed.ptx)
    from triton.backends.nvidia.compiler import get_ptxas

    subprocess.run([get_ptxas(89).path, "--gpu-name=sm_89", str(source), "-o", str(cubin)], check=True)
    assert cubin.stat().st_size > 1000


def test_code_that_can_t_be_changed_is_refused(kernel: CompiledKernel) -> None:
    with pytest.raises(TargetError, match=r"can't be made to write to its inputs: \[.*_param_8\] is read 0 times"):
        writing_to_inputs(replace(kernel, ptx=""))
    with pytest.raises(TargetError, match="can't be made to write to its inputs"):
        writing_to_inputs(writing_to_inputs(kernel))
