from __future__ import annotations

import json
from typing import Any

import pytest

from enginewright.runtime.bundle.buckets import Bucket, BucketPlan, plan_path
from enginewright.runtime.shared.errors import BundleError

PLAN = BucketPlan.from_sizes((96, 7, 40), (6, 1, 2), 64)


def read(data: Any, context: int = 128) -> BucketPlan:
    return BucketPlan.from_json(json.dumps(data), source="plan.json", context_length=context)


def test_a_plan_reads_as_it_was_written() -> None:
    text = PLAN.to_json()
    assert BucketPlan.from_json(text, source="plan.json", context_length=96) == PLAN
    assert [b.name for b in PLAN.buckets] == ["tokens-7", "tokens-40", "tokens-96", "batch-1", "batch-2", "batch-6"]
    assert PLAN.buckets[0] == Bucket(kind="tokens", tokens=7, requests=7, rows=6)
    assert PLAN.buckets[-1] == Bucket(kind="batch", tokens=6, requests=6, rows=6)
    assert plan_path("cpu") == "targets/cpu/buckets/plan.json"


def test_limits_and_padding() -> None:
    assert (PLAN.sizes("tokens"), PLAN.sizes("batch")) == ((7, 40, 96), (1, 2, 6))
    assert (PLAN.most_tokens, PLAN.most_requests, PLAN.most_padding) == (96, 6, 55)
    alone = BucketPlan.from_sizes((16,), (), 64)
    assert (alone.most_requests, alone.most_padding) == (16, 15)
    assert BucketPlan.from_sizes((16, 17), (1, 9), 64).most_padding == 15
    assert BucketPlan.from_sizes((200,), (), 4).most_requests == 4
    # Those that are small take as many requests as they have tokens.
    assert [b.rows for b in BucketPlan.from_sizes((2, 200), (8,), 64).buckets] == [2, 8, 8]


def test_a_plan_beyond_the_context() -> None:
    with pytest.raises(BundleError, match="96 tokens is beyond the context of 95"):
        read(json.loads(PLAN.to_json()), 95)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version is 2"),
        ({"format_version": True}, "format_version is missing or wrong"),
        ({"more": 1}, "more: there is no such field"),
        ({"buckets": []}, "buckets: Expected `array` of length >= 1"),
        ({"buckets": [Bucket.of_batch(2)]}, "none of kind tokens"),
        ({"buckets": [Bucket.of_tokens(8, 4), Bucket.of_tokens(8, 4)]}, "not in order, or one comes twice"),
        ({"buckets": [Bucket.of_tokens(9, 4), Bucket.of_tokens(8, 4)]}, "not in order"),
        ({"buckets": [Bucket.of_batch(2), Bucket.of_tokens(8, 4)]}, "not in order"),
        ({"buckets": [Bucket.of_tokens(8, 9), Bucket.of_batch(9)]}, "larger than the largest of kind tokens"),
        ({"buckets": [Bucket.of_tokens(8, 4), Bucket.of_tokens(9, 5)]}, "up to one number"),
        ({"buckets": [Bucket.of_tokens(8, 4), Bucket.of_batch(5)]}, "more requests than the buckets of kind tokens"),
    ],
)
def test_plans_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    buckets = change.get("buckets")
    if buckets is not None:
        change = {"buckets": [b.model_dump() for b in buckets]}
    with pytest.raises(BundleError, match=message):
        read(json.loads(PLAN.to_json()) | change)


@pytest.mark.parametrize(
    "bucket",
    [
        {"kind": "tokens", "tokens": 8, "requests": 10, "rows": 9},
        {"kind": "tokens", "tokens": 8, "requests": 4, "rows": 4},
        {"kind": "tokens", "tokens": 0, "requests": 1, "rows": 1},
        {"kind": "tokens", "tokens": 1 << 40, "requests": 2, "rows": 1},
        {"kind": "batch", "tokens": 8, "requests": 4, "rows": 8},
        {"kind": "batch", "tokens": 0, "requests": 0, "rows": 0},
        {"kind": "prefill", "tokens": 8, "requests": 2, "rows": 1},
    ],
)
def test_buckets_that_make_no_sense(bucket: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match=r"plan.json: buckets\.0"):
        read({"format_version": 1, "buckets": [bucket]})


def test_what_is_no_json() -> None:
    with pytest.raises(BundleError, match="not JSON"):
        BucketPlan.from_json(b"\xff{", source="plan.json", context_length=8)
