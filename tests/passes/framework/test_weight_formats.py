from __future__ import annotations

import pytest

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats

BF16 = WeightFormat(storage="bf16", activation="bf16")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.0.mlp.down_proj", "*.down_proj"),
        ("model.layers.10.self_attn.o_proj", "model.layers.1?.*"),
        ("model.layers.10.mlp.down_proj", "*.down_proj"),
        ("model.layers.1.self_attn.o_proj", None),
        ("down_proj", None),
        ("model.layers.0.mlp.DOWN_PROJ", None),
    ],
)
def test_the_first_pattern_that_matches(path: str, expected: str | None) -> None:
    formats = WeightFormats(
        overrides=(
            FormatOverride(layers="*.down_proj", format=BF16),
            FormatOverride(layers="model.layers.1?.*", format=BF16),
        )
    )
    override = formats.override_of(path)
    assert (override.layers if override else None) == expected
