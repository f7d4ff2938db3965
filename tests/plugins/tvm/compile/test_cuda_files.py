"""CUDA kernels of the tvm target: on a CPU their loops give the cpu target's logits, and they compile without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.plugins.doctor.machine import look_at_machine
from enginewright.plugins.native.executable import CpuProgram
from enginewright.plugins.steps.timed_steps import random_step
from enginewright.plugins.steps.x86_levels import Level
from enginewright.plugins.tvm.compile.compile_library import compile_library
from enginewright.plugins.tvm.compile.cuda_kernels import HANDLERS
from enginewright.plugins.tvm.compile.step_function import step_module
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.plugins.tvm.section import TvmSection
from enginewright.plugins.tvm.serve.doctor import check
from enginewright.plugins.tvm.serve.executor import OwnMemory, TvmStep
from enginewright.plugins.tvm.serve.library import Library
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepSizes
from tests.conftest import TINY_FAMILIES, make_tiny_model

ON_A_CPU = Level("loops", "x86-64-v3", (), 1, 1, lanes=1)
"""The kernels' loops as they are, run by threads of a CPU."""
STEPS = (StepSizes((40, 1, 7), (40, 1, 7)), StepSizes((1, 3), (41, 10)))


def recipe_of(*cuda: str, name: str = "f32") -> Recipe:
    options = TvmOptions.model_validate({"levels": ("v2",), "cuda": cuda})
    return load_recipe(name).model_copy(update={"tvm": options})


def logits_of(program: LoweredProgram, bundle: Bundle, *, gpu: bool) -> list[FloatArray]:
    """Computes those of steps that read what those before wrote to the cache."""
    weights = {use.name: bundle.weight(use.name) for use in program.weights}
    blocks = {group.name: 8 for group in program.cache_groups}
    steps = [random_step(program.cache_groups, bundle.model.vocab_size, sizes) for sizes in STEPS]
    if gpu:
        code = compile_library(step_module(program, ON_A_CPU, handlers=HANDLERS), ON_A_CPU)
        library = Library(code, Path("loops.so"), 2)
        run = library.program(program)
        step = TvmStep(run, library, weights, OwnMemory(run, blocks))
        return [step.run(one)["logits"].copy() for one in steps]
    cpu_program = CpuProgram(program, weights, blocks=blocks, threads=1)
    rows = []
    for one in steps:
        logits = cpu_program.run(one.changed(outputs=("logits",))).logits
        assert logits is not None
        rows.append(logits)
    return rows


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=pytest.mark.matrix if n == "Llama" else pytest.mark.soak) for n in TINY_FAMILIES],
)
def test_the_loops_give_the_cpu_target_s_logits(family: str, tmp_path: Path) -> None:
    export(make_tiny_model(family), tmp_path / "b", recipe=recipe_of(), targets=("tvm",))
    bundle = Bundle.open(tmp_path / "b", trust="code")
    program = bundle.program("tvm")
    logits, cpu_logits = (logits_of(program, bundle, gpu=gpu) for gpu in (True, False))
    for one, other in zip(logits, cpu_logits, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.matrix
def test_files_are_made_without_a_gpu_and_are_the_same_each_time(tmp_path: Path) -> None:
    model = make_tiny_model("Llama")
    for name in ("one", "two"):
        export(model, tmp_path / name, recipe=recipe_of("9.0"), targets=("tvm",))
    folder = tmp_path / "one/targets/tvm"
    source = (folder / "kernels-sm_90.cu").read_text()
    section = Bundle.open(tmp_path / "one", trust="code").target("tvm").section(TvmSection)
    assert section is not None and section.cuda == ("9.0",)
    check_result = check(look_at_machine(), Bundle.open(tmp_path / "one", trust="code").target("tvm")).on
    assert check_result[1] == "CUDA source for 9.0, which nothing here runs"
    for op in ("linear", "paged_attention", "rms_norm", "rope_kv_write", "embedding", "gated_activation"):
        assert f"__launch_bounds__(128) {op}_" in source
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert ("kernels-sm_90.cubin" in names) == (shutil.which("nvcc") is not None) and "step-sm_90.so" in names
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "two/targets/tvm" / name).read_bytes(), name
    if "kernels-sm_90.cubin" in names:
        assert (folder / "kernels-sm_90.cubin").read_bytes()[:4] == b"\x7fELF"


def test_what_has_no_kernel_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantize.* the tvm target on a GPU has no such op\n.*\[tvm\]"):
        export(make_tiny_model("Llama"), tmp_path / "a", recipe=recipe_of("9.0", name="int8"), targets=("tvm",))
    with pytest.raises(UnsupportedModelError, match=r"the tvm target on a GPU has (none|no such op)"):
        export(make_tiny_model("Llama"), tmp_path / "b", recipe=recipe_of("9.0", name="bf16"), targets=("tvm",))
    with pytest.raises(ValueError, match=r"4\.2"):
        recipe_of("4.2")
