"""The time of a token before there is a bundle: for each unit in each format, on this machine and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from enginewright.optimizer.pipeline.pipeline import default_pipeline, split_before
from enginewright.optimizer.plan.token_clock import TokenClock
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import AutoSection, BudgetSection
from enginewright.optimizer.search.format_seconds import time_formats
from enginewright.optimizer.search.format_units import find_units
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.plugins.steps.planning import StepSeconds
from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.lowered_program import Step
from tests.optimizer.search.formats_prepared import BF16, INT4_32, INT8, before_formats

RECIPE = Recipe(name="mine", budget=BudgetSection(max_ms_per_token=1.0), auto=AutoSection(candidates=(INT4_32, INT8)))


@pytest.mark.parametrize(("device", "hidden"), [("cpu", 64), ("cpu", 128), ("RTX 4090", 128)])
def test_every_unit_has_a_time_in_every_format(device: str, hidden: int) -> None:
    program = before_formats("Llama", hidden_size=hidden)
    units = find_units(program, (INT4_32, INT8, BF16))
    later = split_before(default_pipeline(), "choose_formats")[1]
    clock = TokenClock(RECIPE.model_copy(update={"budget": BudgetSection(max_ms_per_token=1.0, device=device)}))

    def timed(chosen: Sequence[int]) -> tuple[tuple[Step, ...], StepSeconds]:
        pairs = zip(units, chosen, strict=True)
        overrides = [FormatOverride(layers=path, format=u.formats[o]) for u, o in pairs for path in u.paths]
        return clock.time(
            program, later, PassContext(recipe=PassOptions(weights=WeightFormats(overrides=tuple(overrides))))
        )

    places: list[str] = []
    times = time_formats(units, timed, lambda done, total, where: places.append(where))
    assert [len(of) for of in times.units] == [len(u.formats) for u in units]
    assert min(min(of) for of in times.units) > 0 and times.fixed > 0
    assert len(places) == 3 and places[0] == f"timing {INT4_32}"


def test_a_device_that_nobody_knows() -> None:
    unknown = BudgetSection(max_ms_per_token=1.0, device="H100000")
    with pytest.raises(TargetError, match="'H100000' isn't a known device"):
        TokenClock(RECIPE.model_copy(update={"budget": unknown}))
