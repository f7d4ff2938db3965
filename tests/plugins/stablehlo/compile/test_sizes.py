from __future__ import annotations

import pytest

from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.stablehlo.compile.sizes import modules_of, slot_lengths
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.shared.errors import RecipeError


def test_slots_double_up_to_the_context() -> None:
    assert slot_lengths(100) == (101,)
    assert slot_lengths(160) == (160, 161)
    assert slot_lengths(8192) == (160, 320, 640, 1280, 2560, 5120, 8193)


def test_defaults() -> None:
    modules = modules_of(EnginesSection(), 300, None)
    names = [module.name for module in modules]
    assert names[:5] == [f"decode-{n}x160" for n in (1, 2, 4, 8, 16)]
    assert names[5:9] == ["prompt-32x160", "prompt-64x160", "prompt-128x160", "score-128x160"]
    assert [n for n in names if "301" in n and n.startswith("p")] == [f"prompt-{n}x301" for n in (32, 64, 128, 256)]
    assert len({module.file for module in modules}) == len(modules)


def test_a_recipe_s_buckets_and_engines() -> None:
    plan = BucketPlan.from_sizes((8, 24), (2, 3), 3)
    modules = modules_of(EnginesSection(context=30, requests=4), 300, plan)
    assert [module.name for module in modules] == [
        *("decode-1x31", "decode-2x31", "decode-3x31", "decode-4x31"),
        *("prompt-8x31", "prompt-24x31", "score-24x31"),
    ]
    assert modules[-1].rows == 24


@pytest.mark.parametrize(
    ("engines", "plan", "message"),
    [
        ({"context": 400}, None, "engines.context: 400 tokens are more than the model's context of 300"),
        (
            {"context": 20},
            BucketPlan.from_sizes((8, 24), (), 4),
            "buckets.tokens: 24 tokens are more than the slots can hold",
        ),
        (
            {"requests": 2},
            BucketPlan.from_sizes((8,), (4,), 4),
            "buckets.batch: 4 requests are more than engines.requests, 2",
        ),
    ],
)
def test_sizes_that_do_not_fit(engines: dict[str, int], plan: BucketPlan | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        modules_of(EnginesSection(**engines), 300, plan)
