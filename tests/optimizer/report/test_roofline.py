from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.report import roofline
from enginewright.optimizer.report.roofline import measure, predict
from enginewright.plugins.cpu.compile.machine import Machine, limit_seconds, multiply_seconds
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import ProgressEvent
from enginewright.runtime.shared.step_costs import StepCost, step_costs

MACHINE = Machine("avx2", 2, bandwidth=1e9, peaks={"f32": 1e10, "i8": 4e10})


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (StepCost(weights=10**9, kv_read=10**8, products={"f32": 10}), 1.1),
        (StepCost(weights=10, activations_read=10**9, products={"f32": 2 * 10**10}), 2.0),
        (StepCost(weights=10, products={"f32": 10**10, "i8": 10**10}), 1.25),
        (StepCost(activations_written=10**9), 0.0),
    ],
)
def test_the_limit_is_the_slower_of_memory_and_products(cost: StepCost, seconds: float) -> None:
    assert limit_seconds(cost, MACHINE) == pytest.approx(seconds)
    assert multiply_seconds(cost, MACHINE) <= seconds


def test_predicted_alone(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    predicted = predict(bundle)
    assert (predicted.target, predicted.measured, predicted.machine) == ("cpu", None, None)
    decode, batch, prompt = predicted.shapes
    assert [(s.tokens, s.requests, s.context) for s in predicted.shapes] == [(1, 1, 512), (8, 8, 512), (512, 1, 512)]
    program = bundle.program("cpu")
    for shape in predicted.shapes:
        assert [s.cost for s in shape.steps] == step_costs(program, shape.sizes)
        assert [(s.op, s.where) for s in shape.steps] == [(s.op, s.where) for s in program.steps]
        assert all(s.seconds is None for s in shape.steps)
    assert batch.cost.kv_read == 8 * decode.cost.kv_read
    assert batch.cost.multiply_adds == 8 * decode.cost.multiply_adds
    assert decode.cost.weights < batch.cost.weights < 2 * decode.cost.weights  # but for the embedding's rows the same
    assert prompt.cost.kv_written == 512 * decode.cost.kv_written


def test_measured(tiny_bundle: Path) -> None:
    events: list[ProgressEvent] = []
    result = measure(Bundle.open(tiny_bundle), seconds=1.0, measured="report", threads=1, progress=events.append)
    assert result.measured == "report"
    assert result.machine is not None
    assert result.machine.threads == 1
    for shape in result.shapes:
        assert shape.runs > 0
        assert shape.omitted is None
        times = [s.seconds for s in shape.steps]
        assert all(t is not None and t >= 0 for t in times)
        assert shape.seconds == pytest.approx(sum(t for t in times if t is not None))
    assert {e.stage for e in events} == {"roofline"}
    assert events[-1].done == events[-1].total == 3


def test_limits_are_measured_before_and_after_over_what_a_step_reads(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit measured before the steps on a busy machine must not limit steps that were fast."""
    working_sets: list[int] = []

    def measured(isa: str, threads: int, types: set[str], working_set: int) -> Machine:
        working_sets.append(working_set)
        return Machine(isa, threads, 1e9 * len(working_sets), dict.fromkeys(types, 1e12 / len(working_sets)))

    monkeypatch.setattr(roofline, "measure_machine", measured)
    bundle = Bundle.open(tiny_bundle)
    result = measure(bundle, seconds=0.1, measured="report", threads=1)
    assert working_sets == [predict(bundle).shapes[0].cost.memory] * 2
    assert result.machine is not None
    assert (result.machine.bandwidth, result.machine.peaks) == (2e9, {"f32": 1e12})


def test_a_budget_too_small_for_a_prompt_makes_it_shorter(tiny_bundle: Path) -> None:
    result = measure(Bundle.open(tiny_bundle), seconds=1e-4, measured="report", threads=1)
    assert result.shapes[-1].tokens < 512
    assert result.shapes[-1].name == f"prompt of {result.shapes[-1].tokens}"


def test_what_takes_too_long_is_left_out_and_says_so(tiny_bundle: Path) -> None:
    result = measure(Bundle.open(tiny_bundle), seconds=1e-9, measured="report", threads=1)
    for shape in result.shapes:
        assert (shape.runs, shape.seconds) == (0, None)
        assert shape.omitted is not None
        assert "at least" in shape.omitted
