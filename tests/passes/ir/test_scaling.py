"""Scaled channels, read from the weights of a program that AWQ has scaled."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.calls import calls_of
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.scaling import Scaling, scaling_of
from tests.passes.quantization.test_apply_awq import INT4, only_layers, prepared, scale, sequences


def scaling(program: Program) -> Scaling:
    return scaling_of(program, calls_of(program))


def norms_of(program: Program) -> dict[str, torch.Tensor]:
    """The output [T, N] of each norm, by the norm's module path."""
    outputs: dict[str, torch.Tensor] = {}
    calls = {call.key: call for call in calls_of(program) if call.op == "rms_norm"}

    def observe(node: torch.fx.Node, value: object) -> None:
        if node in calls and isinstance(value, torch.Tensor):
            outputs[calls[node].where[0]] = value

    program.evaluate(packed_inputs(program, sequences(12, 9)), observe=observe)
    return outputs


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_value_without_its_scale_is_the_sources_value(family: str) -> None:
    program = prepared(family, only_layers(INT4))
    assert scaling(program).scales == {} and scaling(program).unknown == set()
    before = norms_of(program)
    assert scale(program).matched
    read, after = scaling(program), norms_of(program)
    norms = [name for name in read.scales if name.path in before and name.what == "output"]
    assert norms
    layer = after.keys() & {name.path for name in norms}
    first = min(layer)  # nothing before it is rounded otherwise
    (name,) = (n for n in norms if n.path == first)
    factors = torch.from_numpy(read.scales[name])
    assert not torch.allclose(after[first], before[first])
    torch.testing.assert_close(after[first] / factors, before[first], rtol=1e-4, atol=1e-5)
