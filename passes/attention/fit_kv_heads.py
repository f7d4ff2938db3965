"""Computes the matrices that merge several key/value heads into one: their mean, or a least-squares fit to attention's
results.

Rope rotates pairs of dimensions, so a pair of a key or a query is taken as a complex number: q . k is the real part of
conj(q) k, and a rotation multiplies both by one number. The keys of a group of heads h can therefore be combined before
they are rotated: k' = sum_h conj(u_h) k_h. Here u is the principal direction of the heads' keys, each head weighted by
the size of its queries. Then k_h is nearly u_h k', and the queries of head h are multiplied by conj(u_h).

Dimensions without rotation, and values, are merged by any matrix: the principal directions of all dimensions of a
group. The query projection, or the output projection, then computes from these directions what each query head needs.
The columns of the output projection are fitted by least squares to the former results of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TINY = 1e-30

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""The ridges to try, as shares of the mean of a Gram matrix's diagonal. A ridge keeps a fit from following noise."""

HELD_OUT = 4
"""Every fourth run of adjacent tokens is held out. The error on these decides which ridge is best, or that no fit is
better.
"""


@dataclass(frozen=True)
class RopeLayout:
    """The pairs of a head's dimensions that rope rotates.

    Attributes:
        first, second: the F first and the F second dimensions of the pairs.
        rest: the dimensions that aren't rotated.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    rest: tuple[int, ...]

    @staticmethod
    def from_sizes(size: int, pairs: int, interleaved: bool) -> RopeLayout:
        """Returns the layout of heads whose first ``2 * pairs`` dimensions ``ew.rope`` rotates.

        Args:
            size: the number of dimensions of a head.
            pairs: the number of pairs; 0 for heads that aren't rotated.
            interleaved: True if a pair is two adjacent dimensions; False if its dimensions are ``pairs`` apart.
        """
        first = range(0, 2 * pairs, 2) if interleaved else range(pairs)
        second = range(1, 2 * pairs, 2) if interleaved else range(pairs, 2 * pairs)
        return RopeLayout(tuple(first), tuple(second), tuple(range(2 * pairs, size)))


@dataclass(frozen=True)
class KeyFit:
    """The matrices that merge the keys of a group of G heads into one head.

    Attributes:
        keys: [D, G*D], computes the key of the one head from the keys of the group.
        queries: [G, D, D], applied to the queries of each of the heads.
    """

    keys: torch.Tensor
    queries: torch.Tensor


def mean_of_heads(heads: int, size: int) -> torch.Tensor:
    """Returns the matrix [D, G*D] that computes the mean of G heads (Ainslie et al. 2023,
    https://arxiv.org/abs/2305.13245).

    ``heads`` is G, ``size`` is D.
    """
    return torch.eye(size, dtype=torch.float64).repeat(1, heads) / heads


def one_of_heads(head: int, heads: int, size: int) -> torch.Tensor:
    """Returns the matrix [D, G*D] that selects the head of index ``head`` among G heads. ``heads`` is G, ``size``
    is D.
    """
    picked = torch.zeros(size, heads, size, dtype=torch.float64)
    picked[:, head] = torch.eye(size, dtype=torch.float64)
    return picked.flatten(1)


def fit_keys(q: torch.Tensor, k: torch.Tensor, layout: RopeLayout) -> KeyFit:
    """Fits the matrices that merge the keys of a group of G heads into one head.

    Args:
        q: [T, G, g, D], the queries of each key head.
        k: [T, G, D], the keys. Both may be rotated, or both not.
        layout: the dimensions that are rotated.
    """
    q, k = q.double(), k.double()
    heads, size = k.shape[1:]
    keys = torch.zeros(size, heads, size, dtype=torch.float64)
    queries = torch.zeros(heads, size, size, dtype=torch.float64)
    if layout.first:
        a, b = torch.tensor(layout.first), torch.tensor(layout.second)
        encode, decode = _principal_pairs(torch.complex(q[..., a], q[..., b]), torch.complex(k[..., a], k[..., b]))
        for h in range(heads):
            _put_complex(keys[:, h], encode[h], a, b)
            _put_complex(queries[h], decode[h].conj(), a, b)
    if layout.rest:
        rest = torch.tensor(layout.rest)
        plain_queries, theirs = q[..., rest], k[..., rest].flatten(1)  # [T, G, g, m], [T, G*m]
        met = torch.einsum("tgni,tgnj->gij", plain_queries, plain_queries) / len(q)
        mixed, expand = low_rank(theirs.T @ theirs / len(k), met, len(rest))  # [m, G*m], [G*m, m]
        keys[rest[:, None, None], torch.arange(heads)[None, :, None], rest[None, None, :]] = mixed.unflatten(
            1, (heads, -1)
        )
        for h, part in enumerate(expand.unflatten(0, (heads, -1))):
            queries[h][rest[:, None], rest[None, :]] = part.T
    return KeyFit(keys.flatten(1), queries)


def _principal_pairs(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fits complex factors for the pairs of dimensions of G heads: from k to k', and from k' back to k, [G, F] each.

    ``q`` [T, G, g, F] and ``k`` [T, G, F] are complex.
    """
    power = q.abs().square().sum(2).mean(0)  # [G, F]
    weight = (power + 1e-9 * power.mean(0) + TINY).sqrt()
    weighted = k * weight
    covariance = torch.einsum("tgf,thf->fgh", weighted, weighted.conj()) / len(k)
    direction = torch.linalg.eigh(covariance)[1][..., -1].T  # [G, F]
    # A direction's phase is free: the head that counts most keeps its own.
    largest = direction.gather(0, direction.abs().argmax(0, keepdim=True))
    direction = direction * (largest.conj() / largest.abs().clamp(min=TINY))
    encode, decode = direction.conj() * weight, direction / weight
    # So is its size: k' is as large as keys are, for whatever rounds it.
    merged_size = (encode * k).sum(1).abs().square().mean(0).sqrt()  # [F]
    size = k.abs().square().mean((0, 1)).sqrt()
    scale = torch.where((merged_size > TINY) & (size > TINY), size / merged_size.clamp(min=TINY), torch.ones_like(size))
    return encode * scale, decode / scale


def _put_complex(matrix: torch.Tensor, numbers: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Writes a multiplication by complex ``numbers`` [F] into a real matrix: number f multiplies the pair (a[f],
    b[f]).
    """
    matrix[a, a], matrix[a, b] = numbers.real, -numbers.imag
    matrix[b, a], matrix[b, b] = numbers.imag, numbers.real


def low_rank(covariance: torch.Tensor, weights: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the best approximation of vectors x [G*D] by ``rank`` numbers: an encoder e and a decoder d.

    They minimise the mean of (x - d e x)^T W (x - d e x). W is block-diagonal, with ``weights`` as its blocks.

    Args:
        covariance: [G*D, G*D], the mean of x x^T.
        weights: [G, D, D], symmetric and positive semidefinite, one for each head.
        rank: the number of directions.

    Returns:
        e [rank, G*D] and d [G*D, rank]. If ``rank`` is D, the directions are rotated so that e x is as close to the
            mean of the heads as possible, and scaled to the size of that mean.
    """
    heads, size = weights.shape[:2]
    values, vectors = torch.linalg.eigh(weights)
    values = values.clamp(min=0)
    values = values + 1e-9 * values.mean(1, keepdim=True) + TINY
    root = torch.block_diag(*(vectors * values.sqrt()[:, None]) @ vectors.mT)
    inverse = torch.block_diag(*(vectors / values.sqrt()[:, None]) @ vectors.mT)
    directions = torch.linalg.eigh(root @ covariance @ root)[1][:, -rank:]  # [G*D, rank]
    encode, decode = directions.T @ root, inverse @ directions
    if rank == size:
        mean = mean_of_heads(heads, size)
        u, _, v = torch.linalg.svd(mean @ covariance @ encode.T)
        turn = u @ v
        encode, decode = turn @ encode, decode @ turn.T
        encoded_size, mean_size = (torch.einsum("ij,jk,ik->", m, covariance, m) for m in (encode, mean))
        if encoded_size > TINY and mean_size > TINY:
            scale = (mean_size / encoded_size).sqrt()
            encode, decode = encode * scale, decode / scale
    return encode, decode


def fit_output(before: torch.Tensor, now: torch.Tensor, first: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Fits a matrix M [K, K] that computes attention's former results from the new ones: before = now M^T.

    Errors count as they are after the output projection. The fit is a least-squares change of ``first``; held-out
    tokens choose its ridge, or ``first`` itself.

    Args:
        before, now: [T, K], the former and the new results of a group's query heads, next to each other.
        first: [K, K], the start of the fit.
        output: [H, K], the group's columns of the output projection.
    """
    left = before - now @ first.T
    held = _held_out(len(now))
    best: tuple[float, float | None] = (_squares(left[held] @ output.T), None)
    gram, cross = now[~held].T @ now[~held], left[~held].T @ now[~held]
    for ridge in RIDGES:
        step = _solved(gram, cross, ridge)
        error = _squares((left[held] - now[held] @ step.T) @ output.T)
        best = min(best, (error, ridge), key=lambda one: one[0])
    if best[1] is None:
        return first
    return first + _solved(now.T @ now, left.T @ now, best[1])


def _held_out(tokens: int) -> torch.Tensor:
    """Returns a mask [T] of held-out tokens. They are runs of adjacent tokens, because adjacent tokens are similar."""
    stretch = max(1, tokens // (HELD_OUT * 8))
    return (torch.arange(tokens) // stretch) % HELD_OUT == HELD_OUT - 1


def _solved(gram: torch.Tensor, cross: torch.Tensor, ridge: float) -> torch.Tensor:
    """Returns the matrix W with the least |W x - y|^2, from ``gram`` (the sum of x x^T) and ``cross`` (the sum of y
    x^T).

    ``ridge`` times the mean of gram's diagonal is added to that diagonal.
    """
    size = gram.diagonal().mean() * ridge + TINY
    solved: torch.Tensor = torch.linalg.solve(gram + size * torch.eye(len(gram), dtype=gram.dtype), cross.T)
    return solved.T


def _squares(x: torch.Tensor) -> float:
    return float(x.square().sum())


def relative_error(now: torch.Tensor, before: torch.Tensor) -> float:
    """Returns |now - before|^2 / |before|^2, with squared Frobenius norms."""
    return _squares(now - before) / max(_squares(before), TINY)


def balanced_groups(similarity: torch.Tensor, count: int) -> tuple[tuple[int, ...], ...]:
    """Divides N items into ``count`` groups of equal size with similar items.

    It exchanges two items of different groups until no exchange increases the similarity within groups. Returns the
    sorted indices of each group.

    Args:
        similarity: [N, N], symmetric.
        count: the number of groups.
    """
    total = len(similarity)
    size = total // count
    groups = [list(range(i * size, (i + 1) * size)) for i in range(count)]
    while True:
        best: tuple[float, int, int, int, int] | None = None
        for i in range(count):
            for j in range(i + 1, count):
                for a, x in enumerate(groups[i]):
                    for b, y in enumerate(groups[j]):
                        gain = _gain(similarity, groups[i], groups[j], x, y)
                        if gain > 1e-9 and (best is None or gain > best[0]):
                            best = gain, i, a, j, b
        if best is None:
            return tuple(sorted(tuple(sorted(group)) for group in groups))
        _, i, a, j, b = best
        groups[i][a], groups[j][b] = groups[j][b], groups[i][a]


def _gain(similarity: torch.Tensor, one: Sequence[int], other: Sequence[int], x: int, y: int) -> float:
    """Returns by how much the similarity within two groups grows if item x of ``one`` is exchanged for item y of
    ``other``.
    """
    stay, theirs = [i for i in one if i != x], [i for i in other if i != y]
    now = similarity[x, stay].sum() + similarity[y, theirs].sum()
    then = similarity[y, stay].sum() + similarity[x, theirs].sum()
    return float(then - now)
