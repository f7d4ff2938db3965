"""Fits the matrices that merge the key/value heads of one attention into fewer, on recorded values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from enginewright.passes.framework.kv_options import KvOptions

from .fit_kv_heads import (
    TINY,
    RopeLayout,
    balanced_groups,
    fit_keys,
    fit_output,
    low_rank,
    mean_of_heads,
    one_of_heads,
    relative_error,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes attention for some of a layer's query heads.

The arguments are q [T, n, D], k [T, m, D], v [T, m, Dv], and the indices of the query heads in the layer, [n]. The
result is [T, n, Dv].
"""


@dataclass(frozen=True)
class Seen:
    """The recorded inputs of one attention, and the computations that follow them.

    Attributes:
        q, k: [T, Nq, D] and [T, Nkv, D], before any norm and rotation.
        v: [T, Nkv, Dv].
        after_q, after_k: apply the norms and rotations to q and to k.
        normed: True if one of these is a norm. Then no change of the queries makes up for combined keys.
        layout: the pairs of dimensions that are rotated.
        attend: computes the attention.
        output: the weight of the projection after it, [H, Nq*Dv].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    after_q: Callable[[torch.Tensor], torch.Tensor]
    after_k: Callable[[torch.Tensor], torch.Tensor]
    normed: bool
    layout: RopeLayout
    attend: Attend
    output: torch.Tensor


@dataclass(frozen=True)
class HeadMixes:
    """The matrices that merge J groups of G key/value heads into one head each.

    Attributes:
        groups: [J][G], the indices of the key/value heads of each group.
        order: [Nq], the indices of the query heads in the order of their groups.
        keys: [J, D, G*D], computes a merged key from the keys of a group.
        values: [J, Dv, G*Dv], the same for values.
        queries: [Nq, D, D], multiplies the queries, in the new order; None leaves them unchanged.
        output: [J, K, K] with K = Nq/J*Dv, computes the results that the projection read before from the new results of
            a group's query heads; None if the results are the same.
        note: the difference from the recipe, with its reason; "" if there is none.
    """

    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None = None
    output: torch.Tensor | None = None
    note: str = ""

    @property
    def reordered(self) -> bool:
        """True if the order of the query heads changes."""
        return list(self.order) != sorted(self.order)


@dataclass(frozen=True)
class Regrouped:
    """The fitted matrices, and their effect on the recorded tokens.

    Attributes:
        mixes: the matrices.
        context: the attention's new result [T, Nq, Dv].
        output: the new weight of the projection after it.
        error: |now - before|^2 / |before|^2 of the projection's result.
    """

    mixes: HeadMixes
    context: torch.Tensor
    output: torch.Tensor
    error: float


def mean_mixes(groups: tuple[tuple[int, ...], ...], queries: int, size: int, value_size: int) -> HeadMixes:
    """Returns the matrices that replace each group of key/value heads by its mean.

    Args:
        groups: the indices of the heads of each group.
        queries: the number of query heads.
        size, value_size: D and Dv.
    """
    each = queries // sum(map(len, groups))
    mean_keys, mean_values = mean_of_heads(len(groups[0]), size), mean_of_heads(len(groups[0]), value_size)
    count = len(groups)
    return HeadMixes(groups, _order(groups, each), mean_keys.expand(count, -1, -1), mean_values.expand(count, -1, -1))


def neighbours(heads: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Divides the indices of ``heads`` heads into ``count`` groups of adjacent ones."""
    size = heads // count
    return tuple(tuple(range(i * size, (i + 1) * size)) for i in range(count))


