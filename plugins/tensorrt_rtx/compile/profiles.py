"""Chooses the optimization profiles of an engine, from buckets or from default sizes.

A profile covers the sizes from above the previous bucket up to its own, for which kernels are optimized. Steps may run
padded to the bucket or unpadded.
"""

from __future__ import annotations

from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.shared.errors import RecipeError, plural

from ...engines.section import ProfileSection

REQUESTS, PROMPTS, CHUNK = 16, 4, 512
"""The default numbers: the most requests of a decode step, the most prompts of a step, and the most tokens of each."""

_BEST_REQUESTS, _BEST_CHUNK = 4, 128
"""The sizes within a profile for which kernels are optimized."""


def profiles_of(engines: EnginesSection, context_length: int, buckets: BucketPlan | None) -> tuple[ProfileSection, ...]:
    """Returns the profiles of decode steps in ascending order of their sizes, then those of prompts.

    Raises RecipeError naming a bucket, or a size of [engines], that the slots or the profiles can't hold.
    """
    capacity = engines.context_within(context_length) + 1  # its last place is for rows that rest
    batches = tuple(b.tokens for b in buckets.buckets if b.kind == "batch") if buckets else ()
    tokens = tuple(b.tokens for b in buckets.buckets if b.kind == "tokens") if buckets else ()
    requests = engines.requests or max(batches, default=REQUESTS)
    chunk = engines.chunk or max(tokens, default=min(CHUNK, capacity - 1))
    prompts = engines.prompts or min(PROMPTS, requests)
    _check("buckets.batch", "requests", max(batches, default=0), "engines.requests", requests)
    _check("buckets.tokens", "tokens", max(tokens, default=0), "engines.chunk", chunk)
    _check("buckets.tokens" if tokens else "engines.chunk", "tokens", chunk, "the slots", capacity - 1)
    sizes = sorted({*batches, requests})
    best = min(_BEST_REQUESTS, requests) if not batches else 0
    decode = [
        ProfileSection(phase="decode", B=(a, best or b, b), S=(1, 1, 1), R=(1, best or b, b), C=capacity)
        for a, b in zip([1, *(n + 1 for n in sizes)], sizes, strict=False)
    ]
    sizes = sorted({*tokens, chunk})
    best = min(_BEST_CHUNK, chunk) if not tokens else 0
    prefill = [
        ProfileSection(phase="prefill", B=(1, 1, prompts), S=(a, best or b, b), R=(1, 1, max(b, prompts)), C=capacity)
        for a, b in zip([1, *(n + 1 for n in sizes)], sizes, strict=False)
    ]
    return (*decode, *prefill)


def _check(what: str, unit: str, size: int, holder: str, most: int) -> None:
    if size > most:
        raise RecipeError(
            f"{what}: {size:,} {unit} are more than {holder} can hold, {most:,}",
            hint="Leave that size out, or let [engines] of the recipe hold more (requests, chunk, context).",
        )


def describe(profile: ProfileSection) -> str:
    """Returns a profile as text, such as "1 to 16 requests of 1 token" or "1 to 4 prompts of 1 to 512 tokens"."""
    who = "requests" if profile.phase == "decode" else "prompts"
    return f"{_span(profile.B)} {who} of {_span(profile.S)} {plural('token', profile.S[2])}"


def _span(sizes: tuple[int, int, int]) -> str:
    return str(sizes[2]) if sizes[0] == sizes[2] else f"{sizes[0]} to {sizes[2]}"
