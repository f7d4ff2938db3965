"""The ops of routers, lowered and run by the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.passes.lowering.lowered import check, features, ops
from tests.passes.small_programs import program_from

ew = torch.ops.ew
Inputs = dict[str, torch.Tensor]
INFINITE = float("-inf")


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """The best two of three groups of two, as routers limit their choice to groups."""
    best = x.view(-1, 3, 2).topk(1, dim=-1)[0].sum(-1).topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(x[:, :3]).scatter(1, best, 1).unsqueeze(-1).expand(-1, 3, 2).reshape(-1, 6)
    return x.masked_fill(~mask.bool(), INFINITE).softmax(-1)


def _mixer(x: torch.Tensor) -> torch.Tensor:
    """The second best, after the best is struck out, and what is far from it masked."""
    best, place = x.max(dim=-1, keepdim=True)
    struck = x.scatter(-1, place, INFINITE)
    best, place = struck.max(dim=-1, keepdim=True)
    far = ((best - x) / x.abs().clamp(min=best)) > 0.5
    return struck.masked_fill(far, INFINITE).softmax(-1).gather(-1, place).expand(-1, 6)


CALLS: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x.softmax(-1), "reduce"),
    (lambda x: x.view(-1, 2, 3).softmax(2).view(-1, 6), "reduce"),
    (lambda x: torch.cat([x.topk(4, -1)[0], x.topk(2, -1)[1].float()], -1), "top_k"),
    (lambda x: x.view(-1, 2, 3).topk(2, -1)[0].flatten(1), "top_k"),
    (lambda x: x[:, ::2].topk(2, dim=1)[0], "top_k"),
    (lambda x: x.max(-1)[0][:, None] - x.max(-1, keepdim=True)[1].float(), "top_k"),
    (lambda x: x.gather(1, (x * 2).topk(3, -1)[1]), "gather"),
    (lambda x: x.topk(6, -1)[1].gather(1, x.topk(2, -1)[1]).float(), "gather"),
    (lambda x: x.scatter(1, x.topk(3, -1)[1], 7.5), "scatter"),
    (lambda x: x.scatter(1, x.topk(3, -1)[1], INFINITE).softmax(-1), "elementwise:where"),
    (lambda x: torch.where((x > 0.3) & ~(x >= 1.0) | (x < -2), x, -x), "elementwise:logical_and"),
    (lambda x: torch.where(x.eq(x.amax(-1, keepdim=True)), x, 0.5 * x) + (x != x.abs()).float(), "elementwise:ne"),
    (lambda x: (x.topk(3, -1)[1] > 2).float() + x[:, :1].topk(1, -1)[1].le(x.topk(3, -1)[1]).float(), "elementwise:gt"),
    (lambda x: (x * 0).bool().float() + x.bool().float(), "elementwise:ne"),
    (lambda x: torch.full_like(x, 2.5) + torch.ones_like(x) * x, "elementwise:add"),
    (_grouped, "scatter"),
    (_mixer, "gather"),
]


@pytest.mark.parametrize("which", range(len(CALLS)))
def test_ops_of_routers(which: int) -> None:
    call, op = CALLS[which]
    program = program_from(lambda _, i: ew.take_rows(call(features(i)), i["rows"]))
    # Sums and exponentials of a few numbers, in other code of torch.
    assert op in ops(check(program, atol=1e-6))


def test_rows_of_integers_are_taken() -> None:
    def call(_: torch.nn.Module, i: Inputs) -> torch.Tensor:
        return ew.take_rows(features(i).topk(3, -1)[1], i["rows"]).float()

    check(program_from(call))


def test_large_integers_are_compared_as_such() -> None:
    def call(_: torch.nn.Module, i: Inputs) -> torch.Tensor:
        large = (i["ids"] + (1 << 24))[:, None]
        return ew.take_rows(torch.cat([large.eq(large + 1).float(), large.gt(1 << 24).float()], -1), i["rows"])

    program = check(program_from(call))
    assert {o.dtype for s in program.steps if s.attrs.get("fn") in ("eq", "gt") for o in s.inputs} == {"i32"}


REFUSED: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x.topk(2, -1, largest=False)[0], "k least"),
    (lambda x: x.view(-1, 2, 3).topk(1, 1)[0].flatten(1), "last dimension"),
    (lambda x: x.view(-1, 2, 3).softmax(1).flatten(1), "last dimension"),
    (lambda x: torch.bitwise_not(x.topk(2, -1)[1]).float(), "conditions alone"),
    (lambda x: x.topk(2, -1)[1].masked_fill(x[:, :2] > 0, 3).float(), "floats alone"),
    (lambda x: torch.zeros_like(x.topk(2, -1)[1]).float(), "floats alone"),
]


@pytest.mark.parametrize("which", range(len(REFUSED)))
def test_what_the_kernels_lack_is_refused(which: int) -> None:
    call, reason = REFUSED[which]
    program = program_from(lambda _, i: ew.take_rows(call(features(i)), i["rows"]))
    with pytest.raises(UnsupportedModelError, match=reason):
        lower_program(program)