def regroup(seen: Seen, count: int, options: KvOptions) -> Regrouped:
    """Merges an attention's key/value heads into ``count``: chooses the groups, and the matrices that merge each.

    ``options`` decides if groups are adjacent or similar heads, and if matrices are means or fitted to the recorded
    tokens. Each fit uses the results of the fits before it, and is solved in float64.
    """
    heads, queries = seen.k.shape[1], seen.q.shape[1]
    groups = neighbours(heads, count)
    if options.grouping == "similar" and 1 < count < heads:
        groups = balanced_groups(_similarity(seen, options), count)
    before = seen.attend(seen.after_q(seen.q), seen.after_k(seen.k), seen.v, torch.arange(queries))
    mixes = mean_mixes(groups, queries, seen.k.shape[2], seen.v.shape[2])
    if options.method == "calibrated":
        mixes = _calibrated(seen, mixes, before)
    context, output = _applied(seen, mixes)
    regrouped, original = context.flatten(1) @ output.T, before.flatten(1) @ seen.output.T
    return Regrouped(mixes, context, output, relative_error(regrouped, original))


def _order(groups: tuple[tuple[int, ...], ...], each: int) -> tuple[int, ...]:
    return tuple(h * each + i for group in groups for h in group for i in range(each))


def _calibrated(seen: Seen, start: HeadMixes, before: torch.Tensor) -> HeadMixes:
    heads, queries = seen.k.shape[1], seen.q.shape[1]
    each, size = queries // heads, seen.k.shape[2]
    keys, query_mixes, values, outputs = [], [], [], []
    note = ""
    for j, group in enumerate(start.groups):
        mine = list(start.order[j * len(group) * each : (j + 1) * len(group) * each])
        q = seen.q[:, mine].unflatten(1, (len(group), each))  # [T, G, g, D]
        k = seen.k[:, list(group)]
        if seen.normed:
            mix, chosen = _best_unmixed(seen, mine, group)
            note = f"{note}, {chosen}" if note else f"a norm stands behind the keys, which no mix passes: {chosen}"
            query_mix = torch.eye(size, dtype=torch.float64).expand(len(group), size, size)
        else:
            fitted = fit_keys(q, k, seen.layout)
            mix, query_mix = fitted.keys, fitted.queries
        keys.append(mix)
        query_mixes.append(query_mix.repeat_interleave(each, 0))  # [G*g, D, D]
        value, output = _fit_values(seen, before[:, mine], mine, group, mix, query_mixes[-1])
        values.append(value)
        outputs.append(output)
    return HeadMixes(
        start.groups,
        start.order,
        torch.stack(keys),
        torch.stack(values),
        None if seen.normed else torch.cat(query_mixes),
        torch.stack(outputs),
        note,
    )


