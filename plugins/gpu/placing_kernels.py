"""The Triton kernel that runs before a step: it writes sampled tokens and changed block tables to the step's inputs."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total", "vocab"])
def place_kernel(
    ids: tl.tensor,
    sources: tl.tensor,
    drawn: tl.tensor,
    tables: tl.tensor,
    changes: tl.tensor,
    count: tl.tensor,
    total: tl.tensor,
    vocab: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """Sets token t of ``ids`` [total] to drawn[sources[t]] where sources[t] isn't negative, and changes ``tables``;
    grid (pieces of ``total`` at least,).

    A drawn token that isn't in the vocabulary, such as NO_TOKEN, becomes one that is: its request ends, but the lookup
    of its row must stay within the table. ``changes`` [count, 2] has an index in ``tables``, and its new value; the
    programs share them.
    """
    piece = tl.program_id(0)
    token = piece * PIECE + tl.arange(0, PIECE)
    source = tl.load(sources + token, mask=token < total, other=-1)
    token_id = tl.load(drawn + source, mask=source >= 0, other=0)
    tl.store(ids + token, tl.minimum(tl.maximum(token_id, 0), vocab - 1), mask=source >= 0)
    changed = tl.load(count)
    for start in range(piece * PIECE, changed, tl.num_programs(0) * PIECE):
        entry = start + tl.arange(0, PIECE)
        place = tl.load(changes + 2 * entry, mask=entry < changed, other=0)
        value = tl.load(changes + 2 * entry + 1, mask=entry < changed, other=0)
        tl.store(tables + place, value, mask=entry < changed)
