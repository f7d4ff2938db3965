from __future__ import annotations

import pytest

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.lowering.builder import Form
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.passes.lowering.narrow_floats import narrow_floats
from enginewright.runtime.shared.lowered_program import LoweredProgram
from tests.passes.small_programs import Shape, decoder


def lowered(shape: Shape) -> LoweredProgram:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    return lower_program(program, Form("the test", panels=False)).program


@pytest.mark.parametrize("floats", ["bf16", "f16"])
@pytest.mark.parametrize("shape", [Shape(), Shape(hidden=64, heads=8, kv_heads=4, qk_norm=True, logits_cap=5.0)])
def test_activations_become_narrow_and_nothing_else_changes(shape: Shape, floats: str) -> None:
    before = lowered(shape)
    after = narrow_floats(before, floats)  # type: ignore[arg-type]
    types = {o.name: o.dtype for s in after.steps for o in (*s.inputs, *s.outputs) if o.kind == "buffer"}
    narrow = {name for name, dtype in types.items() if dtype == floats}
    assert set(types.values()) <= {floats, "f32", "i32"}
    for step in after.steps:
        if step.op in ("linear", "rms_norm", "paged_attention", "embedding"):
            assert {o.dtype for o in step.outputs} == {floats}, step.op
        if step.op == "rope_table":
            assert {o.dtype for o in step.outputs} == {"f32"}
        if step.op == "linear":
            assert step.inputs[0].dtype == floats
    sizes = {buffer.name: buffer.size.coefficients() for buffer in before.buffers}
    for buffer in after.buffers:
        share = 2 if buffer.name in narrow else 1
        assert tuple(share * n for n in buffer.size.coefficients()) == sizes[buffer.name]
    # One buffer has one type wherever it is read, and only types and sizes differ.
    for old, new in zip(before.steps, after.steps, strict=True):
        for a, b in zip((*old.inputs, *old.outputs), (*new.inputs, *new.outputs), strict=True):
            assert b == a.model_copy(update={"dtype": b.dtype})
            assert b.kind != "buffer" or b.dtype == types[b.name]


def test_32_bits_change_nothing() -> None:
    program = lowered(Shape())
    assert narrow_floats(program, "f32") is program
