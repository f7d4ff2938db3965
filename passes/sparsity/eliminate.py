"""Chooses inputs of a product that can go, and the compensation by the others.

Of y = x W^T with moments C = X^T X, removing input c and adjusting the other columns by least squares costs
||W_c||^2 / (C^-1)_cc more squared error, and leaves moments whose inverse is C^-1 less a rank-1 term: the optimal brain
surgeon (Hassibi and Stork, 1993), for a layer's outputs as in SparseGPT (Frantar and Alistarh 2023,
https://arxiv.org/abs/2301.00774) and for whole structures as in ZipLM (Kurtic et al. 2023,
https://arxiv.org/abs/2302.04089). So inputs go one by one, each the cheapest after those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUND = 64
"""Single inputs that are looked at together: what is left is brought up to date once for all that go of them."""


@dataclass(frozen=True)
class Moments:
    """X^T X of some inputs [T, K], float64, and how many tokens that were."""

    sum: torch.Tensor
    tokens: int

    @staticmethod
    def from_inputs(x: torch.Tensor, rows: int = 1024) -> Moments:
        """Sums x^T x of x [T, K], a few rows at a time."""
        total = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64)
        for part in x.split(rows):
            wide = part.double()
            total += wide.t() @ wide
        return Moments(total, len(x))

    def damped(self, damping: float) -> torch.Tensor:
        """The sum with ``damping`` times its mean diagonal added to the diagonal, so that it has an inverse."""
        mean = float(self.sum.diagonal().mean()) or 1.0
        result = self.sum.clone()
        result.diagonal().add_(damping * mean)
        return result

    def of_some(self, inputs: Sequence[int]) -> Moments:
        """Picks the moments of some inputs alone."""
        places = torch.tensor(list(inputs))
        return Moments(self.sum[places][:, places], self.tokens)

    def output(self, weight: torch.Tensor) -> float:
        """||X W^T||^2 of a weight [N, K]."""
        wide = weight.double()
        return float(((wide @ self.sum) * wide).sum())


def eliminate(moments: Moments, weight: torch.Tensor, count: int, damping: float) -> torch.Tensor:
    """The ``count`` single inputs that go, in order of their numbers.

    Args:
        moments: the moments of the K inputs.
        weight: [N, K].
        damping: see ``Moments.damped``: how little what the inputs show is trusted.
    """
    inverse, left = _inverse(moments, damping), weight.double().clone()
    gone = torch.zeros(weight.shape[1], dtype=torch.bool)
    while int(gone.sum()) < count:
        scores = (left.square().sum(0) / inverse.diagonal().clamp(min=1e-300)).masked_fill(gone, torch.inf)
        order = scores.argsort(stable=True)
        some = order[: min(ROUND, len(gone) - int(gone.sum()))]
        beyond = float(scores[order[len(some)]]) if len(order) > len(some) else torch.inf
        chosen = _round(inverse, left, some, beyond, count - int(gone.sum()))
        _remove(inverse, left, chosen)
        gone[chosen] = True
    return gone.nonzero()[:, 0]


def _round(inverse: torch.Tensor, weight: torch.Tensor, some: torch.Tensor, beyond: float, most: int) -> torch.Tensor:
    """Chooses inputs among ``some`` to remove, at most ``most``.

    The cheapest is removed, the costs of the others are computed anew, and so on. It stops before an input that costs
    more than ``beyond``: that is the cost of the cheapest input outside of ``some``.
    """
    block, columns = inverse[some][:, some], weight[:, some]
    gone: list[int] = []
    while len(gone) < min(most, len(some)):
        scores = columns.square().sum(0) / block.diagonal().clamp(min=1e-300)
        scores[gone] = torch.inf
        best = int(scores.argmin())
        if gone and float(scores[best]) > beyond:
            break
        row = block[best] / block[best, best]
        columns = columns - columns[:, best : best + 1] * row
        block = block - block[:, best : best + 1] * row
        gone.append(best)
    return some[gone]


def eliminate_blocks(
    moments: Moments, weight: torch.Tensor, blocks: Sequence[Sequence[int]], count: int, damping: float
) -> list[int]:
    """Chooses as ``eliminate`` does among blocks of inputs, such as a head's: the numbers of those that go."""
    inverse, left = _inverse(moments, damping), weight.double().clone()
    places = [torch.tensor(list(block)) for block in blocks]
    gone: list[int] = []
    while len(gone) < count:
        costs = [torch.inf if i in gone else _block_cost(inverse, left, p) for i, p in enumerate(places)]
        best = min(range(len(costs)), key=costs.__getitem__)
        _remove(inverse, left, places[best])
        gone.append(best)
    return sorted(gone)


def _block_cost(inverse: torch.Tensor, weight: torch.Tensor, block: torch.Tensor) -> float:
    columns = weight[:, block]  # [N, n]
    return float((torch.linalg.solve(inverse[block][:, block], columns.t()) * columns.t()).sum())


def _inverse(moments: Moments, damping: float) -> torch.Tensor:
    return torch.cholesky_inverse(_factor(moments.damped(damping)))


def _factor(matrix: torch.Tensor) -> torch.Tensor:
    """The Cholesky factor. Rounding may make a matrix of moments indefinite: then its diagonal becomes larger."""
    more = 1e-12 * float(matrix.diagonal().mean())
    while True:
        factor: torch.Tensor
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return factor
        matrix = matrix + more * torch.eye(len(matrix), dtype=matrix.dtype)
        more *= 10


def _remove(inverse: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor) -> None:
    """Takes inputs out of both, in place; their own rows and columns become zero but for rounding."""
    rows = torch.linalg.solve(inverse[chosen][:, chosen], inverse[chosen])  # [n, K]
    weight -= weight[:, chosen] @ rows
    inverse -= inverse[:, chosen] @ rows


def compensation(moments: Moments, removed: torch.Tensor, kept: torch.Tensor, damping: float) -> torch.Tensor:
    """Returns the best share of each removed column to add to each kept one, [removed, kept] float32.

    The least-squares fit of the removed inputs by the kept ones, C_rk (C_kk + damping)^-1, whatever the weight.
    """
    covariance = moments.damped(damping)[kept][:, kept]
    factor = _factor(covariance)
    return torch.cholesky_solve(moments.sum[kept][:, removed], factor).t().float()


def output_error(
    moments: Moments, weight: torch.Tensor, removed: torch.Tensor, kept: torch.Tensor, mix: torch.Tensor | None
) -> float:
    """||X W^T - X' W'^T||^2 / ||X W^T||^2, where W' is without the removed columns, mixed into the kept ones or not."""
    off = torch.zeros(weight.shape, dtype=torch.float64)
    columns = weight[:, removed].double()
    off[:, removed] = columns
    if mix is not None:
        off[:, kept] = -columns @ mix.double()
    whole = moments.output(weight.double())
    return moments.output(off) / whole if whole else 0.0
