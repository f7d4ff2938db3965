"""Layers in programs, and what runs without some of them give."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.token_sequences import mean_kl, packed_inputs
from enginewright.passes.ir.program import Program
from enginewright.passes.sparsity.layers import LeavingOut, find_layers
from tests.passes.small_programs import Shape, decoder
from tests.passes.sparsity.pruned import normal, tokens

aten, ew = torch.ops.aten, torch.ops.ew

SIZES = [(Shape(windows=(0, 8, 0)), (9, 4)), (Shape(windows=(0, 0), hidden=48, intermediate=64), (7, 1, 5))]


def sequences(shape: Shape, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [s % shape.vocabulary for s in tokens(*lengths)]


def evaluated(program: Program, given: list[torch.Tensor]) -> torch.Tensor:
    fast = FastEvaluation(program, WeightCache(0))
    return program.evaluate(packed_inputs(program, given), compute=fast.compute, read=fast.read)[0]


@pytest.mark.parametrize(("shape", "lengths"), SIZES)
def test_a_run_without_layers_is_the_program_without_them(shape: Shape, lengths: tuple[int, ...]) -> None:
    program, inputs = decoder(shape), sequences(shape, lengths)
    layers, rejected = find_layers(program)
    assert [layer.path for layer in layers] == [f"layers.{i}" for i in range(len(shape.windows))] and not rejected
    for one, after in pairwise(layers):
        assert one.behind is after.before
    runs = LeavingOut(program, layers, inputs, 1 << 20)
    assert torch.equal(runs.reference, evaluated(program, inputs))
    assert runs.kl([]) == 0
    for gone in ([0], [1], [0, len(layers) - 1]):
        shorter = program.copy()
        same, _ = find_layers(shorter)
        for i in sorted(gone, reverse=True):
            shorter.replace(same[i].behind, same[i].before)
        shorter.remove_dead_code()
        expected = mean_kl(runs.reference, evaluated(shorter, inputs))
        assert runs.kl([layers[i] for i in gone]) == pytest.approx(expected, rel=1e-6) and expected > 0


def test_similarity_is_of_the_stream_before_and_behind() -> None:
    shape, lengths = SIZES[0]
    program, inputs = decoder(shape), sequences(shape, lengths)
    layers, _ = find_layers(program)
    runs = LeavingOut(program, layers, inputs, 0)
    values: dict[torch.fx.Node, torch.Tensor] = {}
    program.evaluate(packed_inputs(program, inputs), lambda node, value: values.setdefault(node, value))
    for layer in layers:
        cosine = torch.nn.functional.cosine_similarity(values[layer.before], values[layer.behind], dim=-1)
        assert runs.similarity[layer] == pytest.approx(float(cosine.mean()), abs=1e-5)
        assert -1 <= runs.similarity[layer] < 0.9999


def test_inputs_of_a_linear_are_left_out() -> None:
    shape, lengths = SIZES[1]
    program, inputs = decoder(shape), sequences(shape, lengths)
    layers, _ = find_layers(program)
    runs = LeavingOut(program, layers, inputs, 1 << 20)
    (down,) = (n for n in program.nodes_of(ew.linear.default) if "layers.0.down_proj" in str(n.args[1].target))  # type: ignore[union-attr]
    one, more = (runs.kl_without(down, torch.arange(n)) for n in (1, 32))
    assert 0 < one < more
    assert runs.kl_without(down, torch.arange(0)) == 0
    # Leaving out all inputs leaves out what the linear adds.
    fast = FastEvaluation(program, WeightCache(0))

    def compute(node: torch.fx.Node, args: list[torch.Tensor], kwargs: dict[str, object]) -> torch.Tensor:
        value: torch.Tensor = fast.compute(node, args, kwargs)
        return value * 0 if node is down else value

    nothing = program.evaluate(packed_inputs(program, inputs), compute=compute, read=fast.read)[0]
    assert runs.kl_without(down, torch.arange(64)) == pytest.approx(mean_kl(runs.reference, nothing), rel=1e-6)


def test_layers_of_captured_models() -> None:
    assert [layer.path for layer in find_layers(normal("GPTNeoX"))[0]] == ["gpt_neox.layers.0", "gpt_neox.layers.1"]


def test_a_layer_whose_inside_others_read_stays() -> None:
    program = normal("Llama")
    layers, _ = find_layers(program)
    inside = program.nodes_of(ew.attention.default)[0]
    behind = layers[1].behind
    with program.inserting_before(behind):
        flat = program.call(aten.view.default, inside, [-1, 64], where=behind.meta["where"])
        more = program.call(aten.add.Tensor, behind.args[0], flat, where=behind.meta["where"])
    behind.update_arg(0, more)
    inner, rejected = find_layers(program)
    assert "model.layers.0" not in [layer.path for layer in inner]
    assert {r.where: r.reason for r in rejected}["model.layers.0"] == (
        "others read more of it than what it adds to the stream"
    )
