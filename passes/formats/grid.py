"""The integers of a weight format, and a search for the scales with which they approximate groups of weights best.

The error of a weight counts by the mean square of its column's inputs on calibration tokens, as in llama.cpp's
importance matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enginewright.runtime.shared.weight_formats import FORMATS, Storage

from ..ops.quantization import LARGEST
from .round_to_4_bits import REFINEMENTS, SHARES

REACHES_LOW = (8.7 / 8, 1.0, 7.5 / 8, 7 / 8, 6.5 / 8)
REACHES_HIGH = (6 / 7, 6.5 / 7, 1.0)
"""Candidates of a search for scales: the number with the largest magnitude becomes this share of the lowest or highest
integer.

More than 1 clips that number. Less makes steps finer for the other numbers.
"""

REACHES_OF_LEVELS = (8.5 / 12, 8 / 12)
"""Further candidates for formats whose levels are closer to each other around 0: the levels before the outermost."""


@dataclass(frozen=True)
class Grid:
    """The integers of a format: those from ``low`` to ``high``, or only ``levels``, in ascending order, if there are
    any.
    """

    low: int
    high: int
    levels: tuple[int, ...] = ()

    @staticmethod
    def of(storage: Storage, *, offsets: bool) -> Grid:
        """Returns the integers of the format ``storage``. With offsets they begin at 0."""
        stored = FORMATS[storage]
        if stored.levels:
            return Grid(stored.levels[0], stored.levels[-1], stored.levels)
        if offsets:
            return Grid(0, (1 << stored.bits) - 1)
        half = 1 << (stored.bits - 1)
        return Grid(max(-half, -LARGEST), half - 1)

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the nearest integer to each number, as float32."""
        if not self.levels:
            return numbers.round().clamp_(self.low, self.high)
        known = torch.tensor(self.levels, dtype=torch.float32)
        return known[torch.bucketize(numbers.contiguous(), (known[1:] + known[:-1]) / 2)]

    def quantized(
        self, groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | float = 0.0
    ) -> torch.Tensor:
        """Returns the nearest integers to ``(groups - offsets) / scales``, as float32.

        Scales and offsets must broadcast with the groups. A scale of 0 gives 0, or the integer nearest to 0.
        """
        return self.nearest((groups - offsets) / torch.where(scales == 0, torch.inf, scales))

    @property
    def peaks(self) -> tuple[float, ...]:
        """The integers to try for the number with the largest magnitude of a group, as floats that needn't be whole."""
        more = REACHES_OF_LEVELS if self.levels else ()
        low, high = ((*reaches, *more) for reaches in (REACHES_LOW, REACHES_HIGH))
        return (*(self.low * share for share in low), *(self.high * share for share in high))


def find_scales(groups: torch.Tensor, weights: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Searches the scales, float16 [N, C], with the least squared error of groups [N, C, G]; infinite if none is
    finite.

    It tries some candidates, and refines each once by least squares. ``weights`` [C, G] multiply the squared errors.
    """
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    best, least = torch.full_like(peak, torch.inf, dtype=torch.half), torch.full_like(peak, torch.inf)
    for reached in grid.peaks:
        first = (peak / reached).half()
        values = grid.quantized(groups, first.float()[..., None])
        products, squares = (groups * values * weights).sum(-1), (values * values * weights).sum(-1)
        scales = torch.where(squares > 0, products / squares, 0.0).half()
        error = scales.float() * (scales.float() * squares - 2 * products)
        error = torch.where(torch.isfinite(first), error, torch.inf)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best


def find_scales_and_offsets(
    groups: torch.Tensor, weights: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Searches scales and offsets, float16 [N, C] each, with the least squared error of groups [N, C, G].

    ``weights`` [C, G] multiply the squared errors. Results are infinite if none is finite.
    """
    low, high = torch.aminmax(groups, dim=-1)
    best = [torch.full_like(low, torch.inf, dtype=torch.half) for _ in range(2)]
    least, total = torch.full_like(low, torch.inf), weights.sum(-1)
    for share in SHARES:
        reach = share * (high - low)
        scales, offsets = (reach / grid.high).half(), ((low + high - reach) / 2).half()
        for _ in range(1 + REFINEMENTS):
            values = grid.quantized(groups, scales.float()[..., None], offsets.float()[..., None])
            off = values * scales.float()[..., None] + offsets.float()[..., None] - groups
            error = (off.square() * weights).sum(-1)
            for old, new in zip(best, (scales, offsets), strict=True):
                old.copy_(torch.where(error < least, new, old))
            least = torch.minimum(error, least)
            middle, mean = (values * weights).sum(-1) / total, (groups * weights).sum(-1) / total
            centred = (values - middle[..., None]) * weights
            spread = (centred * values).sum(-1)
            scales = torch.where(spread > 0, (centred * groups).sum(-1) / spread, 0.0).half()
            offsets = (mean - scales.float() * middle).half()
    return best[0], best[1]
