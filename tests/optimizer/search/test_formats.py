"""The whole search on tiny models: budgets are kept, what comes out can be repeated, and failures say how near."""

from __future__ import annotations

from typing import Any

import pytest

from enginewright.optimizer.pipeline.pipeline import default_pipeline
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
from enginewright.passes.framework.weight_formats import Method, WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import RecipeError, VerificationError
from enginewright.runtime.shared.progress import ProgressEvent, silent
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
    candidates: tuple[WeightFormat, ...] = (INT4, OFFSETS, INT8, BF16),
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
    return FormatSearch(Task(program, recipe, 200_000, SEEN, checks, context, on_progress)).run()


def kl_of(family: str, choice: Found[AutoReport], **overrides: Any) -> float:
    """Measures the resolved recipe anew."""
    program = before_formats(family, **overrides)
    names = [p.name for p in default_pipeline()]
    passes = default_pipeline()[names.index("choose_formats") :]
    context = PassContext(calibration=tuple(SEEN), formats=choice.recipe.weights)
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
    found = [search(program, (INT4, BF16), max_bytes=b).report for b in budgets]
    for report, budget in zip(found, budgets, strict=True):
        assert 0.8 * budget < report.chosen.bytes <= budget
    assert found[1].measured_kl["held-out tokens"] < found[0].measured_kl["held-out tokens"]


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


def test_there_must_be_something_to_choose() -> None:
    with pytest.raises(RecipeError, match="no weight of this model can have more than one"):
        search(captured("Llama"), (BF16, BF16), max_kl=0.01)
