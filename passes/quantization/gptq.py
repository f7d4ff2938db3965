"""GPTQ: chooses integers of 2 to 6 bits column by column. Later columns compensate for the rounding error of each.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323. For a weight W [N, K] and inputs X [T, K] it minimises ||X W^T -
X Q^T||, for which it needs only X^T X [K, K]. As in the paper, columns are processed in blocks, with the factor of the
damped inverse Hessian, and the columns of the largest inputs first (activation order). The differences from the paper:

- Groups are static: their scales are chosen first, so that columns can have any order and a group's columns stay
  together.
- A scale is the best of some candidates by the squared error of its group, weighted by the inputs of each column.
- When the integers are known, all scales of a row are solved for together, which can only reduce the error. This is
  left out for weights of more than 2048 columns, where it would take longer than all the rest, and for scales in
  blocks.
- The factor is computed in float64, in place and in panels, because X^T X with few strong directions is badly
  conditioned.
- A column that is zero on every token is rounded to the nearest, not set to zero: other texts may need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from enginewright.passes.framework.weight_formats import GptqOptions
from enginewright.runtime.shared.errors import PassError

from ..formats.grid import Grid, find_scales, find_scales_and_offsets
from ..ir.prequantized import CodeFormat, Codes
from ..ops.quantization import scales_as_floats, scales_in_blocks

DAMPING = GptqOptions().damping
"""The number added to the Hessian's diagonal by default, as a share of the diagonal's mean."""

MOST_DAMPING = 10.0
"""The largest damping: with more, the Hessian has no effect."""

MOST_TO_REFIT = 2048
"""The most columns of a weight whose scales are solved for again. That reduces an error by 1 to 4 %. For wide layers it
takes three times as long as all the rest.
"""

_BLOCK = 64
"""The number of columns that are chosen before all columns after them are updated together; a multiple of 4."""

_PANEL = 256
"""The number of columns of the factor that are computed at a time."""

_CHUNK_ELEMENTS = 1 << 22
"""The number of elements of a weight that are processed together in steps that treat rows independently."""


class Hessian:
    """X^T X of a linear's inputs, summed up as tokens are added.

    Attributes:
        size: K.
        tokens: the number of tokens added.
        sum: [K, K] float32.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens = 0
        self.sum = torch.zeros((size, size))

    def add(self, x: torch.Tensor) -> None:
        """Adds inputs [.., K] float32."""
        rows = x.reshape(-1, self.size)
        self.tokens += len(rows)
        self.sum.addmm_(rows.t(), rows)


@dataclass(frozen=True)
class Factor:
    """The upper triangular matrix R by which rounding errors are distributed: R^T R is the inverse of the damped
    Hessian.

    Attributes:
        order: [K], the columns in the order in which they are rounded, which is the order of R.
        upper: [K, K] float32, R.
        damping: the damping that was needed, as a share of the mean of the diagonal.
        unused: the number of columns that are zero on every token.
    """

    order: torch.Tensor
    upper: torch.Tensor
    damping: float
    unused: int


def factorize(hessian: torch.Tensor, *, activation_order: bool = True, damping: float = DAMPING) -> Factor:
    """Returns the factor of X^T X [K, K].

    If the matrix isn't positive definite with ``damping``, it is multiplied by ten until it is.

    Args:
        hessian: X^T X.
        activation_order: True to order columns by their inputs, the largest first.
        damping: the number added to the diagonal, as a share of the diagonal's mean.

    Raises:
        PassError: the matrix isn't finite, or isn't positive definite with MOST_DAMPING.
    """
    diagonal = hessian.diagonal().clone()
    if not torch.isfinite(diagonal).all():
        raise PassError(
            "the calibration tokens give inputs that are not finite",
            hint="The weights may be damaged, or too large for 32-bit floats.",
        )
    unused = diagonal == 0
    order = torch.argsort(diagonal, descending=True, stable=True) if activation_order else torch.arange(len(diagonal))
    backwards = order.flip(0)
    mean = float(diagonal.double().mean()) or 1.0
    while damping <= MOST_DAMPING:
        # With J the reversal: J H J = L L^T makes H = (J L J)(J L J)^T, whose inverse is R^T R with R = J L^-1 J.
        work = torch.empty(hessian.shape, dtype=torch.float64)
        for rows in torch.arange(len(order)).split(_PANEL):
            work[rows] = hessian[backwards[rows]][:, backwards].double()
        work.diagonal().add_(torch.where(unused, mean, 0.0).double()[backwards] + damping * mean)
        if _cholesky_in_place(work):
            return Factor(order, _inverted_backwards(work), damping, int(unused.sum()))
        damping *= 10
    raise PassError(
        "the products of a linear's inputs make no positive definite matrix, however much it is damped",
        hint='Calibrate with more tokens, or set method = "nearest" in the recipe.',
    )


