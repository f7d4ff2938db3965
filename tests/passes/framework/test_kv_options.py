"""Which attention gets how many heads, and what can't be."""

from __future__ import annotations

import pytest

from enginewright.passes.framework.kv_options import KvHeadsOverride, KvOptions
from enginewright.runtime.shared.errors import RecipeError

LAYERS = {"layers.0.attention": 12, "layers.1.attention": 12, "layers.10.attention": 4}


def test_the_first_override_that_matches_counts() -> None:
    options = KvOptions(
        kv_heads=4,
        overrides=(KvHeadsOverride(layers="layers.1.*", kv_heads=6), KvHeadsOverride(layers="layers.1*", kv_heads=2)),
    )
    options.check(LAYERS, "mine")
    assert {path: options.heads_of(path, heads) for path, heads in LAYERS.items()} == {
        "layers.0.attention": 4,
        "layers.1.attention": 6,
        "layers.10.attention": 2,
    }
    of_one = KvOptions(overrides=(KvHeadsOverride(layers="*.1.*", kv_heads=6),))
    assert of_one.heads_of("layers.0.attention", 12) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (KvOptions(kv_heads=5), "kv_heads is 5 for layers.0.attention, which does not divide its 12"),
        (KvOptions(kv_heads=5), "Take one of 1, 2, 3, 4, 6, 12."),
        (KvOptions(kv_heads=6), "kv_heads is 6 for layers.10.attention, which has 4"),
        (KvOptions(kv_heads=6), "Heads can only become fewer: 1, 2, 4."),
        (
            KvOptions(kv_heads=2, overrides=(KvHeadsOverride(layers="layer.1", kv_heads=1),)),
            "'layer.1' matches no attention",
        ),
        (
            KvOptions(
                kv_heads=2,
                overrides=(KvHeadsOverride(layers="*", kv_heads=1), KvHeadsOverride(layers="layers.1.*", kv_heads=2)),
            ),
            "has no effect: earlier",
        ),
        (
            KvOptions(overrides=(KvHeadsOverride(layers="layers.10.*", kv_heads=4),)),
            "as many key/value heads as it is to have",
        ),
    ],
)
def test_numbers_that_can_not_be(options: KvOptions, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        options.check(LAYERS, "mine")
    assert caught.value.hint
    assert caught.value.message.startswith("recipe mine: attention")
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_tokens_are_looked_at_where_something_depends_on_them() -> None:
    assert not KvOptions(kv_heads=1, method="mean", grouping="neighbours").calibrated
    assert KvOptions(kv_heads=1, method="mean", grouping="similar").calibrated
    assert KvOptions(kv_heads=1, method="calibrated", grouping="neighbours").calibrated
