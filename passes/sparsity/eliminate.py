"""Chooses inputs of a product to remove, and computes how the other inputs compensate for them.

For y = x W^T with moments C = X^T X, removing input c and adjusting the other columns by least squares adds ||W_c||^2 /
(C^-1)_cc to the squared error. It leaves moments whose inverse is C^-1 less a rank-1 term. This is the optimal brain
surgeon (Hassibi and Stork, 1993). SparseGPT (Frantar and Alistarh 2023, https://arxiv.org/abs/2301.00774) applies it to
a layer's outputs, ZipLM (Kurtic et al. 2023, https://arxiv.org/abs/2302.04089) to whole structures. So inputs are
removed one by one, always the one that adds the least error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUND = 64
"""The number of inputs among which several are removed before the costs of all others are updated."""


@dataclass(frozen=True)
class Moments:
    """X^T X of some inputs X [T, K] in float64, and the number of tokens T."""

    sum: torch.Tensor
    tokens: int

    @staticmethod
    def from_inputs(x: torch.Tensor, rows: int = 1024) -> Moments:
        """Returns the moments of x [T, K], summed up over ``rows`` tokens at a time."""
        total = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64)
        for part in x.split(rows):
            wide = part.double()
            total += wide.t() @ wide
        return Moments(total, len(x))

    def damped(self, damping: float) -> torch.Tensor:
        """Returns X^T X with ``damping`` times the mean of its diagonal added to the diagonal, so that it has an
        inverse.
        """
        mean = float(self.sum.diagonal().mean()) or 1.0
        result = self.sum.clone()
        result.diagonal().add_(damping * mean)
        return result

    def of_some(self, inputs: Sequence[int]) -> Moments:
        """Returns the moments of the inputs with these indices alone."""
        places = torch.tensor(list(inputs))
        return Moments(self.sum[places][:, places], self.tokens)

    def output(self, weight: torch.Tensor) -> float:
        """Returns ||X W^T||^2 for a weight [N, K]."""
        wide = weight.double()
        return float(((wide @ self.sum) * wide).sum())


def eliminate(moments: Moments, weight: torch.Tensor, count: int, damping: float) -> torch.Tensor:
    """Chooses ``count`` single inputs to remove. Returns their indices in ascending order.

    Args:
        moments: the moments of the K inputs.
        weight: [N, K].
        count: the number of inputs to remove.
        damping: the number added to the moments' diagonal, as a share of the diagonal's mean.
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
    """Chooses at most ``most`` of the inputs ``some`` to remove, and returns them.

    The cheapest one is removed, the costs of the others are computed again, and so on, until the next one costs more
    than ``beyond``, which is the cost of the cheapest input outside ``some``.

    ``inverse`` is the inverse of the moments, ``weight`` [N, K] the weight after earlier removals.
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
    """Chooses ``count`` blocks of inputs to remove, such as the inputs of heads. Returns their indices in ascending
    order.

    It removes always the block with the least cost, as ``eliminate`` does with single inputs. ``blocks`` has the inputs
    of each.
    """
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
    """Returns the Cholesky factor of moments. If rounding has made these indefinite, their diagonal is increased."""
    more = 1e-12 * float(matrix.diagonal().mean())
    while True:
        factor: torch.Tensor
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return factor
        matrix = matrix + more * torch.eye(len(matrix), dtype=matrix.dtype)
        more *= 10


def _remove(inverse: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor) -> None:
    """Removes the inputs ``chosen`` from the inverse moments and the weight, in place. Their rows and columns become 0,
    up to rounding.
    """
    rows = torch.linalg.solve(inverse[chosen][:, chosen], inverse[chosen])  # [n, K]
    weight -= weight[:, chosen] @ rows
    inverse -= inverse[:, chosen] @ rows


def compensation(moments: Moments, removed: torch.Tensor, kept: torch.Tensor, damping: float) -> torch.Tensor:
    """Returns the share of each removed column to add to each kept one, [removed, kept] float32.

    It is the least-squares fit of the removed inputs by the kept ones, C_rk (C_kk + damping)^-1, and doesn't depend on
    the weight.
    """
    covariance = moments.damped(damping)[kept][:, kept]
    factor = _factor(covariance)
    return torch.cholesky_solve(moments.sum[kept][:, removed], factor).t().float()


def output_error(
    moments: Moments, weight: torch.Tensor, removed: torch.Tensor, kept: torch.Tensor, mix: torch.Tensor | None
) -> float:
    """Returns ||X W^T - X' W'^T||^2 / ||X W^T||^2, the relative error of a product without the inputs ``removed``.

    W' has the kept columns of ``weight``. The removed ones are added to these by ``mix`` [removed, kept], unless it is
    None.
    """
    off = torch.zeros(weight.shape, dtype=torch.float64)
    columns = weight[:, removed].double()
    off[:, removed] = columns
    if mix is not None:
        off[:, kept] = -columns @ mix.double()
    whole = moments.output(weight.double())
    return moments.output(off) / whole if whole else 0.0