def _cholesky_in_place(a: torch.Tensor) -> bool:
    """Replaces the lower triangle of ``a`` by its Cholesky factor. Returns False if ``a`` isn't positive definite."""
    for start in range(0, len(a), _PANEL):
        stop = min(start + _PANEL, len(a))
        if start:
            a[start:, start:stop].addmm_(a[start:, :start], a[start:stop, :start].t(), alpha=-1)
        corner, failed = torch.linalg.cholesky_ex(a[start:stop, start:stop])
        if failed or not torch.isfinite(corner).all():
            return False
        a[start:stop, start:stop] = corner
        if stop < len(a):
            a[stop:, start:stop] = torch.linalg.solve_triangular(corner, a[stop:, start:stop].t(), upper=False).t()
    return True


def _inverted_backwards(lower: torch.Tensor) -> torch.Tensor:
    """Returns J L^-1 J as float32. L is the lower triangle of ``lower``, and J reverses the order of rows."""
    size = len(lower)
    upper = torch.zeros((size, size))
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        unit = torch.zeros((size - start, stop - start), dtype=torch.float64)
        unit.diagonal().fill_(1.0)
        columns = torch.linalg.solve_triangular(lower[start:, start:], unit, upper=False)
        upper[: size - start, size - stop : size - start] = columns.flip(0, 1).float()
    return upper


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    code_format: CodeFormat,
    factor: Factor | None = None,
    *,
    keep_zeros: bool = False,
) -> Codes:
    """Chooses the integers of a weight by its inputs on calibration tokens.

    Args:
        weight: [N, K] float32.
        hessian: X^T X of its inputs, [K, K] float32.
        code_format: a format of integers, in groups that divide K.
        factor: the factor of ``hessian``; None computes it.
        keep_zeros: True if zeros of the weight stay zero, as sparsity requires.

    Raises:
        PassError: the weight is too large for float16 scales, or ``hessian`` is invalid; see ``factorize``.
    """
    factor = factor or factorize(hessian)
    importance = hessian.diagonal() / (hessian.diagonal().mean() or 1.0)
    scales, offsets = choose_scales(weight, importance, code_format)
    values = _round_columns(weight, factor, scales, offsets, code_format, keep_zeros)
    if len(hessian) <= MOST_TO_REFIT and not code_format.scale_block:
        scales, offsets = refit_scales(weight, hessian, values, scales, offsets, factor.damping)
    return Codes(values, scales, offsets)


