from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest

from enginewright.plugins.cpu.compile import plan as cpu_model
from enginewright.plugins.cpu.compile.machine import Machine
from enginewright.plugins.cpu.compile.plan import Grid, Line, RowTimes, decode, elements, prompt
from enginewright.plugins.cpu.compile.step_probe import Timed
from enginewright.plugins.steps.planning import CountedSteps, StepKind
from enginewright.runtime.shared.step_costs import StepCost, StepSizes

Law = Callable[[StepKind, StepCost, StepSizes], float]


@pytest.fixture
def measured(tiny_steps: CountedSteps, monkeypatch: pytest.MonkeyPatch) -> Callable[[Law, int], cpu_model.CpuModel]:
    """A model of a machine whose kernels take what a law says."""

    def of(law: Law, context: int) -> cpu_model.CpuModel:
        class Probe:
            def __init__(self, steps: CountedSteps, sizes: Sequence[StepSizes], threads: int) -> None:
                assert all(max(s.contexts) <= context for s in sizes)

            def seconds(self, sizes: StepSizes) -> Timed:
                pairs = zip(tiny_steps.kinds, tiny_steps.costs(sizes), strict=True)
                times: dict[Hashable, float] = {kind.key: law(kind, cost, sizes) for kind, cost in pairs}
                return Timed(times, 1e-6)

        nothing = Line(((1, 0.0),))
        monkeypatch.setattr(cpu_model, "StepProbe", Probe)
        monkeypatch.setattr(cpu_model, "sampler_seconds", lambda *args: nothing)
        machine = Machine("", 1, 1e9, {"f32": 1e9})
        monkeypatch.setattr(cpu_model, "measure_machine", lambda *args: machine)
        return cpu_model.measure(tiny_steps, context, lambda requests: 0.0, 1)

    return of


def by_rows_and_keys(kind: StepKind, cost: StepCost, sizes: StepSizes) -> float:
    """A start, and a part by what is written; of attention by requests, tokens and products."""
    if kind.step.op == "paged_attention":
        return 1e-4 + 2e-5 * sum(sizes.lengths) + 3e-9 * cost.multiply_adds
    return 1e-5 + 1e-8 * elements(kind.step, sizes)


@pytest.mark.parametrize(
    "sizes", [decode(1, 64), decode(4, 300), decode(16, 512), decode(50, 2000), prompt(7), prompt(200), prompt(400)]
)
def test_straight_lines_are_met_between_and_beyond(
    sizes: StepSizes, tiny_steps: CountedSteps, measured: Callable[[Law, int], cpu_model.CpuModel]
) -> None:
    pairs = zip(tiny_steps.kinds, tiny_steps.costs(sizes), strict=True)
    expected = sum(kind.count * by_rows_and_keys(kind, cost, sizes) for kind, cost in pairs) + 1e-6 * len(
        tiny_steps.keys
    )
    assert measured(by_rows_and_keys, 8192).seconds(sizes) == pytest.approx(
        expected, rel=1e-6
    )  # a fit of three numbers


def test_a_prompt_beside_decodes_takes_what_both_do(
    tiny_steps: CountedSteps, measured: Callable[[Law, int], cpu_model.CpuModel]
) -> None:
    def attention_alone(kind: StepKind, cost: StepCost, sizes: StepSizes) -> float:
        return 3e-9 * cost.multiply_adds if kind.step.op == "paged_attention" else 0.0

    model = measured(attention_alone, 8192)
    around = 1e-6 * len(tiny_steps.keys)
    both = model.seconds(StepSizes((1, 1, 90), (500, 500, 400))) - around
    parts = model.seconds(decode(2, 500)) + model.seconds(StepSizes((90,), (400,))) - 2 * around
    assert both == pytest.approx(parts, rel=1e-6)


def test_keys_and_values_leave_weights_less_of_the_caches(
    tiny_steps: CountedSteps, measured: Callable[[Law, int], cpu_model.CpuModel]
) -> None:
    def colder(kind: StepKind, cost: StepCost, sizes: StepSizes) -> float:
        if kind.step.op == "paged_attention" or len(sizes.lengths) > 1:
            return 0.0
        return min(tiny_steps.total(sizes).kv_read, tiny_steps.total(decode(1, 4096)).kv_read) * 1e-9

    model = measured(colder, 8192)
    per_step = len(tiny_steps.keys) - 2  # of attention there are two
    for context in (512, 2048, 4096):
        longer = model.seconds(decode(1, context)) - model.seconds(decode(1, 128))
        kv = tiny_steps.total(decode(1, context)).kv_read - tiny_steps.total(decode(1, 128)).kv_read
        assert longer == pytest.approx(kv * 1e-9 * per_step, rel=0.02)  # keys come in whole blocks
    assert model.seconds(decode(1, 8000)) == pytest.approx(model.seconds(decode(1, 4096)), rel=1e-6)


@pytest.mark.parametrize("context", [1, 2, 40, 300, 1024, 100_000])
def test_a_grid_keeps_to_the_context(context: int) -> None:
    grid = Grid.within(context)
    assert all(1 <= n <= c <= context for s in grid.sizes for n, c in zip(s.lengths, s.contexts, strict=True))
    assert len(grid.sizes) == len(set(grid.sizes))
    assert {len(s.lengths) for s in grid.rows} == {1, 2, 3, 5, 7, 9, 13, 18, 24, 32}


def test_lines() -> None:
    line = Line.through([(4, 40.0), (1, 10.0), (2, 30.0), (4, 99.0)])
    assert line.points == ((1, 10.0), (2, 30.0), (4, 40.0))
    assert [line.at(x) for x in (1, 1.5, 2, 3, 4, 6)] == [10, 20, 30, 35, 40, 50]
    assert line.at(-100) == 0
    assert Line(((3, 5.0),)).at(77) == 5


def test_what_is_colder_has_an_end() -> None:
    times = RowTimes(Line(((1, 1.0), (2, 2.0))), Line(((10, 0.0), (20, 5.0))))
    assert times.at(2, 15, 10) == 4.5
    assert times.at(2, 1000, 10) == times.at(2, 20, 10) == 7
    assert times.at(2, 1000, 1000) == 2
