"""Groups of floats as integers of 4 bits, or 2, 3, 5 or 6, each to the nearest.

Symmetric groups have the values -8 .. 7. Their scale is m / -8, m being the value of the largest magnitude with its
sign, as in Q4_0 of llama.cpp: it uses the step that one side has more, which max |x| / 7 never does, and clips no m.
With offsets the values are 0 .. 15, and scales and offsets are searched for. The candidates cover all of a group's
range or the middle of it, and are refined by least squares as a line through the values, with new integers in between.
The error of a weight x counts sqrt(mean(x x) + x x), mean being the group's, as where llama.cpp quantizes blocks: large
weights are not given up for many small ones.

KL on 1,024 tokens, of SmolLM2's weights moved off the grid of their file by noise of half a step, activations exact:
symmetric in groups of 32 0.42, and 0.48 with a search of the same kind, which clips m; with offsets in groups of 64
0.36, and 0.42 with smallest and largest alone.

Scales and offsets are float16 as stored, and the values are the nearest ones for those.
"""

from __future__ import annotations

import torch

LEAST, MOST = -8, 7
"""The range of values of 4 bits without offsets."""

SHARES = (1.0, 0.9, 0.8)
"""The shares of a group's range that the integers cover before the first refinement."""

REFINEMENTS = 2


def round_symmetric(groups: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds groups float32 [.., G]: values int8 [.., G] in -8 .. 7, scales float16 [..], infinite if none fits."""
    at = groups.abs().argmax(-1, keepdim=True)
    scales = (groups.gather(-1, at)[..., 0] / -(1 << (bits - 1))).half()
    return _nearest(groups, scales, None, bits).to(torch.int8), scales


def round_with_offsets(groups: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds groups float32 [.., G]: values int8 [.., G] in 0 .. 15, scales and offsets float16 [..], infinite if none
    fit.
    """
    low, high = torch.aminmax(groups, dim=-1)
    best_scales = best_offsets = torch.full_like(low, torch.inf, dtype=torch.half)
    least = torch.full_like(low, torch.inf)
    counts = _counts(groups)
    shares = counts / counts.sum(-1, keepdim=True)
    for share in SHARES:
        reach = share * (high - low)
        scales, offsets = (reach / ((1 << bits) - 1)).half(), ((low + high - reach) / 2).half()
        for _ in range(1 + REFINEMENTS):
            values = _nearest(groups, scales, offsets, bits)
            off = (values * scales.float()[..., None]).add_(offsets.float()[..., None]).sub_(groups)
            error = off.square_().mul_(counts).sum(-1)
            better = error < least
            least = torch.where(better, error, least)
            best_scales = torch.where(better, scales, best_scales)
            best_offsets = torch.where(better, offsets, best_offsets)
            scales, offsets = _line(values, groups, shares)
    return _nearest(groups, best_scales, best_offsets, bits).to(torch.int8), best_scales, best_offsets


def _counts(groups: torch.Tensor) -> torch.Tensor:
    """Returns the weight of each number's error, [.., G]: at least 1, more for large numbers; 1 in a group of zeros."""
    mean = groups.square().mean(-1, keepdim=True)
    # Relative to the mean, so that groups of tiny weights don't underflow.
    return torch.where(mean > 0, (1 + groups.square() / mean).sqrt_(), 1.0)


def _nearest(groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Returns the nearest integers of groups for their scales, as floats; 0 for a scale of 0."""
    half = 1 << (bits - 1)
    divisor = torch.where(scales == 0, torch.inf, scales.float())[..., None]
    if offsets is None:
        return (groups / divisor).round_().clamp_(-half, half - 1)
    return ((groups - offsets.float()[..., None]) / divisor).round_().clamp_(0, 2 * half - 1)


def _line(values: torch.Tensor, groups: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scale and the offset that bring values closest to their groups; ``shares`` weigh the errors."""
    middle, mean = (values * shares).sum(-1), (groups * shares).sum(-1)
    centred = values - middle[..., None]
    scaled = centred * shares
    spread = (scaled * centred).sum(-1)
    scales = torch.where(spread > 0, (scaled * groups).sum(-1) / spread, 0.0).half()
    return scales, (mean - scales.float() * middle).half()
