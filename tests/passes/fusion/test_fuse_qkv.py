from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_qkv import FuseQkv
from tests.passes.small_programs import Linear, Shape, captured_programs, check_logits, decoder, program_from

aten, ew = torch.ops.aten, torch.ops.ew
# A wider product may be blocked in another way by BLAS: float32 rounding of logits of size 10.
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", list(captured_programs()))
def test_numbers(name: str) -> None:
    before = decoder(captured_programs()[name])
    after = before.copy()
    record = FuseQkv().run(after, PassContext(required=frozenset({"fuse_qkv"})))
    assert record.matched == len(captured_programs()[name].windows) and not record.rejected
    check_logits(after, before, TOLERANCE)


def test_structure_and_parts() -> None:
    program = decoder(Shape(windows=(0,), bias=(True, False, True)))
    before = len(program.nodes_of(ew.linear.default))
    FuseQkv().run(program, PassContext())
    linears = program.nodes_of(ew.linear.default)
    assert len(linears) == before - 2
    fused = linears[0]
    weight, bias = program.weight_of(fused.args[1]), program.weight_of(fused.args[2])
    assert fused.args[1].target == "layers.0.q_proj+k_proj+v_proj.weight"
    assert weight.shape == (64, 32) and bias.shape == (64,)
    assert [(p.source, p.start, p.stop) for p in weight.parts()] == [
        ("layers.0.q_proj.weight", 0, 32),
        ("layers.0.k_proj.weight", 0, 16),
        ("layers.0.v_proj.weight", 0, 16),
    ]
    # A missing bias is zero, and stands for the rows of its weight.
    assert [p.source for p in bias.parts()] == [
        f"layers.0.{x}" for x in ("q_proj.bias", "k_proj.weight", "v_proj.bias")
    ]
    assert torch.equal(bias.evaluate()[32:48], torch.zeros(16))
    assert set(fused.meta["where"]) == {f"layers.0.{x}_proj" for x in "qkv"}
    assert [(n.args[2], n.args[3]) for n in fused.users] == [(0, 32), (32, 48), (48, 64)]


@pytest.mark.parametrize("width", [8, 12])
def test_linears_right_behind_each_other(width: int) -> None:
    """Nothing is between them that the slices could be put before once the first has gone."""
    inner = torch.nn.Module()
    inner.q, inner.k, inner.v = (Linear(8, width) for _ in range(3))

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.01 * j for j in range(width)])
        q, k, v = m.q(x), m.k(x), m.v(x)
        heads = [t.view(-1, 2, 4) for t in (q, k, v)]
        return ew.take_rows(ew.attention(*heads, i["q_start"], 0, 0.5, 0, 0.0, None).flatten(1), i["rows"])

    program = program_from(call, inner)
    before = program.copy()
    assert FuseQkv().run(program, PassContext()).matched == 1
    assert len(program.nodes_of(ew.linear.default)) == 1
    check_logits(program, before, TOLERANCE, lengths=((5, 3),))


def test_one_linear_stays_and_is_no_candidate() -> None:
    program = decoder(Shape())
    FuseQkv().run(program, PassContext())
    record = FuseQkv().run(program, PassContext())
    assert record.matched == 0 and not record.rejected


def _attend(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, i: dict[str, torch.Tensor]) -> torch.Tensor:
    heads = [t.view(-1, 2, 4) for t in (q, k, k)]
    return ew.take_rows(ew.attention(*heads, i["q_start"], 0, 0.5, 0, 0.0, None).flatten(1), i["rows"])


def test_linears_of_different_values_stay() -> None:
    inner = torch.nn.Module()
    inner.q, inner.k = Linear(8, 8), Linear(8, 8)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j for j in range(8)])
        return _attend(x, m.q(x), m.k(torch.tanh(x)), i)

    record = FuseQkv().run(program_from(call, inner), PassContext())
    assert record.matched == 0
    assert [r.reason for r in record.rejected] == ["the linears have different inputs"]


def test_keys_that_no_linear_makes_stay() -> None:
    inner = torch.nn.Module()
    inner.q = Linear(8, 8)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j for j in range(8)])
        return _attend(x, m.q(x), torch.tanh(x), i)

    record = FuseQkv().run(program_from(call, inner), PassContext())
    assert [r.reason for r in record.rejected] == ["k and v does not come from a linear"]
