from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.plugins.native.step_profile import StepProfile, sizes_of
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

PROMPT, DECODE = StepSizes((5, 3), (5, 3), 2), StepSizes((1, 1), (6, 40), 2)


@pytest.fixture(scope="module")
def runner(tiny_bundle: Path) -> StepRunner:
    return StepRunner(Bundle.open(tiny_bundle), [PROMPT, DECODE], threads=1)


@pytest.mark.parametrize("sizes", [PROMPT, DECODE])
def test_the_sizes_of_a_step_are_found_again(runner: StepRunner, sizes: StepSizes) -> None:
    assert sizes_of(runner.step(sizes)) == sizes


def test_runs_of_different_sizes_add_up(runner: StepRunner) -> None:
    profile = StepProfile()
    plain = runner.program.run(runner.step(DECODE))
    for sizes in (PROMPT, DECODE, DECODE):
        output = profile.run(runner.program, runner.step(sizes))
    assert output == plain  # neither has tokens nor logits: none were asked for
    steps = runner.lowered.steps
    cost = sum([*step_costs(runner.lowered, PROMPT), *step_costs(runner.lowered, DECODE) * 2], StepCost())
    assert profile.runs == 3
    assert profile.seconds >= profile.kernels > 0
    for totals, key in ((profile.by_op(), "op"), (profile.totals(lambda step: step.where), "where")):
        assert {t.key: t.calls for t in totals} == {
            name: 3 * n for name, n in Counter(getattr(step, key) for step in steps).items()
        }
        assert sum((t.cost for t in totals), StepCost()) == cost
        assert sum(t.seconds for t in totals) == pytest.approx(profile.kernels)
        assert [t.seconds for t in totals] == sorted((t.seconds for t in totals), reverse=True)


def test_given_seconds_are_added(runner: StepRunner) -> None:
    profile = StepProfile()
    seconds = np.arange(len(runner.lowered.steps), dtype=np.float64)
    profile.add(runner.lowered, DECODE, seconds)
    profile.add(runner.lowered, DECODE, seconds, whole=1e6)
    assert profile.kernels == 2 * seconds.sum()
    assert profile.seconds == seconds.sum() + 1e6


def test_a_step_that_fails_is_not_counted(runner: StepRunner) -> None:
    profile, step = StepProfile(), runner.step(DECODE)
    step.ids[0] = -1
    with pytest.raises(RequestError):
        profile.run(runner.program, step)
    assert profile.runs == 0 and profile.by_op() == []
