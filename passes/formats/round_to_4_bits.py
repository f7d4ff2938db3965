"""Rounds groups of floats to integers of 4 bits, or of 2, 3, 5 or 6 bits.

Symmetric groups have the integers -8 .. 7. The scale is m / -8, where m is the value with the largest magnitude, with
its sign, as in Q4_0 of llama.cpp. So m becomes exactly -8 and isn't clipped, whatever its sign. With a scale of
max |x| / 7, the integer -8 would never be used.

With offsets the integers are 0 .. 15, and scales and offsets are searched for. The first candidates cover all of a
group's range, or the middle of it. Each is refined by turns: values are rounded to integers, and a line is fitted
through the values by least squares. The squared error of a weight x is multiplied by sqrt(mean(x x) + x x), with the
mean over its group, as in llama.cpp. So large weights don't get large errors for the sake of many small ones.

Measured: KL on 1,024 tokens of SmolLM2 with exact activations. The file's weights had noise of half a step, so that
they aren't on the grid of the file. Symmetric in groups of 32: 0.42; with a similar search for scales, which clips m:
0.48. With offsets in groups of 64: 0.36; with offset and scale from only the smallest and the largest value: 0.42.

Scales and offsets are float16 as stored, and the integers are the nearest for those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LEAST, MOST = -8, 7
"""The range of values of 4 bits without offsets."""

SHARES = (1.0, 0.9, 0.8)
"""The shares of a group's range that the integers cover before the first refinement."""

REFINEMENTS = 2


def round_symmetric(groups: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds groups float32 [.., G] to symmetric integers: returns int8 [.., G], -8 .. 7 for 4 bits, and scales float16
    [..].

    A scale is infinite if it is too large for float16.
    """
    at = groups.abs().argmax(-1, keepdim=True)
    scales = (groups.gather(-1, at)[..., 0] / -(1 << (bits - 1))).half()
    return _nearest(groups, scales, None, bits).to(torch.int8), scales


def round_with_offsets(groups: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds groups float32 [.., G] to integers with an offset: returns int8 [.., G], 0 .. 15 for 4 bits, scales and
    offsets.

    Scales and offsets are float16 [..]. They are infinite if none is within the range of float16.
    """
    low, high = torch.aminmax(groups, dim=-1)
    best_scales = best_offsets = torch.full_like(low, torch.inf, dtype=torch.half)
    least = torch.full_like(low, torch.inf)
    counts = _counts(groups)
    shares = counts / counts.sum(-1, keepdim=True)
    values, *buffers = (torch.empty_like(groups) for _ in range(3))  # reused in each round
    means = torch.mul(groups, shares, out=buffers[0]).sum(-1)
    for share in SHARES:
        reach = share * (high - low)
        scales, offsets = (reach / ((1 << bits) - 1)).half(), ((low + high - reach) / 2).half()
        for refinement in range(1 + REFINEMENTS):
            _nearest(groups, scales, offsets, bits, values)
            off = torch.mul(values, scales.float()[..., None], out=buffers[0])
            off.add_(offsets.float()[..., None]).sub_(groups)
            error = off.square_().mul_(counts).sum(-1)
            better = error < least
            least = torch.where(better, error, least)
            best_scales = torch.where(better, scales, best_scales)
            best_offsets = torch.where(better, offsets, best_offsets)
            if refinement < REFINEMENTS:
                scales, offsets = _line(values, groups, shares, means, buffers)
    return _nearest(groups, best_scales, best_offsets, bits, values).to(torch.int8), best_scales, best_offsets


def _counts(groups: torch.Tensor) -> torch.Tensor:
    """Returns the factor of each number's squared error in groups [.., G]: 1 for small numbers, more for large ones."""
    squares = groups.square()
    mean = squares.mean(-1, keepdim=True)
    # Relative to the mean, so that groups of tiny weights don't underflow.
    return torch.where(mean > 0, squares.div_(mean).add_(1).sqrt_(), 1.0)


def _nearest(
    groups: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rounds groups [.., G] by given scales and offsets [..] to integers of ``bits`` bits, returned as floats.

    They are 0 where the scale is 0. They are written to ``out`` if it isn't None.
    """
    half = 1 << (bits - 1)
    divisor = torch.where(scales == 0, torch.inf, scales.float())[..., None]
    if offsets is None:
        return torch.div(groups, divisor, out=out).round_().clamp_(-half, half - 1)
    return torch.sub(groups, offsets.float()[..., None], out=out).div_(divisor).round_().clamp_(0, 2 * half - 1)


def _line(
    values: torch.Tensor,
    groups: torch.Tensor,
    shares: torch.Tensor,
    means: torch.Tensor,
    buffers: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scale and the offset, [..] each, that bring integers closest to their groups [.., G] by least
    squares.

    Args:
        values: the integers, [.., G]; they are overwritten.
        groups: the groups.
        shares: the factors of the squared errors, [.., G]; their sum is 1.
        means: the mean of each group with these factors, [..].
        buffers: two tensors of the groups' shape, which are overwritten.
    """
    first, second = buffers
    middle = torch.mul(values, shares, out=first).sum(-1)
    centred = values.sub_(middle[..., None])
    scaled = torch.mul(centred, shares, out=first)
    spread = torch.mul(scaled, centred, out=second).sum(-1)
    scales = torch.where(spread > 0, scaled.mul_(groups).sum(-1) / spread, 0.0).half()
    return scales, (means - scales.float() * middle).half()
