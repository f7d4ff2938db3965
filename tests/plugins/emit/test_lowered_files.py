from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.plugins.cpu.compile.emitter import lower_for_cpu
from enginewright.plugins.cuda.compile.emitter import lower_for_gpus
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.emit.lowered_files import with_own_names, write_lowered
from enginewright.plugins.tvm.compile.emitter import lower_for_tvm
from enginewright.runtime.shared.lowered_program import FORMAT_VERSION, LoweredProgram
from enginewright.runtime.shared.progress import ProgressEvent, silent
from tests.passes.small_programs import Shape, decoder

SHAPES = (Shape(), Shape(windows=(0,), hidden=64, tied=False, bias=(True, False, True)))


def paged(shape: Shape = Shape()) -> Program:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    return program


def read_weights(program: LoweredProgram) -> set[str]:
    return {o.name for step in program.steps for o in step.inputs if o.kind == "weight"}


@pytest.mark.parametrize("shape", SHAPES, ids=["tied", "untied"])
def test_only_names_of_weights_change(shape: Shape) -> None:
    plain = lower_for_cpu(paged(shape))
    named = with_own_names(plain, "mine")
    assert {use.name for use in named.program.weights} == {f"{use.name}.mine" for use in plain.program.weights}
    assert read_weights(named.program) == set(named.weights) == {f"{name}.mine" for name in plain.weights}
    assert named.weights == {f"{name}.mine": expr for name, expr in plain.weights.items()}
    pairs = list(zip(plain.program.steps, named.program.steps, strict=True))
    assert [(a.op, a.attrs, a.outputs) for a, _ in pairs] == [(b.op, b.attrs, b.outputs) for _, b in pairs]
    assert named.program.arena_bytes == plain.program.arena_bytes


def test_what_each_target_calls_its_weights() -> None:
    program = paged()
    cpu, tvm = lower_for_cpu(program).program, lower_for_tvm(program).program
    cuda = lower_for_gpus(program, "bf16").program
    assert all(name.endswith(".tvm") for name in read_weights(tvm))
    assert all(name.endswith(".cuda") for name in read_weights(cuda))
    assert not read_weights(cpu) & (read_weights(tvm) | read_weights(cuda))
    assert cuda.format_version == cpu.format_version == FORMAT_VERSION


@pytest.mark.parametrize("shape", SHAPES, ids=["tied", "untied"])
def test_the_program_and_all_that_it_reads_are_written(shape: Shape, tmp_path: Path) -> None:
    lowering, seen = lower_for_cpu(paged(shape)), list[ProgressEvent]()
    with BundleWriter(tmp_path / "x.bundle") as writer:
        text = write_lowered(lowering, "mine", writer, seen.append)
    assert text == lowering.program.to_json()
    assert LoweredProgram.from_json(text) == lowering.program
    assert [(e.stage, e.done, e.total) for e in seen] == [("emit", i, len(seen) - 1) for i in range(len(seen))]
    assert [e.detail for e in seen[1:]] == [use.name for use in lowering.program.weights]
    with BundleWriter(tmp_path / "y.bundle") as writer:
        assert write_lowered(lowering, "mine", writer, silent) == text