def _fit_values(
    seen: Seen, before: torch.Tensor, mine: list[int], group: tuple[int, ...], mix: torch.Tensor, made: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fits the values of one group of G heads, after its keys.

    Args:
        seen: the recorded inputs.
        before: the former results of the group's query heads, [T, n, Dv].
        mine: the indices of these query heads.
        group: the indices of the key/value heads.
        mix: [D, G*D], the fitted keys.
        made: [n, D, D], the matrices of the queries.

    Returns:
        a matrix [Dv, G*Dv] that merges the values, and one [K, K] that computes the former results from the new ones.
    """
    heads, value_size = len(group), seen.v.shape[2]
    each = len(mine) // heads
    q = seen.after_q(torch.einsum("tnd,ned->tne", seen.q[:, mine], made.float()))
    k = seen.after_k((seen.k[:, list(group)].flatten(1) @ mix.float().T)[:, None])
    v = seen.v[:, list(group)].flatten(1)[:, None]  # [T, 1, G*Dv]
    columns = seen.output.unflatten(1, (-1, value_size))[:, mine].double()  # [H, n, Dv]
    covariance = torch.zeros(heads * value_size, heads * value_size, dtype=torch.float64)
    for i, head in enumerate(mine):
        head_output = seen.attend(q[:, i : i + 1], k, v, torch.tensor([head]))[:, 0].double()  # [T, G*Dv]
        covariance += head_output.T @ head_output / (len(head_output) * len(mine))
    read = columns.unflatten(1, (heads, each))
    weights = torch.einsum("hgia,hgib->gab", read, read)
    encode, decode = low_rank(covariance, weights, value_size)
    now = seen.attend(q, k, (v[:, 0] @ encode.float().T)[:, None], torch.tensor(mine)).flatten(1).double()
    first = torch.block_diag(*decode.unflatten(0, (heads, -1)).repeat_interleave(each, 0))
    return encode, fit_output(before.flatten(1).double(), now, first, columns.flatten(1))


def _best_unmixed(seen: Seen, mine: list[int], group: tuple[int, ...]) -> tuple[torch.Tensor, str]:
    """Chooses the merged keys of a group if a norm follows: the heads' mean, or the keys of one head.

    Args:
        seen: the recorded queries and keys of the layer.
        mine: indices of the query heads that read the group's keys.
        group: indices of the G key/value heads to merge.

    Returns:
        the matrix [D, G*D] for which the scores change least, and its description.
    """
    heads, size = len(group), seen.k.shape[2]
    k = seen.k[:, list(group)]
    q = seen.after_q(seen.q[:, mine]).double().unflatten(1, (heads, -1))  # [T, G, g, D]
    keys = seen.after_k(k).double()
    met = torch.einsum("tgni,tgnj->gij", q, q) / len(q)
    names = ["the mean of heads " + " and ".join(map(str, group)), *(f"those of head {h}" for h in group)]
    mixes = [mean_of_heads(heads, size), *(one_of_heads(i, heads, size) for i in range(heads))]
    errors = []
    for mix in mixes:
        off = keys - seen.after_k((k.flatten(1) @ mix.float().T)[:, None]).double()  # [T, G, D]
        errors.append(float(torch.einsum("tgi,gij,tgj->", off, met, off)))
    best = min(range(len(mixes)), key=errors.__getitem__)
    return mixes[best], names[best]


def _applied(seen: Seen, mixes: HeadMixes) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies the matrices: returns the attention's new results [T, Nq, Dv], and the new weight of the projection after
    it.
    """
    value_size = seen.v.shape[2]
    order = torch.tensor(mixes.order)
    q = seen.q[:, order]
    if mixes.queries is not None:
        q = torch.einsum("tnd,ned->tne", q, mixes.queries.float())
    groups = torch.tensor(mixes.groups)  # [J, G]
    k = torch.einsum("tjm,jdm->tjd", seen.k[:, groups].flatten(2), mixes.keys.float())
    v = torch.einsum("tjm,jdm->tjd", seen.v[:, groups].flatten(2), mixes.values.float())
    context = seen.attend(seen.after_q(q), seen.after_k(k), v, order)
    output = seen.output.unflatten(1, (-1, value_size))[:, order].flatten(1)
    if mixes.output is not None:
        blocks = output.unflatten(1, (len(mixes.groups), -1)).double()  # [H, J, K]
        output = torch.einsum("hjk,jkm->hjm", blocks, mixes.output).flatten(1).float()
    return context, output


def _similarity(seen: Seen, options: KvOptions) -> torch.Tensor:
    """Returns the similarity [Nkv, Nkv] of key/value heads, as the merging of ``options`` sees it: the sum of keys' and
    values'.
    """
    k, v = seen.k.double(), seen.v.double()
    if options.method == "mean" or seen.normed:
        return _cosines(k) + _cosines(v)
    pairs = torch.complex(k[..., list(seen.layout.first)], k[..., list(seen.layout.second)])  # [T, N, F]
    products = torch.einsum("taf,tbf->fab", pairs, pairs.conj()).abs()  # whatever turn is between two heads
    parts = [products.sum(0)] if seen.layout.first else []
    if seen.layout.rest:
        parts.append(_shared(k[..., list(seen.layout.rest)]))
    return _normed(torch.stack(parts).sum(0)) + _normed(_shared(v))


def _cosines(x: torch.Tensor) -> torch.Tensor:
    return _normed(torch.einsum("tad,tbd->ab", x, x))


def _shared(x: torch.Tensor) -> torch.Tensor:
    """Returns the similarity [N, N] of heads x [T, N, D] up to a linear map between them.

    It is the Frobenius norm of the cross-covariance of each two heads.
    """
    return torch.einsum("tai,tbj->abij", x, x).square().sum((2, 3)).sqrt()


def _normed(products: torch.Tensor) -> torch.Tensor:
    size = products.diagonal().clamp(min=TINY).sqrt()
    return products / size[:, None] / size[None, :]
