"""The keys of [attention], and the sections that they require."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.pipeline.pass_context import needs_tokens
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.stored import to_toml
from enginewright.runtime.shared.errors import RecipeError

AUTO = """
[auto]
candidates = [
    { storage = "f32" },
    { storage = "bf16", activation = "bf16" },
]
"""


def recipe(text: str, folder: Path) -> Recipe:
    path = folder / "mine.toml"
    path.write_text(f'name = "mine"\n{text}')
    return load_recipe(path)


def test_numbers_reach_the_passes(tmp_path: Path) -> None:
    attention = recipe(
        "[attention]\nkv_heads = 2\nmethod = 'mean'\n[[attention.overrides]]\nlayers = '*.1.*'\nkv_heads = 4\n",
        tmp_path,
    )
    assert attention.attention is not None and not attention.attention.searched
    options = attention.attention
    assert (options.kv_heads, options.method, options.grouping) == (2, "mean", "similar")
    assert options.heads_of("model.layers.1.self_attn", 8) == 4 and options.heads_of("model.layers.2.self_attn", 8) == 2
    assert not attention.exact and needs_tokens(attention, ())
    (tmp_path / "again.toml").write_text(to_toml(attention))
    assert load_recipe(tmp_path / "again.toml") == attention


def test_a_budget_is_searched_for_and_plain_pooling_needs_no_tokens(tmp_path: Path) -> None:
    options = recipe("[attention]\nmax_kl = 0.02\nmethod = 'mean'\ngrouping = 'neighbours'\n", tmp_path)
    assert options.attention is not None and options.attention.searched and needs_tokens(options, ())
    plain = recipe("[attention]\nkv_heads = 1\nmethod = 'mean'\ngrouping = 'neighbours'\n", tmp_path)
    assert not needs_tokens(plain, ()) and not plain.exact


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[attention]\n", "it needs kv_heads, or a budget"),
        ("[attention]\nkv_heads = 1\nmax_kl = 0.1\n", "give one of them"),
        ("[attention]\nkv_heads = 0\n", "greater than or equal to 1"),
        ("[attention]\nkv_head = 1\n", "mine.toml:3: attention.kv_head: unknown key"),
        ("[attention]\nkv_heads = 1\nmethod = 'median'\n", "'calibrated' or 'mean'"),
        ("[attention]\nmax_kl = 0.3\n[budget]\nmax_kl = 0.2\n", "max_kl is 0.3 in [attention], and all together"),
        (
            "[attention]\nmax_kl = 0.1\n[prune]\nheads = 0.5\nmax_kl = 0.1\n[budget]\nmax_kl = 0.19\n",
            "0.1 in [prune] and 0.1 in",
        ),
        (f"[attention]\nmax_kl = 0.2\n[budget]\nmax_kl = 0.2\n{AUTO}", "of which nothing is left for formats"),
        (f"[attention]\nmax_kl = 0.2\n[budget]\nmax_bytes = 999\n{AUTO}", "needs max_kl in [budget]"),
    ],
)
def test_what_does_not_go_together(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(text, tmp_path)
    assert message in str(caught.value)
