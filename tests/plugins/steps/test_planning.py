from __future__ import annotations

import pytest

from enginewright.plugins.steps.planning import CountedSteps
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs


def test_every_step_is_of_one_kind(tiny_program: LoweredProgram, tiny_steps: CountedSteps) -> None:
    assert sum(kind.count for kind in tiny_steps.kinds) == len(tiny_program.steps) == len(tiny_steps.keys)
    assert len(tiny_steps.kinds) < len(tiny_program.steps)
    attention = [kind for kind in tiny_steps.kinds if kind.step.op == "paged_attention"]
    assert [kind.count for kind in attention] == [2]  # the layers'
    assert [kind.step for kind in tiny_steps.kinds] == sorted(
        (kind.step for kind in tiny_steps.kinds), key=tiny_program.steps.index
    )


@pytest.mark.parametrize(
    "sizes",
    [StepSizes((1,), (1,)), StepSizes((1, 1, 1), (40, 33, 2)), StepSizes((17,), (17,)), StepSizes((1, 9), (8, 70))],
)
def test_kinds_cost_what_their_steps_do(
    sizes: StepSizes, tiny_program: LoweredProgram, tiny_steps: CountedSteps
) -> None:
    assert tiny_steps.total(sizes) == sum(step_costs(tiny_program, sizes), StepCost())
    one = dict(zip((kind.key for kind in tiny_steps.kinds), tiny_steps.costs(sizes), strict=True))
    assert [one[key] for key in tiny_steps.keys] == step_costs(tiny_program, sizes)


def test_a_weight_of_another_size_is_another_kind(tiny_program: LoweredProgram) -> None:
    largest = max(tiny_program.weights, key=lambda use: use.shape)
    other = largest.model_copy(update={"shape": (*largest.shape[:-1], largest.shape[-1] * 2)})
    weights = tuple(other if use is largest else use for use in tiny_program.weights)
    changed = CountedSteps(tiny_program.model_copy(update={"weights": weights}))
    same = {kind.key for kind in CountedSteps(tiny_program).kinds}
    assert any(kind.key not in same for kind in changed.kinds)
    again = CountedSteps(LoweredProgram.from_json(tiny_program.to_json()))
    assert {kind.key for kind in again.kinds} == same
