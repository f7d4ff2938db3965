"""Ring attention: weights are divided as by ``tensor``, but keys and values by tokens of a request, not by heads.

A rank has all heads of the blocks with ``block % ranks == rank``; the allocator of blocks gives all blocks of a split
of 512 tokens to one rank. Queries go from rank to rank instead of keys: each rank computes attention of all queries
over its own keys, and the partial results are added in the order of the splits, which doesn't depend on the number of
ranks.

So a context may be longer than one rank's memory holds. The steps of one request:

    rope_kv_write     every rank rotates all queries; the owner of a token's block writes its key and value
    ring_attention    all queries over a rank's own keys, then sums of the rank's share of the heads
"""

from __future__ import annotations

from ...shared.errors import RequestError
from ...shared.lowered_program import Step
from .base import Axis, Heads
from .tensor import RULES, Tensor
from .views import Slice


def _attention(step: Step) -> Axis | None:
    """Returns the axis of an attention step: the heads of its output. A rank needs all heads of the queries."""
    return Axis(step.inputs[0].shape[1].constant, (None,) * len(step.inputs), (Slice(1),))


class Ring(Tensor):
    """Divides keys and values by tokens, and everything else as ``Tensor`` does."""

    name = "ring"
    collectives = (*Tensor.collectives, "ring_attention")
    alike = Tensor.name
    combines = False
    unplanned = "a ring's ranks hold the keys of some tokens each"
    owns_blocks = True
    rules = RULES | {"paged_attention": _attention}
    repeated = frozenset({"rope_kv_write"})

    def heads(self, step: Step, have: int, ranks: int) -> Heads:
        """Implements ``LayerKind``; refuses a second cache, of the ends of requests."""
        if step.attrs.get("has_ends"):
            raise RequestError(
                "ring: the ends of a request are in a second cache (kv_cache.dtype k4v4), which isn't divided",
                hint="Use tensor, or export with another kv_cache.dtype, such as k8v4.",
            )
        return super().heads(step, have, ranks)

    def _key_value(self, cuts: tuple[int, ...], have: int, group: int) -> tuple[tuple[int, int], ...]:
        return ((0, have),) * (len(cuts) - 1)

    def cache_attrs(self, rank: int, ranks: int) -> dict[str, int]:
        return {"ranks": ranks, "rank": rank}

    def attention(self, heads: Heads, first: int, rank: int, ranks: int) -> tuple[str, dict[str, int]]:
        return "ring_attention", {"first_head": first, **self.cache_attrs(rank, ranks)}
