from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.recipes.recipe import RENAMED_PASSES, Recipe, list_recipes, load_recipe
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


def test_a_rotation_of_none_is_accepted_for_a_release(tmp_path: Path) -> None:
    """It was a key with one value; recipes and manifests of bundles have it."""
    text = 'name = "x"\n[weights]\ndefault = { storage = "bf16", activation = "bf16", rotation = "none" }\n'
    with pytest.warns(FutureWarning, match='rotation = "none" has no effect'):
        recipe = again(tmp_path, text)
    assert recipe.weights.default == WeightFormat(storage="bf16", activation="bf16")
    stored = recipe.model_dump()
    assert "rotation" not in stored["weights"]["default"]
    stored["weights"]["default"]["rotation"] = "none"
    assert Recipe.model_validate(stored) == recipe  # of a bundle's manifest: nobody can change it


def test_passes_that_were_renamed_are_accepted_for_a_release(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="the pass choose_integers is called apply_gptq now"):
        recipe = again(tmp_path, 'name = "x"\n[passes]\nchoose_integers = false\nfuse_qkv = true\n')
    assert recipe.passes == {"apply_gptq": False, "fuse_qkv": True}
    stored = recipe.model_dump() | {"passes": {"choose_kept": True, "scale_channels": False}}
    assert Recipe.model_validate(stored).passes == {"select_sparsity_mask": True, "apply_awq": False}
    assert set(RENAMED_PASSES.values()) <= {p.name for p in default_pipeline()}
