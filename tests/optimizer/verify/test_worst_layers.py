"""The place where a value is wrong is found, and none of those behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.verify.worst_layers import LayerError, layer_errors
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Apply, Concat, WeightExpr
from tests.passes.captured import captured

aten = torch.ops.aten
INT8 = WeightFormats(default=WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32))
ROUNDING = 1e-5
"""The error of sums of some hundred float32 terms in another order, and of what is left of them where they cancel."""


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 250, (n,), generator=generator) for n in (20, 12, 8)]


def run(program: Program, names: list[str], formats: WeightFormats | None = None) -> None:
    passes = [p for p in default_pipeline() if p.name in names]
    PassManager(passes, PassContext(recipe=PassOptions(weights=formats or WeightFormats()))).run(program)


def up_to(last: str) -> list[str]:
    names = [p.name for p in default_pipeline()]
    return names[: names.index(last)]


def errors(before: Program, after: Program) -> list[LayerError]:
    return layer_errors(before, after, sequences(), WeightCache())


def change(program: Program, part: str, how: Callable[[WeightExpr], WeightExpr]) -> None:
    name = next(n for n in program.weights if part in n)
    program.weights._by_name[name] = how(program.weights[name])


def one_percent(weight: WeightExpr) -> WeightExpr:
    return Apply(aten.mul.Tensor, (weight, 1.01), (), weight.shape, weight.dtype)


def swapped(weight: WeightExpr) -> WeightExpr:
    assert isinstance(weight, Concat)
    return Concat(weight.bases[::-1], weight.dim)


@pytest.mark.matrix
@pytest.mark.parametrize(("hidden", "layers"), [(64, 2), (96, 3)])
def test_one_place_is_wrong_and_those_behind_it_are_not(hidden: int, layers: int) -> None:
    before = captured("Llama", hidden_size=hidden, num_hidden_layers=layers)
    after = before.copy()
    change(after, "layers.1.self_attn.o_proj", one_percent)
    first, *others = errors(before, after)
    assert first.where == "model.layers.1.self_attn.o_proj"
    assert first.tensors == ("model.layers.1.self_attn.o_proj.weight",)
    assert first.error == pytest.approx(0.01, rel=1e-3)
    assert {e.error for e in others} == {0.0}
    assert len(others) > 50


@pytest.mark.parametrize("name", ["sink_views", "normalize_linear", "fuse_qkv", "fuse_gate_up", "fuse_add_norm"])
def test_a_pass_that_is_right_changes_no_place(name: str) -> None:
    program = captured("Llama")
    run(program, up_to(name))
    before = program.copy()
    run(program, [name])
    places = errors(before, program)
    assert places[0].error <= ROUNDING
    assert len(places) >= 10  # where it makes most calls anew there are few places, and all the same through the model


def test_several_that_became_one() -> None:
    program = captured("Llama")
    run(program, up_to("fuse_gate_up"))
    before = program.copy()
    run(program, ["fuse_gate_up"])
    change(program, "layers.1.mlp.gate_proj+up_proj", swapped)
    first, second, *_ = errors(before, program)
    assert first.where == "model.layers.1.mlp + model.layers.1.mlp.act_fn"
    assert set(first.tensors) == {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")}
    assert first.error > 0.5 > ROUNDING > second.error


def test_what_rounding_to_integers_costs_each_layer() -> None:
    program = captured("Llama")
    run(program, up_to("quantize_linears"), INT8)
    before = program.copy()
    run(program, ["quantize_linears"], INT8)
    places = errors(before, program)
    linears = [e for e in places if e.op == "ew.quantized_linear"]
    assert len(linears) == 9  # of two layers four each, and the head
    assert all(1e-3 < e.error < 0.03 for e in linears)  # two roundings to one part in 127 of the largest of 32
    assert places[:9] == linears
    assert str(places[0]).startswith(f"{places[0].where} (ew.quantized_linear, tensor {places[0].tensors[0]}")


def test_what_is_printed_of_one() -> None:
    few = LayerError("model.layers.0.mlp", "ew.linear", ("a.weight", "b.weight"), 0.0123)
    assert str(few) == "model.layers.0.mlp (ew.linear, tensor a.weight, b.weight) by 1.23 %"
    many = LayerError("", "ew.rope", tuple("abcdef"), 1.4)
    assert str(many) == "the model (ew.rope, tensor a, b, c, d and 2 more) by 140 %"
    assert str(LayerError("x", "ew.rope", (), 0.5)) == "x (ew.rope) by 50 %"
