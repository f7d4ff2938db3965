"""The expected times of steps: from past steps, from a plan, and from measurements by rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.base import Chunk
from enginewright.runtime.scheduler.step_times import _ROW, DecodeTimes, StepSize, StepTimes, planned_steps
from enginewright.runtime.shared.errors import RequestError


def true_seconds(size: StepSize) -> float:
    return 4e-3 + 5e-4 * size.rows + 4e-4 * size.prompt + 1e-6 * size.context + 1e-7 * size.products


def random_size(rng: np.random.Generator) -> StepSize:
    rows, prompt = int(rng.integers(0, 33)), int(rng.integers(0, 512)) * int(rng.integers(2))
    return StepSize(rows or 1, prompt, rows * int(rng.integers(20, 2000)), prompt * prompt // 2)


def measured(costs: StepTimes, steps: int, noise: float, factor: float = 1.0) -> StepTimes:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        size = random_size(rng)
        costs.observe(size, factor * true_seconds(size) * (1 + noise * rng.standard_normal()))
    return costs


def errors(costs: StepTimes, factor: float = 1.0) -> list[float]:
    rng = np.random.default_rng(1)
    sizes = [random_size(rng) for _ in range(200)]
    return [abs(costs.seconds(size) / (factor * true_seconds(size)) - 1) for size in sizes]


def test_the_size_of_a_step() -> None:
    def chunk(start: int, count: int) -> Chunk:
        return Chunk(Generation(range(start + count), SamplingParams()), start, count)

    assert StepSize.from_chunks([chunk(9, 1), chunk(4, 1), chunk(10, 5)]) == StepSize(2, 5, 15, 62)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_are_predicted_from_those_before(noise: float) -> None:
    costs = StepTimes()
    assert not costs.known
    apart = errors(measured(costs, 400, noise))
    assert max(apart) < 0.01 + 1.5 * noise, "a size's own mean, of 8 steps or more, has a third of the noise"
    assert sum(apart) / len(apart) < 0.01 + 0.4 * noise
    assert costs.known


def test_a_machine_that_gets_slower_is_noticed() -> None:
    costs = measured(measured(StepTimes(), 400, 0.05), 2000, 0.05, factor=2)
    apart = errors(costs, factor=2)
    assert max(apart) < 0.2 and sum(apart) / len(apart) < 0.05


def test_a_size_that_lies_off_the_line_is_known() -> None:
    """Kernels for 16 rows and more are other ones: such steps take 40 % less here."""

    def uneven(size: StepSize) -> float:
        return true_seconds(size) * (0.6 if size.rows >= 16 else 1.0)

    rng, costs = np.random.default_rng(0), StepTimes()
    for _ in range(600):
        rows = int(rng.integers(1, 32))
        size = StepSize(rows, 0, rows * 100)
        costs.observe(size, uneven(size))
    apart = [abs(costs.seconds(StepSize(n, 0, n * 100)) / uneven(StepSize(n, 0, n * 100)) - 1) for n in range(1, 32)]
    assert sum(apart) / len(apart) < 0.08


def test_a_slow_first_step_is_forgotten() -> None:
    costs = StepTimes()
    for prompt in (100, 200, 400):
        for i in range(5):
            costs.observe(StepSize(0, prompt), (1 if i else 20) * true_seconds(StepSize(0, prompt)))
            costs.observe(StepSize(4, 0, 400), true_seconds(StepSize(4, 0, 400)))
    assert costs.seconds(StepSize(0, 300)) == pytest.approx(true_seconds(StepSize(0, 300)), rel=0.3)


def test_a_step_that_another_process_held_up_counts_little() -> None:
    costs = measured(StepTimes(), 400, 0.0)
    for _ in range(8):
        costs.observe(StepSize(8, 0, 800), 10.0)
    assert costs.seconds(StepSize(8, 0, 800)) < 5 * true_seconds(StepSize(8, 0, 800))


def test_what_fits_into_a_step() -> None:
    costs = measured(StepTimes(), 400, 0.0)
    prompt = costs.prompt_within(0.05, 8, 800)
    assert costs.seconds(StepSize(8, prompt, 800)) == pytest.approx(0.05, rel=0.02)
    assert costs.prompt_within(0.001, 8, 800) == 0
    rows = costs.rows_within(0.02, 100)
    assert (
        costs.seconds(StepSize(rows, 0, 100 * rows)) <= 0.0201 < costs.seconds(StepSize(rows + 2, 0, 100 * rows + 200))
    )
    assert costs.rows_within(0.0, 100) == 1
    assert costs.row_tokens == pytest.approx(1.25, rel=0.1)
    assert StepTimes().row_tokens == 2


def plan_of(steps: list[dict[str, float]], recipes: int = 1) -> str:
    plans = [{"device": "cpu", "recipes": [f"r{i}"], "steps": steps} for i in range(recipes)]
    return json.dumps({"format_version": 1, "plans": [*plans, {"device": "h100", "recipes": ["f32"], "steps": []}]})


GRID = [(r, p, c) for r in (1, 4, 16) for c in (128, 2048) for p in (0, 64, 512)]


def test_a_pipe_in_place_of_a_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")  # nobody writes into it
    with pytest.raises(RequestError, match=r"scheduling: plan: plan.json: it is a pipe, not a regular file"):
        planned_steps(tmp_path / "plan.json")


def test_a_plan_s_steps(tmp_path: Path) -> None:
    steps = [
        {"rows": r, "prompt": p, "context": c, "seconds": true_seconds(StepSize(r, p, r * c, p * p / 2))}
        for r, p, c in GRID
    ]
    (tmp_path / "plan.json").write_text(plan_of(steps))
    costs = StepTimes()
    costs.begin_with(tmp_path / "plan.json")
    assert costs.known and max(errors(costs)) < 0.05
    assert len(planned_steps(tmp_path / "plan.json")) == 18


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "plan.json: No such file"),
        ("{", "isn't a plan with steps"),
        ('{"plans": [{"device": "cpu", "recipes": ["f32"]}]}', "isn't a plan with steps: KeyError"),
        (plan_of([]), "steps of 1 programs"),
        (plan_of([{"rows": 1, "prompt": 0, "context": 9, "seconds": 1.0}], 2), "steps of 2 programs"),
        (plan_of([{"rows": 1, "prompt": 0, "context": 9, "seconds": float("nan")}]), "times that are wrong"),
        (plan_of([{"rows": 1, "prompt": 0, "context": 9, "seconds": -1.0}]), "times that are wrong"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RequestError, match=f"^scheduling: plan: .*{message}"):
        planned_steps(tmp_path / "plan.json")


def test_costs_are_those_that_were_measured() -> None:
    costs = DecodeTimes()
    assert costs.seconds(1) == 1 < costs.seconds(2) < costs.seconds(16) and not costs.describe()
    for seconds in (*[2.0] * 12, 50.0):  # another program ran once
        costs.took(1, seconds)
    assert costs.seconds(1) == pytest.approx(2, rel=0.3)
    assert costs.seconds(16) / costs.seconds(1) == pytest.approx(1 + 15 * _ROW, rel=0.1)
    for i in range(200):
        costs.took(1 + i % 3, 2 + 0.5 * (i % 3))
    assert costs.seconds(1) == pytest.approx(2, rel=0.1) and costs.seconds(3) == pytest.approx(3, rel=0.1)
    for i in range(800):  # the machine has become slower
        costs.took(1 + i % 3, 4 + 0.1 * (i % 3))
    assert costs.seconds(1) == pytest.approx(4, rel=0.05) and costs.seconds(3) == pytest.approx(4.2, rel=0.1)
    for i in range(100):
        costs.took(1 + i % 4, 4 - 0.5 * (i % 4))
    assert costs.seconds(16) > 0 and costs.describe()["row_us"] == 0
    for i in range(200):  # two rows cost as much as one, and four as three
        costs.took(1 + i % 4, 2 + i % 4 // 2)
    assert [costs.seconds(rows) for rows in (1, 2, 3, 4)] == pytest.approx([2, 2, 3, 3], rel=0.1)


@pytest.mark.parametrize(("first", "later"), [(50.0, 1.0), (1.0, 0.6), (1.0, 1.6)])
def test_steps_of_more_rows_follow_those_that_are_seen(first: float, later: float) -> None:
    """The first step of a process is slow, or the machine becomes faster or slower: rows seem neither dear nor free."""
    costs = DecodeTimes()
    for i in range(200):
        costs.took(8, first if i == 0 else 1.0 if i < 100 else later)
        if i >= 20:
            assert [costs.seconds(rows) / costs.seconds(8) for rows in (9, 16)] == pytest.approx([1.05, 1.38], rel=0.08)


def test_costs_begin_with_what_was_measured() -> None:
    """By context; the machine may be slower now than it was then."""
    short, long = [1.0] * 8 + [1.5] * 8, [2.0] * 8 + [4.0] * 8
    costs = DecodeTimes({1000: long, 200: short, 5000: [1.0]})
    assert [costs.seconds(rows) for rows in (1, 8, 9, 16)] == [1, 1, 1.5, 1.5] and not costs.describe()
    costs.at(600)
    assert [costs.seconds(rows) for rows in (8, 9)] == [1.5, 2.75]
    costs.at(9000)
    assert [costs.seconds(rows) for rows in (8, 9)] == [2, 4]
    for _ in range(40):
        costs.took(1, 3.0)
    assert (costs.seconds(1), costs.seconds(16)) == pytest.approx((3, 6), rel=0.05)
    costs.at(0)
    assert (costs.seconds(1), costs.seconds(16)) == pytest.approx((1.5, 2.25), rel=0.05)


KINDS = {
    "decodes": lambda rng: StepSize(rows := int(rng.integers(1, 33)), 0, rows * int(rng.integers(1, 4000))),
    "prompts": lambda rng: StepSize(0, prompt := int(rng.integers(2, 2048)), 0, prompt * prompt // 2),
    "both": random_size,
    "one size": lambda rng: StepSize(4, 0, 400),
}
"""Steps of a history, drawn with a generator."""
TIMES = {
    "linear": lambda rng, size: true_seconds(size),
    "through the origin": lambda rng, size: 1e-5 * size.prompt + 1e-4 * size.rows + 1e-12 * size.products,
    "quadratic": lambda rng, size: 1e-9 * size.products + 1e-3 * size.rows,
    "stepped": lambda rng, size: 2e-3 * (1 + (size.rows + size.prompt) // 16),
    "noisy": lambda rng, size: true_seconds(size) * float(rng.lognormal(0, 2)),
    "constant": lambda rng, size: 1e-3,
    "falling": lambda rng, size: 1 / (1 + size.rows + size.prompt),
    "clock that stands": lambda rng, size: 0.0,
    "tiny or huge": lambda rng, size: float(rng.choice([1e-320, 1e-9, 1.0, 1e9, 1e308])),
    "no times": lambda rng, size: float(rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e-3])),
}
"""Times of these steps."""
ASKED = [StepSize(r, p, 100 * r, p * p / 2, s) for r in (0, 1, 7, 64) for p in (0, 1, 600) for s in (1, 9)]


def is_time(value: float) -> bool:
    return 0 < value < float("inf")


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_history_gives_an_estimate_that_is_no_time(kind: str, times: str) -> None:
    """Also not for kinds of steps that the history has none of, and not when these come after it."""
    for seed in range(6):
        rng, costs = np.random.default_rng([seed, *kind.encode(), *times.encode()]), StepTimes()
        kinds = [kind] * int(rng.integers(1, 60)) + [str(rng.choice(list(KINDS))) for _ in range(40)]
        for each in kinds:
            size = KINDS[each](rng)
            costs.observe(size, TIMES[times](rng, size))
            assert is_time(costs.seconds(size))
        assert all(is_time(costs.seconds(size)) for size in ASKED)
        assert is_time(costs.row_tokens) and all(0 <= value < float("inf") for value in costs.describe().values())
        for seconds, rows in ((1e-9, 0), (0.05, 8), (10.0, 64)):
            assert costs.prompt_within(seconds, rows, 100.0 * rows) >= 0 and costs.rows_within(seconds, 100.0) >= 1


@pytest.mark.parametrize("times", TIMES)
def test_no_history_of_decodes_gives_an_estimate_that_is_no_time(times: str) -> None:
    for seed in range(6):
        rng = np.random.default_rng([seed, *times.encode()])
        costs = DecodeTimes({100: [1e-3] * 16, 900: [float(rng.choice([0.0, 1e-3, float("nan")]))] * 16})
        for _ in range(80):
            rows = int(rng.integers(1, 17))
            costs.at(float(rng.integers(0, 1000)))
            costs.took(rows, TIMES[times](rng, StepSize(rows, 0, 100 * rows)))
            assert all(is_time(costs.seconds(rows)) for rows in range(40))
        assert all(0 <= value < float("inf") for value in costs.describe().values())


def test_decodes_after_prompts_alone_are_learnt() -> None:
    """The first fit knows no decoding step, and predicts nothing for one: the first one is fitted at once."""
    rng, costs = np.random.default_rng(0), StepTimes()
    for _ in range(13):
        size = KINDS["prompts"](rng)
        costs.observe(size, 1e-5 * size.prompt)
    costs.observe(StepSize(1, 0, 100), 2e-3)
    assert costs.seconds(StepSize(1, 0, 100)) == pytest.approx(2e-3, rel=0.1)
