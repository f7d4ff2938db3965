"""A program call by call: the numbers of a whole run, from any call on, and with calls replaced."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.fast_evaluation import FastEvaluation
from enginewright.passes.framework.stepwise_evaluation import StepwiseEvaluation
from enginewright.passes.framework.token_sequences import packed_inputs
from tests.passes.captured import normalized

ew = torch.ops.ew
TOKENS = [torch.tensor([5, 9, 200, 31, 7], dtype=torch.int32), torch.tensor([11, 3], dtype=torch.int32)]


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_evaluations_that_branch_off_leave_each_other_alone(family: str) -> None:
    program, _ = normalized(family)
    whole = FastEvaluation(program).evaluate(packed_inputs(program, TOKENS))[0]
    run = StepwiseEvaluation(program, TOKENS, 1 << 20)
    values, most = run.start(), 0
    for at, node in enumerate(run.calls):
        if at % 7 == 0:
            assert torch.equal(run.finish(dict(values), at), whole)
        run.step(node, values)
        most = max(most, len(values))
    assert torch.equal(values[program.logits], whole)
    assert most < len(run.calls) / 2  # what no later call reads is forgotten


@pytest.mark.parametrize("hidden", [64, 128])
def test_a_replaced_call_changes_what_follows_and_nothing_else(hidden: int) -> None:
    program, _ = normalized("Llama", hidden_size=hidden)
    run = StepwiseEvaluation(program, TOKENS, 0)
    linear = program.nodes_of(ew.linear.default)[-2]
    whole = run.finish(run.start())
    halved = run.finish(run.start(), 0, {linear: run.with_argument(linear, 0, lambda x: x / 2)})
    zero = run.finish(
        run.start(),
        0,
        {linear: lambda values: torch.zeros_like(run.fast.compute(linear, *run.arguments(linear, values)))},
    )
    gone = run.finish(run.start(), 0, {linear: run.with_argument(linear, 0, torch.zeros_like)})
    assert not torch.equal(halved, whole) and torch.equal(zero, gone) and not torch.equal(zero, whole)
    assert torch.equal(run.finish(run.start()), whole)


def test_what_is_kept_stays() -> None:
    program, _ = normalized("Llama")
    run = StepwiseEvaluation(program, TOKENS, 0)
    first, values = run.calls[0], run.start()
    for node in run.calls:
        run.step(node, values, keep={first})
    assert set(values) >= {first, program.logits}
