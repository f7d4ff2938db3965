from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_gate_up import FuseGateUp
from enginewright.runtime.shared.errors import PassError
from tests.passes.small_programs import Linear, Shape, captured_programs, check_logits, decoder, program_from

aten, ew = torch.ops.aten, torch.ops.ew
# A wider product may be blocked in another way by BLAS: float32 rounding of logits of size 10.
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", list(captured_programs()))
def test_numbers(name: str) -> None:
    before = decoder(captured_programs()[name])
    after = before.copy()
    assert FuseGateUp().run(after, PassContext()).matched == len(captured_programs()[name].windows)
    check_logits(after, before, TOLERANCE)


def test_structure_and_parts() -> None:
    program = decoder(Shape(windows=(0,)))
    FuseGateUp().run(program, PassContext())
    assert not program.nodes_of(aten.cat.default)
    (activation,) = program.nodes_of(ew.gated_activation.default)
    fused = activation.args[0]
    assert fused.target is ew.linear.default and fused.args[2] is None
    expr = program.weight_of(fused.args[1])
    assert [(p.source, p.stop) for p in expr.parts()] == [
        ("layers.0.gate_proj.weight", 48),
        ("layers.0.up_proj.weight", 48),
    ]
    assert "layers.0.gate_proj.weight" not in program.weights


def _reject(call_of: str) -> str:
    inner = torch.nn.Module()
    inner.gate, inner.up = Linear(6, 8), Linear(6, 8)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j for j in range(8)])
        gate, up = m.gate(x), m.up(torch.tanh(x) if call_of == "inputs" else x)
        if call_of == "no linear":
            up = torch.tanh(up)
        out = ew.gated_activation(torch.cat((gate, up), -1), "silu")
        return ew.take_rows(out + gate if call_of == "elsewhere" else out, i["rows"])

    record = FuseGateUp().run(program_from(call, inner), PassContext())
    assert record.matched == 0
    (rejection,) = record.rejected
    return rejection.reason


def test_what_stays() -> None:
    assert _reject("inputs") == "gate_up: the linears have different inputs"
    assert _reject("no linear") == "gate_up: gate and up are not both linears"
    assert _reject("elsewhere") == "gate_up: gate or up is used elsewhere"


def test_required_without_a_match_is_an_error() -> None:
    program = decoder(Shape())
    FuseGateUp().run(program, PassContext())
    with pytest.raises(PassError, match="required"):
        FuseGateUp().run(program, PassContext(required=frozenset({"fuse_gate_up"})))
