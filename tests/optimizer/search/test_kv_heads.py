"""The search for heads on tiny models: budgets are kept, the cheapest go first, failures say how near they came."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.search.assign import Assignment
from enginewright.optimizer.search.kv_heads import KvHeadSearch, LayerUnit, measure_layers
from enginewright.optimizer.search.report import KvSearchReport
from enginewright.optimizer.search.search import (
    ROUNDS,
    Found,
    NothingToChooseError,
    NothingWithinError,
    Task,
    Tried,
)
from enginewright.optimizer.verify.measuring_tokens import MeasuringTokens
from enginewright.passes.attention.group_kv_heads import GroupKvHeads
from enginewright.passes.attention.kv_sites import Site, find_site
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import KvHeadsOverride, KvMethod, KvOptions
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import mean_kl, packed_inputs
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.progress import ProgressEvent, silent
from tests.optimizer.search.formats_prepared import random_tokens
from tests.optimizer.search.kv_heads_prepared import before_grouping, captured_program, model_with_pairs
from tests.passes.captured import captured

SEEN, CHECKED = random_tokens(40, 56), random_tokens(50, 30, seed=1)
MEANS = {"method": "mean", "grouping": "neighbours"}
"""Takes no fits, and so less time."""

HEAD = (16 + 16) * 4
"""Bytes of a token in one head's cache."""


def search(
    heads: int = 4, hidden: int = 64, events: list[ProgressEvent] | None = None, **budget: Any
) -> Found[KvSearchReport]:
    return choose(captured_program(model_with_pairs(1, heads, hidden)), events, **budget)


def choose(program: Program, events: list[ProgressEvent] | None = None, **budget: Any) -> Found[KvSearchReport]:
    nodes = len(program.graph.nodes)
    recipe = Recipe(name="mine", attention=KvOptions(**budget))
    checks = [MeasuringTokens(tuple(CHECKED), "held-out tokens")]
    on_progress = silent if events is None else events.append
    context = PassContext(calibration=tuple(SEEN))
    result = KvHeadSearch(Task(program, recipe, 200_000, SEEN, checks, context, on_progress)).run()
    assert len(program.graph.nodes) == nodes, "the program is left as it is"
    return result


@pytest.mark.parametrize(("heads", "hidden", "options"), [(4, 64, {}), (8, 128, {"grouping": "neighbours"})])
def test_a_kl_budget_is_met_and_what_costs_nothing_goes(heads: int, hidden: int, options: dict[str, str]) -> None:
    events: list[ProgressEvent] = []
    result, limit = search(heads, hidden, events, max_kl=1e-3, **options), 1e-3
    report, attention = result.report, result.recipe.attention
    assert report.chosen.measured_kl == report.measured_kl["held-out tokens"] <= limit
    assert attention is not None and not attention.searched
    assert [(o.layers, o.kv_heads) for o in attention.overrides] == [("model.layers.1.self_attn", heads // 2)]
    assert report.chosen.bytes_per_token == (heads + heads // 2) * HEAD
    assert result.recipe.budget.max_kl == limit
    assert 1 <= len(report.tried) <= ROUNDS and {e.stage for e in events} == {"heads"}
    sizes = [p.bytes_per_token for p in report.curve]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 2 * heads * HEAD and sizes[-1] == 2 * HEAD


def test_a_cache_that_is_large_enough_leaves_the_heads() -> None:
    result = search(max_cache_bytes_per_token=10_000)
    assert result.recipe.attention is None and result.report.chosen.measured_kl == 0
    fewer = search(max_cache_bytes_per_token=6 * HEAD, **MEANS)
    assert fewer.report.chosen.bytes_per_token == 6 * HEAD
    assert {layer.where: layer.kv_heads for layer in fewer.report.layers} == {
        "model.layers.0.self_attn": 4,
        "model.layers.1.self_attn": 2,
    }


def test_what_nothing_meets_says_how_near_it_came() -> None:
    with pytest.raises(NothingWithinError, match=r"within max_cache_bytes_per_token = 8: one head .* takes 256 bytes"):
        search(max_cache_bytes_per_token=8, **MEANS)
    with pytest.raises(NothingWithinError, match=r"within both max_kl = 1e-09 and .* = 300: .* has a KL of \d"):
        search(max_cache_bytes_per_token=300, max_kl=1e-9, **MEANS)
    with pytest.raises(NothingToChooseError, match="it has one key/value head already"):
        choose(captured("Llama", num_key_value_heads=1), max_kl=0.1)


def test_both_budgets_are_kept_where_only_large_caches_keep_the_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = KvHeadSearch.measure, list[int]()

    def measure(self: KvHeadSearch, choice: Assignment) -> Tried:
        """The first, which is the least KL within the cache, is good; of the others, large ones alone."""
        result = real(self, choice)
        tried.append(choice.size)
        good = len(tried) == 1 or choice.size > 6 * HEAD
        self.tried[-1] = replace(result, measured={"held-out tokens": 0.001 if good else 0.5})
        return self.tried[-1]

    monkeypatch.setattr(KvHeadSearch, "measure", measure)
    result = search(max_cache_bytes_per_token=6 * HEAD, max_kl=0.01, **MEANS)
    assert len(tried) > 1 and result.report.chosen.bytes_per_token == 6 * HEAD


def units_of(program: Program, counts: tuple[int, ...]) -> list[LayerUnit]:
    sites = [find_site(program, node) for node in program.graph.nodes if "ew.attention" in str(node.target)]
    return [LayerUnit(site, counts) for site in sites if isinstance(site, Site)]


def measured(program: Program, path: str, heads: int, options: KvOptions) -> float:
    """KL of the program with that one layer converted by the pass, on the tokens that it was fitted to."""
    changed = program.copy()
    one = KvOptions(
        overrides=(KvHeadsOverride(layers=path, kv_heads=heads),),
        method=options.method,
        grouping=options.grouping,
    )
    GroupKvHeads().run(changed, PassContext(recipe=PassOptions(attention=one), calibration=tuple(SEEN)))
    reference = program.evaluate(packed_inputs(program, SEEN))[0]
    return mean_kl(reference, changed.evaluate(packed_inputs(changed, SEEN))[0])


@pytest.mark.parametrize(("heads", "hidden", "method"), [(4, 64, "calibrated"), (8, 128, "mean")])
def test_the_fewest_heads_cost_what_they_cost_alone(heads: int, hidden: int, method: KvMethod) -> None:
    program = before_grouping(model_with_pairs(1, heads, hidden))
    options, places = KvOptions(kv_heads=1, method=method), list[str]()
    units = units_of(program, (heads, heads // 2, 1))
    nodes = len(program.graph.nodes)
    costs = measure_layers(program, units, options, SEEN, lambda done, total, where: places.append(where))
    assert len(program.graph.nodes) == nodes and len(places) == len(units) + 1
    for unit, cost in zip(units, costs, strict=True):
        assert cost[0] == 0 and cost[2] > 0
        # The same fit in another order of sums.
        assert cost[2] == pytest.approx(measured(program, unit.site.path, 1, options), rel=0.05)
    # Heads that are alike become one for next to nothing, and only in that layer.
    assert costs[1][1] < 1e-3 * costs[1][2]
    assert costs[0][1] > 1e-2 * costs[0][2]
