from __future__ import annotations

import operator

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_add_norm import FuseAddNorm
from tests.passes.small_programs import Norm, Shape, captured_programs, check_logits, decoder, program_from

aten, ew = torch.ops.aten, torch.ops.ew


@pytest.mark.parametrize("name", list(captured_programs()))
def test_numbers(name: str) -> None:
    before = decoder(captured_programs()[name])
    after = before.copy()
    assert FuseAddNorm().run(after, PassContext()).matched == 2 * len(captured_programs()[name].windows)
    check_logits(after, before, 0.0)  # the references do the same operations in the same order


def test_other_users_take_the_sum_from_the_fused_op() -> None:
    program = decoder(Shape(windows=(0,)))
    FuseAddNorm().run(program, PassContext())
    assert not program.nodes_of(aten.add.Tensor)
    first, last = program.nodes_of(ew.add_rms_norm.default)
    assert first.meta["where"] == ("layers.0.post_norm", "layers.0")
    (total,) = (n for n in first.users if n.args[1] == 1)
    assert total.target is operator.getitem and set(total.users) == {last}
    assert not [n for n in last.users if n.args[1] == 1]


def _program(kind: str) -> tuple[torch.nn.Module, object]:
    inner = torch.nn.Module()
    inner.a, inner.b = Norm(8, layer_norm=True), Norm(8, layer_norm=True)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.3 for j in range(8)])
        y = torch.tensor([[1.0 + j for j in range(8)]]) if kind == "broadcast" else torch.tanh(x)
        total = torch.add(x, y, alpha=2) if kind == "alpha" else x + y
        early = total * 2  # reads the sum before any norm does
        return ew.take_rows(early + m.a(total) + m.b(total), i["rows"])

    return inner, call


def test_two_norms_of_one_sum() -> None:
    inner, call = _program("twice")
    before = program_from(call, inner)
    after = before.copy()
    assert FuseAddNorm().run(after, PassContext()).matched == 1
    assert len(after.nodes_of(ew.layer_norm.default)) == 1
    check_logits(after, before, 0.0, lengths=((3, 4), (9,)), vocabulary=50)


def test_what_stays() -> None:
    for kind, reasons in (("broadcast", ["add_layer_norm: one side of the sum is broadcast"] * 2), ("alpha", [])):
        inner, call = _program(kind)
        record = FuseAddNorm().run(program_from(call, inner), PassContext())
        assert record.matched == 0
        assert [r.reason for r in record.rejected] == reasons
