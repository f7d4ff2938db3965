"""Chooses the sizes of a target's modules, from the recipe's buckets or from defaults."""

from __future__ import annotations

from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.shared.errors import RecipeError

from ..section import ModuleSection

REQUESTS, CHUNKS = (1, 2, 4, 8, 16), (32, 64, 128, 256, 512)
"""The default numbers of requests of decode steps, and the default numbers of tokens of prompt steps."""

_SHORTEST = 160
"""The positions of the shortest slots. Each next length is twice as long, so that 640 hold a prompt of 512 and an
answer.
"""

_SCORED = 128
"""The most tokens of a step that computes logits for all of them, since each needs a row of the vocabulary's size."""


def slot_lengths(context: int, multiple: int = 1) -> tuple[int, ...]:
    """Returns the lengths of slots, in positions, for requests of up to ``context`` tokens, ascending.

    The last is ``context`` + 1, rounded up to a multiple of ``multiple``.
    """
    lengths, length, last = [], _SHORTEST, -(-(context + 1) // multiple) * multiple
    while length < last:
        lengths.append(length)
        length *= 2
    return (*lengths, last)


def modules_of(
    engines: EnginesSection, context_length: int, buckets: BucketPlan | None, multiple: int = 1
) -> tuple[ModuleSection, ...]:
    """Returns the modules for each length of slots: decode steps, prompts, and prompts with logits for all tokens.

    The longest slots have a multiple of ``multiple`` positions. Raises RecipeError naming a size that doesn't fit into
    the slots.
    """
    context = engines.context_within(context_length)
    requests, chunks = _sizes_of("batch", buckets), _sizes_of("tokens", buckets)
    if chunks and chunks[-1] > context:
        raise RecipeError(
            f"buckets.tokens: {chunks[-1]:,} tokens are more than the slots can hold, {context:,}",
            hint="Leave that size out, or let slots be longer (context in [engines]).",
        )
    most = engines.requests or max(requests, default=REQUESTS[-1])
    if requests and requests[-1] > most:
        raise RecipeError(
            f"buckets.batch: {requests[-1]:,} requests are more than engines.requests, {most:,}",
            hint="Leave that size out, or raise requests in [engines].",
        )
    batches = sorted({1, *(n for n in requests or REQUESTS if n < most), most})
    chunks = chunks or tuple(n for n in CHUNKS if n <= (engines.chunk or CHUNKS[-1]))
    return tuple(module for places in slot_lengths(context, multiple) for module in _modules(places, batches, chunks))


def _sizes_of(kind: str, buckets: BucketPlan | None) -> tuple[int, ...]:
    """Returns a recipe's buckets of one kind, "batch" or "tokens", in ascending order; () without buckets."""
    return tuple(b.tokens for b in buckets.buckets if b.kind == kind) if buckets else ()


def _modules(places: int, batches: list[int], chunks: tuple[int, ...]) -> list[ModuleSection]:
    fitting = [n for n in chunks if 1 < n < places]
    scored = max((n for n in fitting if n <= _SCORED), default=0)
    decode = [ModuleSection(requests=n, tokens=1, places=places, rows=n) for n in batches]
    prompts = [ModuleSection(requests=1, tokens=n, places=places, rows=1) for n in fitting]
    scores = [ModuleSection(requests=1, tokens=n, places=places, rows=n) for n in (scored,) if n]
    return [*decode, *prompts, *scores]
