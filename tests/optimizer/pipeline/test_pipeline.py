"""The pipeline cut in two by the names of passes."""

from __future__ import annotations

import pytest

from enginewright.optimizer.pipeline.pipeline import choose_passes, default_pipeline, split_before


@pytest.mark.parametrize("names", [("choose_formats",), ("prune_heads", "drop_layers"), ("remove_noops",)])
def test_the_first_that_is_named_begins_the_second_part(names: tuple[str, ...]) -> None:
    passes = default_pipeline()
    before, later = split_before(passes, *names)
    assert [*before, *later] == passes and later[0].name in names
    assert not {p.name for p in before} & set(names)


def test_where_none_is_left_the_next_one_begins_it_or_none() -> None:
    passes, _ = choose_passes({"drop_layers": False})
    assert split_before(passes, "drop_layers", "prune_heads")[1][0].name == "prune_heads"
    assert split_before(passes, "drop_layers") == (passes, [])
