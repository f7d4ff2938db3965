"""Which share goes in which module."""

from __future__ import annotations

import pytest

from enginewright.passes.framework.pruning import PruneOverride, Pruning, matches
from enginewright.runtime.shared.errors import RecipeError

PATHS = [f"model.layers.{i}.mlp.down_proj" for i in range(12)]


def test_a_pattern_names_a_module_or_its_layer() -> None:
    assert [p for p in PATHS if matches("model.layers.1", p)] == [PATHS[1]]  # neither 10 nor 11
    assert [p for p in PATHS if matches("*.1?.mlp.*", p)] == PATHS[10:]
    assert not any(matches("layers.1", p) for p in PATHS)


def test_the_first_override_that_says_something_of_a_kind_counts() -> None:
    pruning = Pruning(
        channels=0.25,
        overrides=(
            PruneOverride(layers="model.layers.1", heads=0.5),
            PruneOverride(layers="model.layers.[12]", channels=0.0),
            PruneOverride(layers="model.layers.1", channels=0.75),
        ),
    )
    assert [pruning.share("channels", p) for p in PATHS[:4]] == [0.25, 0.0, 0.0, 0.25]
    assert [pruning.share("heads", p) for p in PATHS[:3]] == [0.0, 0.5, 0.0]
    assert pruning.wants("channels") and pruning.wants("heads")
    assert not Pruning(layers=1, overrides=(PruneOverride(layers="*", heads=0.0),)).wants("heads")


def test_an_override_that_matches_nothing_is_refused_with_what_there_is() -> None:
    pruning = Pruning(overrides=(PruneOverride(layers="model.layers.12", channels=0.5),))
    with pytest.raises(RecipeError, match=r"channels: the pattern 'model\.layers\.12' matches nothing") as caught:
        pruning.check_matched("channels", PATHS)
    assert PATHS[-1] in (caught.value.hint or "")
    pruning.check_matched("heads", PATHS)  # it says nothing of heads
