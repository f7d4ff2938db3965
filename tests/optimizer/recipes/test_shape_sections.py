"""[prune] in a recipe: what it may say, and what passes take of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.pipeline.pass_context import needs_tokens
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.recipes.stored import to_toml
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.pruning import PruneOverride, Pruning
from enginewright.runtime.shared.errors import RecipeError

WHOLE = """
name = "mine"
[weights]
default = { storage = "int4", group_size = 64, activation = "int8", activation_group_size = 64 }
[prune]
channels = 0.25
layers = 1
drop = ["model.layers.3"]
[[prune.overrides]]
layers = "model.layers.0"
heads = 0.5
"""


def test_what_a_recipe_says_is_what_passes_take(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(WHOLE)
    recipe = load_recipe(tmp_path / "mine.toml")
    assert recipe.prune is not None and not recipe.exact and needs_tokens(recipe, ())
    overrides = (PruneOverride(layers="model.layers.0", heads=0.5),)
    expected = Pruning(channels=0.25, layers=1, drop=("model.layers.3",), overrides=overrides, multiple=64)
    assert recipe.pruning == expected and recipe.prune == expected.model_copy(update={"multiple": 1})
    assert expected.share("heads", "model.layers.0.self_attn") == 0.5
    assert expected.share("heads", "model.layers.10.self_attn") == 0
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("channels = 1.0", r"prune\.channels: Input should be less than 1"),
        ("heads = -0.1", r"prune\.heads: Input should be greater than or equal to 0"),
        ("layers = -1", r"prune\.layers: Input should be greater"),
        ("channel = 0.5", r"prune\.channel: unknown key"),
        ("max_kl = 0.1", r"\[prune\] removes nothing"),
        ('[[prune.overrides]]\nlayers = "*"', r"says neither channels nor heads"),
        ("heads = 0.5\nmultiple = 0", r"prune\.multiple: Input should be greater"),
    ],
)
def test_what_it_may_not_say(section: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(f'name = "bad"\n[prune]\n{section}\n')
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "bad.toml")


def test_of_floats_any_number_of_columns_is_left() -> None:
    recipe = load_recipe("f32")
    assert Pruning(channels=0.5).fitting(recipe.weights.formats).multiple == 1


def test_what_is_left_fits_formats_and_what_the_recipe_says() -> None:
    section, any_ = Pruning(channels=0.5, multiple=48), Pruning(channels=0.5)
    assert section.fitting(load_recipe("f32").weights.formats).multiple == 48
    assert section.fitting(load_recipe("int8").weights.formats).multiple == 96  # and its own groups, of 32
    channel = WeightFormat(storage="int4", activation="int8")
    assert section.fitting([channel]).multiple == 48  # of which 8 is a divisor
    assert any_.fitting([channel]).multiple == 8
    auto = load_recipe("auto").model_copy(update={"prune": any_})
    assert auto.pruning == any_.model_copy(update={"multiple": 128})  # whichever will be chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[weights]\nkeep_blocks = true\n[prune]\nchannels = 0.5\n", r"keep_blocks keeps .* and \[prune\] makes other"),
        ("[weights]\nkeep_blocks = true\n[attention]\nkv_heads = 1\n", r"keep_blocks keeps .* and \[attention\] makes"),
        (
            '[weights]\nembeddings = { storage = "int8", activation = "int8", sparsity = "2:4" }\n',
            r"weights\.embeddings: sparsity '2:4' is for linears",
        ),
    ],
)
def test_shapes_that_do_not_go_with_weights(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(f'name = "bad"\n{text}')
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "bad.toml")


def test_the_blocks_of_layers_that_stay_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[weights]\nkeep_blocks = true\n[prune]\nlayers = 2\n')
    assert load_recipe(tmp_path / "mine.toml").weights.keep_blocks
