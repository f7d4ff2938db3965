"""The whole search on tiny models: budgets are kept, what comes out can be repeated, and failures say how near."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.plan import token_clock
from enginewright.optimizer.plan.programs import planning_of
from enginewright.optimizer.plan.token_clock import TokenClock
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import AutoSection, BudgetSection
from enginewright.optimizer.search.format_units import find_units
from enginewright.optimizer.search.formats import FormatSearch
from enginewright.optimizer.search.measure_choices import Check
from enginewright.optimizer.search.report import AutoReport
from enginewright.optimizer.search.search import ROUNDS, Found, Task
from enginewright.optimizer.verify.measuring_tokens import MeasuringTokens
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import Method, WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.plugins.steps.planning import Device, PlannedSteps, StepSeconds
from enginewright.runtime.shared.errors import RecipeError, VerificationError
from enginewright.runtime.shared.progress import ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes
from tests.optimizer.search.formats_prepared import before_formats, random_tokens
from tests.passes.captured import captured

INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
OFFSETS = INT4.model_copy(update={"zero_point": True})
INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
BF16 = WeightFormat(storage="bf16", activation="bf16")
F32 = WeightFormat()
SEEN, CHECKED = random_tokens(40, 33), random_tokens(50, 30, seed=1)


def search(
    program: Program,
    candidates: tuple[WeightFormat, ...] | None = (INT4, OFFSETS, INT8, BF16),
    *,
    method: Method = "nearest",
    events: list[ProgressEvent] | None = None,
    **budget: Any,
) -> Found[AutoReport]:
    recipe = Recipe(
        name="mine",
        weights=WeightFormats(method=method),
        budget=BudgetSection(**budget),
        auto=AutoSection(candidates=candidates),
    )
    checks = [MeasuringTokens(tuple(CHECKED), "held-out tokens")]
    context = PassContext(calibration=tuple(SEEN))
    on_progress = silent if events is None else events.append
    return FormatSearch(Task(program, recipe, 200_000, SEEN, checks, context, on_progress, TokenClock(recipe))).run()


def kl_of(family: str, choice: Found[AutoReport], **overrides: Any) -> float:
    """Measures the resolved recipe anew."""
    program = before_formats(family, **overrides)
    names = [p.name for p in default_pipeline()]
    passes = default_pipeline()[names.index("choose_formats") :]
    context = PassContext(recipe=PassOptions(weights=choice.recipe.weights), calibration=tuple(SEEN))
    return Check(program, passes, context, {"k": CHECKED}).measure(context)["k"]


@pytest.mark.parametrize(
    ("family", "sizes"), [("Llama", {}), ("Qwen2", {"hidden_size": 128, "intermediate_size": 192})]
)
def test_a_kl_budget_is_met_with_fewer_bytes_than_any_one_format(family: str, sizes: dict[str, int]) -> None:
    program = captured(family, **sizes)
    nodes = len(program.graph.nodes)
    events: list[ProgressEvent] = []
    budget = 0.004  # between what int4 and int8 cost here
    choice = search(program, events=events, max_kl=budget)
    assert len(program.graph.nodes) == nodes, "the program is left as it is"
    report = choice.report
    assert report.chosen.measured_kl == report.measured_kl["held-out tokens"]
    assert report.measured_kl["held-out tokens"] <= budget
    assert kl_of(family, choice, **sizes) == pytest.approx(report.measured_kl["held-out tokens"], rel=1e-3)
    fitting = [p for p in report.single.values() if p.predicted_kl <= budget]
    assert fitting
    assert all(report.chosen.bytes < p.bytes for p in fitting)
    assert 1 <= len(report.tried) <= ROUNDS
    assert [p.bytes for p in report.curve] == sorted((p.bytes for p in report.curve), reverse=True)
    assert {e.stage for e in events} == {"auto"}
    assert (choice.recipe.auto, choice.recipe.name) == (None, "mine")
    formats = {o.format for o in choice.recipe.weights.overrides} | {choice.recipe.weights.default}
    assert len(formats) > 1
    assert {u.format for u in report.units} == {str(f) for f in formats}


def test_what_is_within_the_budget_is_taken_if_nothing_leaves_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "measure", lambda self, context: {"k": 0.0098})
    report = search(captured("Llama"), max_kl=0.01).report
    assert report.chosen.measured_kl == 0.0098
    assert report.chosen.bytes == min(p.bytes for p in report.tried)


def test_a_size_is_kept_with_the_least_kl() -> None:
    program = captured("Llama")
    units = find_units(before_formats("Llama"), [INT4, BF16])
    sizes = [sum(u.sizes[i] for u in units) for i in (0, 1)]
    budgets = [sizes[0] + share * (sizes[1] - sizes[0]) // 10 for share in (4, 8)]
    reports = [search(program, (INT4, BF16), max_bytes=b).report for b in budgets]
    for report, budget in zip(reports, budgets, strict=True):
        assert 0.8 * budget < report.chosen.bytes <= budget
    assert reports[1].measured_kl["held-out tokens"] < reports[0].measured_kl["held-out tokens"]


def test_the_integers_are_chosen_as_they_will_be() -> None:
    choice = search(captured("Llama"), (INT4, INT8), method="awq", max_kl=0.01)
    assert choice.recipe.weights.method == "awq"
    assert kl_of("Llama", choice) == pytest.approx(choice.report.measured_kl["held-out tokens"], rel=1e-3)


def test_without_4_bits_there_are_no_integers_to_choose() -> None:
    choice = search(captured("Llama"), (INT4, F32), method="awq", max_kl=1e-6)
    assert choice.recipe.weights == WeightFormats()  # 32-bit floats throughout
    assert choice.report.measured_kl["held-out tokens"] == 0


def test_a_budget_that_nothing_meets_says_how_near_it_came() -> None:
    with pytest.raises(VerificationError, match=r"within max_kl = 1e-07: .* KL is .* on held-out tokens, in \d") as kl:
        search(captured("Llama"), max_kl=1e-7)
    assert kl.value.hint is not None
    with pytest.raises(VerificationError, match=r"within max_bytes = 1,000: the smallest takes \d"):
        search(captured("Llama"), max_bytes=1000)
    with pytest.raises(VerificationError, match=r"within both max_kl = 0.001 and max_bytes = 60,000: \d"):
        search(captured("Llama"), max_kl=0.001, max_bytes=60_000)


def by_bytes(monkeypatch: pytest.MonkeyPatch, of_mixed: float = 1.0) -> None:
    """Steps take a microsecond for each byte of weights that they read; ``of_mixed`` times that once formats differ."""

    def timed(planned: PlannedSteps, device: Device, sizes: StepSizes) -> StepSeconds:
        uses = {use.name: use for use in planned.steps.program.weights}
        slower = of_mixed if len({use.dtype for use in uses.values() if use.dtype != "f16"} - {"f32"}) > 1 else 1.0
        read = (
            sum(stored_bytes(uses[o.name]) for o in s.inputs if o.kind == "weight") for s in planned.steps.program.steps
        )
        return StepSeconds(tuple(1e-6 * slower * n for n in read), 0.0)

    real = planning_of("cpu")
    assert real is not None
    monkeypatch.setattr(token_clock, "planning_of", lambda target: replace(real, timed=timed))


def test_a_time_is_kept_with_the_least_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    by_bytes(monkeypatch)
    program = captured("Llama")
    reports = [search(program, (INT4, INT8, BF16), max_ms_per_token=ms).report for ms in (70.0, 100.0)]
    for report, most in zip(reports, (70.0, 100.0), strict=True):
        assert report.time is not None
        assert 0.85 * most < report.time.timed <= most
        assert report.time.predicted == pytest.approx(report.time.timed, rel=0.02)
        keeping = [p for p in report.single.values() if p.ms_per_token is not None and p.ms_per_token <= most]
        assert keeping and report.chosen.predicted_kl <= min(p.predicted_kl for p in keeping)
    assert reports[1].chosen.predicted_kl < reports[0].chosen.predicted_kl


def test_a_time_and_a_size_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    by_bytes(monkeypatch)
    report = search(captured("Llama"), (INT4, INT8, BF16), max_ms_per_token=100.0, max_bytes=75_000).report
    assert report.time is not None and report.time.timed <= 100.0
    assert report.chosen.bytes <= 75_000


def test_times_that_are_off_are_corrected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    by_bytes(monkeypatch, of_mixed=1.3)
    report = search(captured("Llama"), (INT4, INT8, BF16), max_ms_per_token=100.0).report
    assert report.time is not None
    assert report.time.timed <= 110.0
    assert report.time.predicted == pytest.approx(report.time.timed, rel=0.05)


def test_a_time_that_nothing_keeps_says_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    by_bytes(monkeypatch)
    with pytest.raises(VerificationError, match=r"max_ms_per_token = 1 on this machine: the fastest takes \d") as e:
        search(captured("Llama"), max_ms_per_token=1.0)
    assert "max_ms_per_token" in str(e.value.hint)
    with pytest.raises(
        VerificationError, match=r"within both max_ms_per_token = 100 and max_bytes = 1,000: the smallest"
    ):
        search(captured("Llama"), max_ms_per_token=100.0, max_bytes=1000)
    with pytest.raises(VerificationError, match=r"within both max_ms_per_token = 100 and max_kl = 1e-09"):
        search(captured("Llama"), max_ms_per_token=100.0, max_kl=1e-9)


def test_without_candidates_every_format_is_one() -> None:
    program = captured("Llama")
    few = search(program, max_bytes=75_000).report
    every = search(program, None, max_bytes=75_000).report
    assert len(every.single) > 10
    assert every.chosen.bytes <= 75_000
    assert every.chosen.predicted_kl < few.chosen.predicted_kl


def test_there_must_be_something_to_choose() -> None:
    with pytest.raises(RecipeError, match="no weight of this model can have more than one"):
        search(captured("Llama"), (BF16, BF16), max_kl=0.01)
