from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.recipes.recipe import Recipe, list_recipes, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.optimizer.recipes.stored import to_toml
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats

INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)


def again(folder: Path, text: str) -> Recipe:
    path = folder / "again.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda r: r.name)
def test_built_in_recipes_come_back(recipe: Recipe, tmp_path: Path) -> None:
    assert again(tmp_path, to_toml(recipe)) == recipe


def test_overrides_switches_and_strange_names_come_back(tmp_path: Path) -> None:
    recipe = Recipe(
        name='a "quoted" name, ü\n',
        weights=WeightFormats(
            default=INT8,
            overrides=(
                FormatOverride(layers="a.[[]0].b", format=WeightFormat(storage="bf16", activation="bf16")),
                FormatOverride(layers="*", format=WeightFormat()),
            ),
        ),
        passes={"fuse_qkv": False, "fuse_add_norm": True},
        budget=BudgetSection(max_kl=1e-05, max_bytes=123_456_789_012),
        context_length=77,
    )
    text = to_toml(recipe, "Two\nlines.")
    assert text.startswith("# Two\n# lines.\nname = ")
    assert again(tmp_path, text) == recipe
