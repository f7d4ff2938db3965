from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.stored import to_toml
from enginewright.runtime.shared.errors import RecipeError


def load(folder: Path, text: str) -> Recipe:
    path = folder / "mine.toml"
    path.write_text(f'name = "mine"\n[buckets]\n{text}\n')
    return load_recipe(path)


def test_lists_are_sorted_and_written_again(tmp_path: Path) -> None:
    recipe = load(tmp_path, "tokens = [512, 64]\nbatch = [8, 1]")
    assert recipe.buckets == BucketsSection(tokens=(64, 512), batch=(1, 8))
    assert recipe.exact
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe


def test_files_are_beside_the_recipe(tmp_path: Path) -> None:
    recipe = load(tmp_path, 'histogram = "h.csv"\nbatches = "/b.csv"\nmost = 8')
    assert recipe.buckets is not None
    assert recipe.buckets.histogram == str(tmp_path / "h.csv") and recipe.buckets.batches == "/b.csv"
    assert recipe.buckets.trace is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs tokens, a list of sizes, or one of histogram, trace, default with most"),
        ("batch = [4]", "needs tokens"),
        ("tokens = []", "needs tokens"),
        ("tokens = [0, 4]", "mine.toml:3: buckets.tokens.0: Input should be greater than or equal to 1"),
        ("tokens = [4]\nbatch = [0]", "mine.toml:4: buckets.batch.0: Input should be greater than or equal to 1"),
        ("tokens = [4, 4]", "mine.toml:3: buckets.tokens: a size is listed twice"),
        ("tokens = [true]", "valid integer"),
        ("tokens = [4.5]", "valid integer"),
        ('tokens = "4"', "it must be a list"),
        ("tokens = [4]\nbatch = [5]", "the largest batch, 5, is beyond the largest of tokens, 4"),
        ('tokens = [4]\ndefault = "chat"\nmost = 4', "has sizes and default"),
        ('trace = "t"\nhistogram = "h"\nmost = 4', "has histogram and trace"),
        ('histogram = "h"', "has histogram, and needs most"),
        ('histogram = "h"\nmost = 0', "mine.toml:4: buckets.most: Input should be greater than or equal to 1"),
        ('histogram = ""\nmost = 2', "buckets.histogram: String should have at least 1"),
        ("tokens = [4]\nmost = 2", "most, batches and chunk are for sizes that are chosen"),
        ("token = [4]", "buckets.token: unknown key"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message.replace("[", r"\[").replace("(", r"\(")):
        load(tmp_path, text)
