"""``ew.attention`` and ``ew.paged_attention``: attention over packed requests, captured and lowered form.

For both, query head h reads key/value head h // (Nq / Nkv). Scores are computed in these steps:

1. scale * q.k
2. If ``softcap`` isn't 0: softcap * tanh(score / softcap).
3. With ``slopes`` [Nq]: slope * (key position - query position) is added (ALiBi, Press et al. 2021,
   https://arxiv.org/abs/2108.12409).

A query at position p sees the keys max(0, p-window+1) .. p, or 0 .. p if ``window`` is 0. ``sinks`` [Nq] are one more
logit for each head in the softmax's denominator, which has no value.

``ew.attention`` of an encoder has ``causal`` False: a query sees all keys of its request, or those with
|key position - query position| < window. Then the bias of ALiBi is -slope * |key position - query position|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from enginewright.runtime.shared.kv_formats import END

from .library import accumulate_dtype, register


def request_of_token(q_start: torch.Tensor, tokens: int) -> torch.Tensor:
    """q_start [B+1] -> [T]: the request that each of ``tokens`` packed tokens belongs to."""
    index = torch.arange(tokens, dtype=q_start.dtype, device=q_start.device)
    return torch.searchsorted(q_start[1:].contiguous(), index, right=True)


def request_spans(arguments: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns (first token, end) of each request in a step. ``arguments`` are those of an attention op, by name."""
    return list(pairwise(arguments["q_start"].tolist()))


