"""The builder on its own: names, weights in two layouts, copies only where strides don't do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.builder import Builder, Packing
from enginewright.passes.lowering.views import View, contiguous_strides
from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.lowered_program import Affine
from tests.passes.small_programs import Shape, decoder

T = Affine(t=1)


@pytest.fixture(scope="module")
def program() -> Program:
    return decoder(Shape())


def builder(program: Program, *panelled: str) -> Builder:
    made_builder = Builder(program, dict.fromkeys(panelled, Packing("panel32", "f32")))
    made_builder.node = next(n for n in program.graph.nodes if n.op == "call_function")
    return made_builder


def table(program: Program) -> str:
    return next(name for name in program.weights if len(program.weights[name].shape) == 2)


@pytest.mark.parametrize("width", [1, 24])
def test_buffers_are_dense_and_named_in_order(program: Program, width: int) -> None:
    b = builder(program)
    views = [b.buffer((T, Affine(width))) for _ in range(2)]
    assert [v.name for v in views] == ["b0", "b1"]
    assert [buffer.size for buffer in b.buffers] == [Affine(t=4 * width)] * 2
    assert views[0].strides == (Affine(width), Affine(1))


@pytest.mark.parametrize(("dtype", "width", "row"), [("i8", 7, 8), ("i8", 24, 24), ("bf16", 7, 14), ("f16", 7, 14)])
def test_rows_of_narrow_types_are_padded(program: Program, dtype: Dtype, width: int, row: int) -> None:
    b = builder(program)
    view = b.buffer((T, Affine(3), Affine(width)), dtype)
    bytes_per_row = row if dtype == "i8" else -(-row // 4) * 4 if dtype == "bf16" else row
    assert b.buffers[0].size == Affine(t=3 * bytes_per_row)
    flat = b.rows(view, rank=2)
    assert flat.strides[0] * {"i8": 1, "bf16": 2, "f16": 2}[dtype] == bytes_per_row
    assert (flat.name, len(b.steps)) == (view.name, 0), "padding isn't a reason to copy"


def test_what_takes_no_narrow_type_says_so(program: Program) -> None:
    b = builder(program)
    view = b.buffer((T, Affine(8)), "i8")
    with pytest.raises(UnsupportedModelError, match="the cpu target has no copy of i8"):
        b.copy(view)
    with pytest.raises(UnsupportedModelError, match="the cpu target has no elementwise of bf16"):
        b.cast(b.buffer((T, Affine(8)), "bf16"))


def test_a_weight_that_is_needed_in_both_layouts_has_two_names(program: Program) -> None:
    name = table(program)
    b = builder(program, name)
    assert b.weight(name, rows=False).name == name
    assert b.weight(name, rows=True).name == f"{name}.rows"
    assert {n: use.layout for n, use in b.weights.items()} == {name: "panel32", f"{name}.rows": "rows"}
    plain = builder(program)
    assert plain.weight(name, rows=True).name == plain.weight(name, rows=False).name == name
    assert plain.weights[name].layout == "rows"


def test_copies_only_where_strides_do_not_do(program: Program) -> None:
    b = builder(program)
    dense = b.buffer((T, Affine(4), Affine(6)))
    assert b.unit(dense) is dense
    flat = b.rows(dense, rank=2)
    assert flat.name == dense.name and flat.shape == (T * 4, Affine(6))
    assert not b.steps
    transposed = replace(dense, shape=(T, Affine(6), Affine(4)), strides=(Affine(24), Affine(1), Affine(6)))
    copied = b.unit(transposed)
    assert copied.name != dense.name and copied.strides == contiguous_strides(transposed.shape)
    assert [step.op for step in b.steps] == ["copy"]


def test_a_part_of_a_step_input_is_a_part_of_one_copy(program: Program) -> None:
    b = builder(program)
    whole = View("input", "positions", "i32", (T,), (Affine(1),))
    b.inputs["positions"] = whole
    assert b.unit(whole) is whole
    part = replace(whole, shape=(T, Affine(1)), strides=(Affine(1), Affine(1)))
    first, second = b.unit(part), b.unit(part)
    assert first.name == second.name == "b0" and first.kind == "buffer"
    assert [step.op for step in b.steps] == ["copy"]


def test_what_it_refuses_names_op_and_module(program: Program) -> None:
    b = builder(program)
    with pytest.raises(UnsupportedModelError, match=r"^ew\.embedding at .*: the cpu target has no float64"):
        b.dtype(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(UnsupportedModelError, match="no kernel for it with such an argument"):
        b.view(3.0)
