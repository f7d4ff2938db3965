"""Sizes that engines are built for: from buckets, from [engines], or the defaults."""

from __future__ import annotations

import pytest

from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.tensorrt_rtx.compile.profiles import describe, profiles_of
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.shared.errors import RecipeError


def test_defaults() -> None:
    decode, prefill = profiles_of(EnginesSection(), 2048, None)
    assert (decode.phase, decode.B, decode.S, decode.R, decode.C) == ("decode", (1, 4, 16), (1, 1, 1), (1, 4, 16), 2049)
    assert (prefill.phase, prefill.B, prefill.S, prefill.R) == ("prefill", (1, 1, 4), (1, 128, 512), (1, 1, 512))
    assert [describe(p) for p in (decode, prefill)] == [
        "1 to 16 requests of 1 token",
        "1 to 4 prompts of 1 to 512 tokens",
    ]


def test_a_short_context_has_short_chunks() -> None:
    _, prefill = profiles_of(EnginesSection(), 32, None)
    assert (prefill.S, prefill.C) == ((1, 32, 32), 33)
    assert profiles_of(EnginesSection(context=8), 32, None)[0].C == 9


def test_each_bucket_has_a_profile_for_the_sizes_down_to_the_one_before() -> None:
    plan = BucketPlan.from_sizes((32, 128), (1, 8), 8)
    profiles = profiles_of(EnginesSection(), 512, plan)
    assert [(p.phase, p.B, p.S) for p in profiles] == [
        ("decode", (1, 1, 1), (1, 1, 1)),
        ("decode", (2, 8, 8), (1, 1, 1)),
        ("prefill", (1, 1, 4), (1, 32, 32)),
        ("prefill", (1, 1, 4), (33, 128, 128)),
    ]
    assert profiles[1].holds(5, 1, 3) and not profiles[0].holds(5, 1, 3)


@pytest.mark.parametrize(
    ("engines", "plan", "message"),
    [
        ({"context": 65}, None, r"engines.context: 65 tokens are more than the model's context of 64"),
        ({"context": 16, "chunk": 17}, None, r"engines.chunk: 17 tokens are more than the slots can hold, 16"),
        (
            {"context": 16},
            BucketPlan.from_sizes((32,), (), 4),
            r"buckets.tokens: 32 tokens are more than the slots can hold, 16",
        ),
        (
            {"chunk": 8},
            BucketPlan.from_sizes((32,), (), 4),
            r"buckets.tokens: 32 tokens are more than engines.chunk .* 8",
        ),
        (
            {"requests": 2},
            BucketPlan.from_sizes((32,), (4,), 4),
            r"buckets.batch: 4 requests are more than engines.requests .* 2",
        ),
    ],
)
def test_what_does_not_fit(engines: dict[str, int], plan: BucketPlan | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        profiles_of(EnginesSection(**engines), 64, plan)