def of_one_request(arguments: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns an attention op's arguments with the tokens ``start`` to ``stop`` alone, which are those of one
    request.
    """
    tokens = {name: arguments[name][start:stop] for name in ("q", "k", "v") if name in arguments}
    return {**arguments, **tokens, "q_start": torch.tensor([0, stop - start])}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_start: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
    causal: bool = True,
    biases: torch.Tensor | None = None,
    dtype: str = "f32",
) -> torch.Tensor:
    """Computes each request's attention over its tokens of the step: q [T, Nq, D], k [T, Nkv, D], v [T, Nkv, Dv],
    q_start [B+1] -> [T, Nq, Dv].

    ``layer`` only says whose cache a lowered form is to use. ``biases`` [Nq, 2W-1] are added to scores by distance:
    column W-1+d has that of keys at d = key position - query position; keys farther than W-1 have that of W-1.
    Keys and values are rounded to ``dtype``, f32 or bf16.
    """
    _check_heads(q, k)
    if dtype == "bf16":
        k, v = (x.bfloat16().to(x.dtype) for x in (k, v))
    request = request_of_token(q_start, q.shape[0])  # [T]
    index = torch.arange(q.shape[0], device=q.device)  # [T]; differences within a request are those of positions
    distance = index[None, :] - index[:, None]  # [T, T]
    if causal:
        seen = _causal(index[:, None], index[None, :], window)
    else:
        seen = distance.abs() < window if window else torch.ones_like(distance, dtype=torch.bool)
    visible = (request[:, None] == request[None, :]) & seen
    slope_distance = distance if causal else -distance.abs()
    return _attend(q, k, v, visible, scale, softcap, sinks, slopes, slope_distance, _by_distance(biases, distance))


def _by_distance(biases: torch.Tensor | None, distance: torch.Tensor) -> torch.Tensor | None:
    """biases [Nq, 2W-1], distance [T, S] -> [Nq, T, S]: the bias of each key for each query; None for None."""
    if biases is None:
        return None
    farthest = biases.shape[1] // 2
    return biases[:, distance.clamp(-farthest, farthest) + farthest]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
    choice: Sequence[int] | None = None,
    ends_k_cache: torch.Tensor | None = None,
    ends_v_cache: torch.Tensor | None = None,
    ends_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes each request's attention over all its tokens in the caches: q [T, Nq, D], caches [P, K, Nkv, D] and
    [P, K, Nkv, Dv] -> [T, Nq, Dv].

    block_table [B, M] has the requests' blocks in order, padded with -1; kv_len [B] is the number of tokens in a
    request's cache, including this step's. Slots after kv_len are never read, and may contain NaN.

    ``choice`` = (first, last, best, below): a query at position ``below`` or later attends to some of the whole blocks
    before its own: the ``first`` ones, the ``last`` ones, and the ``best`` ones between them. All query heads of a
    key/value head choose the same (``block_estimates``; of equal estimates the earlier block).

    ``ends_k_cache``, ``ends_v_cache``: caches of the same shapes, with ``ends_table`` [B, M], that are read in place of
    the others for the first ``END`` keys, and for those whose position // ``END`` is at least that of the query less 1.
    """
    _check_heads(q, k_cache)
    requests, blocks = block_table.shape
    length = blocks * k_cache.shape[1]  # most keys of a request
    table = block_table.long().clamp(min=0)
    k = k_cache[table].flatten(0, 2)  # [B*length, Nkv, D]
    v = v_cache[table].flatten(0, 2)

    starts, lengths = q_start.long(), kv_len.long()
    request = request_of_token(starts, q.shape[0])  # [T]
    index = torch.arange(q.shape[0], device=q.device)
    position = (lengths - starts[1:])[request] + index  # [T]; kv_len - (end - start) + (t - start)

    key_position = torch.arange(length, device=q.device).repeat(requests)  # [B*length]
    key_request = torch.arange(requests, device=q.device).repeat_interleave(length)
    present = key_position < lengths[key_request]  # [B*length]
    v = torch.where(present[:, None, None], v, torch.zeros((), dtype=v.dtype, device=v.device))
    visible = (
        (request[:, None] == key_request[None, :])
        & present[None, :]
        & _causal(position[:, None], key_position[None, :], window)
    )
    distance = key_position[None, :] - position[:, None]  # [T, B*length]
    if ends_k_cache is not None and ends_v_cache is not None and ends_table is not None:
        end_blocks = ends_table.long().clamp(min=0)
        ends_v = torch.where(
            present[:, None, None], ends_v_cache[end_blocks].flatten(0, 2), torch.zeros((), dtype=v.dtype)
        )
        run = key_position // END
        near = (run == 0)[None, :] | (run[None, :] >= (position // END)[:, None] - 1)  # [T, B*length]
        k, v = torch.cat((k, ends_k_cache[end_blocks].flatten(0, 2))), torch.cat((v, ends_v))
        visible, distance = torch.cat((visible & ~near, visible & near), -1), torch.cat((distance, distance), -1)
    if choice is None:
        return _attend(q, k, v, visible, scale, softcap, sinks, slopes, distance)
    keys = k.unflatten(0, (requests, blocks, k_cache.shape[1]))[request]  # [T, M, K, Nkv, D]
    seen = _chosen(block_estimates(q, keys), position // k_cache.shape[1], position, choice)  # [T, Nkv, M]
    mine = torch.zeros((*seen.shape[:2], requests, blocks), dtype=torch.bool, device=q.device)  # [T, Nkv, B, M]
    mine[index, :, request] = seen
    chosen = mine.flatten(2).repeat_interleave(k_cache.shape[1], -1).transpose(0, 1)[:, None]  # [Nkv, 1, T, B*length]
    return _attend(q, k, v, visible & chosen, scale, softcap, sinks, slopes, distance)


def block_estimates(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [T, Nq, D], keys [T, M, K, Nkv, D] in M blocks -> [T, Nkv, g, M]: estimates of the largest score before
    scaling.

    An estimate is the sum over d of q_d * center_d + |q_d| * spread_d. The center is the mean of two values: the mean
    of channel d in the block, and the middle of its range. The spread is a quarter of the range. Both are rounded to
    bf16. (The middle alone with half of the range would be Quest's bound, https://arxiv.org/abs/2406.10774.)
    """
    wide = accumulate_dtype(q)
    wide_keys = keys.to(wide)
    least, greatest, total = wide_keys.amin(2), wide_keys.amax(2), wide_keys[:, :, 0]
    for i in range(1, wide_keys.shape[2]):  # in this order, as kernels have it
        total = total + wide_keys[:, :, i]
    center = ((total / wide_keys.shape[2] + (least + greatest) / 2) / 2).bfloat16().to(wide)
    spread = ((greatest - least) / 4).bfloat16().to(wide)
    grouped = q.to(wide).unflatten(1, (keys.shape[3], -1))  # [T, Nkv, g, D]
    return torch.einsum("tngd,tmnd->tngm", grouped, center) + torch.einsum("tngd,tmnd->tngm", grouped.abs(), spread)


def _chosen(
    estimates: torch.Tensor, whole: torch.Tensor, position: torch.Tensor, choice: Sequence[int]
) -> torch.Tensor:
    """estimates [T, Nkv, g, M], whole and position [T] -> bool [T, Nkv, M]: the blocks that each row sees.

    A block is as good as the largest, over the query heads, of its estimate less the head's largest one.
    """
    first, last, best, below = choice
    block = torch.arange(estimates.shape[-1], device=estimates.device)
    current = whole[:, None]  # [T, 1]
    other = (block >= first) & (block < current - last) & (position[:, None] >= below)  # [T, M]
    estimates = estimates.masked_fill(~other[:, None, None], -torch.inf)
    ranks = (estimates - estimates.amax(-1, keepdim=True)).amax(2).masked_fill(~other[:, None], -torch.inf)
    ordered = ranks.sort(dim=-1, descending=True, stable=True).indices
    place = torch.empty_like(ordered).scatter_(-1, ordered, block.expand_as(ordered).contiguous())
    return (~other[:, None] | (place < best)) & (block <= current)[:, None]


def _causal(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    seen = key <= query
    return seen & (key > query - window) if window else seen


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    distance: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, Nq, D], k [S, Nkv, D], v [S, Nkv, Dv], distance [T, S] -> [T, Nq, Dv]; visible [T, S] or [Nkv, 1, T, S].

    ``bias`` [Nq, T, S] is added to the scores.
    """
    wide = accumulate_dtype(q)
    tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    grouped = q.to(wide).unflatten(1, (kv_heads, heads // kv_heads))  # [T, Nkv, g, D]
    scores = torch.einsum("tngd,snd->ngts", grouped, k.to(wide)) * scale  # [Nkv, g, T, S]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.to(wide).view(kv_heads, heads // kv_heads, 1, 1) * distance
    if bias is not None:
        scores = scores + bias.to(wide).unflatten(0, (kv_heads, heads // kv_heads))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).view(kv_heads, heads // kv_heads, 1, 1).expand(-1, -1, tokens, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = torch.einsum("ngts,sne->tnge", weights, v.to(wide))  # [T, Nkv, g, Dv]
    return out.flatten(1, 2).to(q.dtype).contiguous()


def _check_heads(q: torch.Tensor, k: torch.Tensor) -> None:
    heads, size = k.shape[-2:]
    torch._check(
        q.shape[1] % heads == 0,
        lambda: f"attention: {q.shape[1]} query heads aren't a multiple of {heads} key/value heads",
    )
    torch._check(q.shape[2] == size, lambda: f"attention: head sizes of q {q.shape} and k {k.shape} differ")


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [T, Nq, D], k [.., Nkv, D], v [.., Nkv, Dv], tokens or a cache of any dtype -> [T, Nq, Dv]."""
    _check_heads(q, k)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))


def paged_fake(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """Infers the result of attention over a cache, quantized or not: q [T, Nq, D] -> [T, Nq, Dv]."""
    return _fake(q, k_cache, v_cache)


register(attention, fake=_fake)
register(paged_attention, fake=paged_fake)
