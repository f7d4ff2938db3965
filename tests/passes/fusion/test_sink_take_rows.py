from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_add_norm import FuseAddNorm
from enginewright.passes.fusion.sink_take_rows import SinkTakeRows
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from tests.passes.small_programs import (
    Linear,
    Shape,
    captured_programs,
    decoder,
    evaluate,
    program_from,
    random_sequences,
    whole_inputs,
)

aten, ew = torch.ops.aten, torch.ops.ew
Call = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def check(before: Program, after: Program, vocabulary: int = 67) -> None:
    for lengths, rows in (((5, 1, 17), None), ((33,), [4, 32, 0]), ((2, 2), [])):
        inputs = whole_inputs(random_sequences(lengths, vocabulary), rows)
        # Products of fewer rows may be blocked in another way by BLAS: float32 rounding of logits of size 10.
        torch.testing.assert_close(evaluate(after, inputs), evaluate(before, inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", list(captured_programs()))
def test_numbers(name: str) -> None:
    before = decoder(captured_programs()[name])
    after = before.copy()
    assert SinkTakeRows().run(after, PassContext()).matched > 8
    check(before, after)
    FuseAddNorm().run(after, PassContext())
    check(before, after)


def test_the_last_block_runs_for_sampled_rows_alone() -> None:
    program = decoder(Shape(windows=(0, 0)))
    record = SinkTakeRows().run(program, PassContext())
    rows = {
        n.meta["where"][0]: str(program.shape(n)[0]) for n in program.nodes_of(ew.linear.default, ew.rms_norm.default)
    }
    sampled = {where for where, size in rows.items() if size == "R"}
    assert sampled == {
        "",  # the logits
        "norm",
        *(f"layers.1.{x}" for x in ("o_proj", "post_norm", "gate_proj", "up_proj", "down_proj")),
    }
    takes = program.nodes_of(ew.take_rows.default)
    assert {t.args[0].target for t in takes} == {ew.attention.default, aten.add.Tensor}, "attention and the residual"
    assert sorted(r.reason for r in record.rejected) == sorted(
        [
            next(r.reason for r in record.rejected if "is needed for all tokens" in r.reason),
            "ew.attention.default mixes tokens, or makes them",
        ]
    )


def features(i: dict[str, torch.Tensor], width: int = 8) -> torch.Tensor:
    """[T, width], where rows differ and attention, which nothing sinks through, has made them."""
    x = (i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.4 for j in range(width)])).view(-1, 2, width // 2)
    return ew.attention(x, x, x, i["q_start"], 0, 0.5, 0, 0.0, None).flatten(1)


def _views(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i).view(-1, 2, 4).transpose(1, 2)[:, 1:, :].unsqueeze(1)
    x = torch.cat((x.squeeze(1).reshape(-1, 6), x.mean((1, 2))), -1)
    return ew.take_rows(x * x.sum(-1, keepdim=True).expand(-1, 8), i["rows"])


def _softcap(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    return ew.take_rows(torch.tanh(m.head(features(i)) / 3.0) * 3.0 + torch.tensor([0.5] * 8), i["rows"])


@pytest.mark.parametrize("call", [_views, _softcap])
def test_goes_up_to_attention(call: Call) -> None:
    inner = torch.nn.Module()
    inner.head = Linear(8, 8)
    before = program_from(call, inner)
    after = before.copy()
    SinkTakeRows().run(after, PassContext())
    (take,) = after.nodes_of(ew.take_rows.default)
    assert take.args[0].target is ew.attention.default
    check(before, after)


def _flips(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    return ew.take_rows(features(i).flip(0), i["rows"])


def _mean_over_tokens(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    return ew.take_rows(features(i) - features(i).mean(0, keepdim=True), i["rows"])


def _splits_rows(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    return ew.take_rows(features(i).view(-1, 4), i["rows"])


@pytest.mark.parametrize("call", [_flips, _splits_rows])
def test_stops_where_tokens_mix(call: Call) -> None:
    before = program_from(call)
    after = before.copy()
    record = SinkTakeRows().run(after, PassContext())
    assert record.matched == 0
    assert [r.reason.endswith("mixes tokens, or makes them") for r in record.rejected] == [True]


@pytest.mark.parametrize("size", [64, 4096])
def test_rows_of_several_tensors_are_taken_of_all_or_none(size: int) -> None:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(features(i).gather(1, i["ids"][:, None] % 8), i["rows"])

    assert SinkTakeRows().run(program_from(call), PassContext()).matched > 0
    program = program_from(call)
    (gather,) = program.nodes_of(aten.gather.default)
    # Of a table with rows of its own, row t of the result is of row t: gather reads the first T.
    table = Source("table", (size, 8), torch.float32, lambda: torch.zeros(size, 8))
    gather.args = (program.weight("table", table), *gather.args[1:])
    result = SinkTakeRows().call(program, PassContext())
    assert result.matched == 0
    assert result.rejected[0].reason == "aten.gather.default mixes tokens, or makes them"


def test_a_mean_over_tokens_is_not_taken_rows_of() -> None:
    before = program_from(_mean_over_tokens)
    after = before.copy()
    SinkTakeRows().run(after, PassContext())
    (mean,) = after.nodes_of(aten.mean.dim)
    assert str(after.shape(mean.args[0])[0]) == "T"
    check(before, after)


def test_stops_where_all_tokens_are_needed() -> None:
    inner = torch.nn.Module()
    inner.head = Linear(8, 8)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.tanh(m.head(features(i)))
        return ew.take_rows(x, i["rows"]) * x.mean(0, keepdim=True)

    program = program_from(call, inner)
    record = SinkTakeRows().run(program, PassContext())
    assert record.matched == 0
    (rejection,) = record.rejected
    assert rejection.reason == "tanh is needed for all tokens"


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Parameter(torch.randn(6, 8))
        self.gate_up, self.down = (torch.nn.Parameter(torch.randn(6, *s) / 9) for s in ((10, 8), (8, 5)))


@pytest.mark.parametrize("whole", [False, True])
def test_sinks_below_experts_and_their_router(whole: bool) -> None:
    """``whole``: the scores are needed for all tokens, so that the choice of experts stays."""

    def call(inner: Router, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = features(i)
        scores = ew.linear(x, inner.router, None).softmax(-1)
        best = scores.topk(2, -1, sorted=False)[1]
        weights = scores.scatter(1, best[:, :1], 0.5).masked_fill(scores < 0.01, 0.0).gather(1, best)
        out = ew.moe(x, best, weights, inner.gate_up, None, inner.down, None, "silu")
        if whole:
            x = ew.attention(*[best.float()[:, None]] * 3, i["q_start"], 1, 0.5, 0, 0.0, None)[:, 0, :1] + x
        return ew.take_rows(out + x, i["rows"])

    before = program_from(call, Router())
    after = before.copy()
    SinkTakeRows().run(after, PassContext())
    check(before, after)
    (experts,) = after.nodes_of(ew.moe.default)
    assert [str(after.shape(a)[0]) for a in experts.args[:3]] == ["R", "R", "R"]
    linear = {str(after.shape(n)[0]) for n in after.nodes_of(ew.linear.default)}
    assert linear == ({"T"} if whole else {"R"})
    if not whole:
        takes = after.nodes_of(ew.take_rows.default)
        assert {t.args[0].target for t in takes} == {ew.attention.default}