def choose_scales(
    weight: torch.Tensor, importance: torch.Tensor, code_format: CodeFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scales of a weight's groups, and offsets if the format has them, with the least squared error.

    They are float16 [N, groups], or the nearest ones in blocks (``scales_in_blocks``).

    Args:
        weight: [N, K] float32.
        importance: [K], the factor of each column's squared error.
        code_format: the format of the integers; offsets are None if it has none.

    Raises:
        PassError: a scale is too large for float16.
    """
    size, block = code_format.group_size, code_format.scale_block
    weights = (importance.clamp(min=1e-6 * float(importance.max()) or 1.0)).view(-1, size)  # [groups, G]
    rows = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    grid = Grid.of(code_format.storage, offsets=code_format.offsets)
    parts = [part.unflatten(-1, (-1, size)) for part in weight.split(rows)]
    if code_format.offsets:
        pairs = [find_scales_and_offsets(part, weights, grid) for part in parts]
        factors = [torch.cat(some) for some in zip(*pairs, strict=True)]
    else:
        factors = [torch.cat([find_scales(part, weights, grid) for part in parts])]
    stored = [scales_in_blocks(f, block) for f in factors] if block else factors
    if not all(torch.isfinite(scales_as_floats(f, len(weights))).all() for f in stored):
        raise PassError(
            f"a weight of magnitude {weight.abs().max().item():g} is too large for float16 scales",
            hint='Give the module another format by an override in the recipe, such as { storage = "f32" }.',
        )
    return stored[0], stored[1] if code_format.offsets else None


def _round_columns(
    weight: torch.Tensor,
    factor: Factor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    code_format: CodeFormat,
    keep_zeros: bool = False,
) -> torch.Tensor:
    """Rounds the columns of a weight in the order of the factor, and distributes the error of each over later columns.

    Scales and offsets [N, groups] are given. With ``keep_zeros``, the weight's zeros stay zeros. Returns the integers
    [N, K], int8.
    """
    order, grid = factor.order, Grid.of(code_format.storage, offsets=code_format.offsets)
    group_of, groups = order // code_format.group_size, weight.shape[1] // code_format.group_size
    by_group = scales_as_floats(scales, groups).t().contiguous()  # [groups, N]
    offset_by_group = None if offsets is None else scales_as_floats(offsets, groups).t().contiguous()
    values = torch.empty(weight.shape[::-1], dtype=torch.int8)

    def choose(at: int, rest: torch.Tensor) -> torch.Tensor:
        scale = by_group[group_of[at]]
        offset = 0.0 if offset_by_group is None else offset_by_group[group_of[at]]
        chosen = grid.quantized(rest[0], scale, offset)
        if keep_zeros:
            chosen *= weight[:, order[at]] != 0
        values[order[at]] = chosen.to(torch.int8)
        chosen *= scale
        chosen += offset
        return chosen

    sweep(weight, factor, choose)
    return values.t().contiguous()


def sweep(weight: torch.Tensor, factor: Factor, choose: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Chooses values for the columns of a weight [N, K] in the order of the factor, and distributes the error of each
    over later columns.

    ``choose(at, rest)`` returns the values [N] of column number ``at`` in that order. ``rest`` [.., N] has the column
    and those after it in its block, with the errors of earlier ones.
    """
    upper = factor.upper
    columns = weight.t()[factor.order].float().contiguous()  # [K, N]: a column's values are neighbours
    for start in range(0, len(columns), _BLOCK):
        stop = min(start + _BLOCK, len(columns))
        block = columns[start:stop]
        errors = torch.empty_like(block)
        for i, column in enumerate(block):
            at = start + i
            torch.div(column - choose(at, block[i:]), upper[at, at], out=errors[i])
            if at + 1 < stop:
                block[i + 1 :].addr_(upper[at, at + 1 : stop], errors[i], alpha=-1)
        if stop < len(columns):
            columns[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)


def refit_scales(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    damping: float = DAMPING,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the best scales and offsets for known integers, by least squares with the Hessian.

    Each row gets the new or the old ones, whichever have the smaller error as float16.

    Args:
        weight: [N, K] float32.
        hessian: X^T X of its inputs.
        values: the integers [N, K].
        scales, offsets: the old ones; offsets are None if the format has none.
        damping: the number added to the Hessian's diagonal, as a share of the diagonal's mean.
    """
    count, size = scales.shape[1], weight.shape[1] // scales.shape[1]
    unknowns = count * (1 if offsets is None else 2)
    damped = hessian + torch.diag(torch.full((len(hessian),), damping * float(hessian.diagonal().mean())))
    new_scales, new_offsets = scales.clone(), None if offsets is None else offsets.clone()
    rows = max(1, _CHUNK_ELEMENTS // max(len(hessian), unknowns * unknowns))
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        target, integers = weight[part].float(), values[part].float()
        basis = [integers] if offsets is None else [integers, torch.ones_like(integers)]
        gram = torch.empty((len(target), unknowns, unknowns))
        for i, left in enumerate(basis):
            for g in range(count):
                at = slice(g * size, (g + 1) * size)
                seen = left[:, at] @ damped[at]  # [n, K]
                sums = [(seen * right).unflatten(-1, (count, size)).sum(-1) for right in basis]
                gram[:, i * count + g] = torch.cat(sums, -1)
        projected = target @ damped
        right_side = torch.cat([(projected * b).unflatten(-1, (count, size)).sum(-1) for b in basis], -1)
        old = [scales[part]] if offsets is None else [scales[part], offsets[part]]
        before = torch.cat(old, -1).float()
        ridge = 1e-6 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(unknowns)
        # What the old ones leave is solved for, so that directions which nothing decides stay as they are.
        left_over = right_side - (gram @ before[..., None])[..., 0]
        solved, failed = torch.linalg.solve_ex((gram + ridge).double(), left_over.double())
        after = (before + solved.float()).half()

        def error(factors: torch.Tensor, gram: torch.Tensor = gram, side: torch.Tensor = right_side) -> torch.Tensor:
            return ((gram @ factors[..., None])[..., 0] * factors).sum(-1) - 2 * (factors * side).sum(-1)

        better = (failed == 0) & torch.isfinite(after).all(-1) & (error(after.float()) < error(before))
        new_scales[part] = torch.where(better[:, None], after[:, :count], scales[part])
        if new_offsets is not None and offsets is not None:
            new_offsets[part] = torch.where(better[:, None], after[:, count:], offsets[part])
    return new_scales, new_offsets
