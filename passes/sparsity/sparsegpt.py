"""SparseGPT: chooses two of every four weights to keep. Later columns compensate for the removed ones.

Frantar & Alistarh 2023, https://arxiv.org/abs/2301.00774. For a weight W [N, K] and X^T X [K, K] of its inputs it
minimises ||X W^T - X S^T||. Columns are processed one after the other as in GPTQ (gptq.py has the factor R of the
damped inverse Hessian). At the first column of every four, the two weights with the least w^2 / R_kk^2 are removed. The
error of each column, from removal and from rounding, is distributed over the later columns. So integers are chosen in
the same sweep. A difference from the paper: the fours with the largest inputs come first (GPTQ's activation order, by
fours).
"""

from __future__ import annotations

import torch

from enginewright.runtime.shared.errors import PassError

from ..formats.round_to_4_bits import LEAST, MOST
from ..ir.prequantized import CodeFormat, Codes
from ..ir.two_of_four import QUAD, best_two
from ..ops.quantization import LARGEST, groups_of
from ..quantization.gptq import MOST_TO_REFIT, Factor, choose_scales, factorize, refit_scales, sweep


def factorize_by_fours(hessian: torch.Tensor) -> Factor:
    """Returns the factor of X^T X [K, K] for columns in fours of neighbours, those with the largest inputs first.

    Raises PassError as ``factorize`` does.
    """
    fours = hessian.diagonal().view(-1, QUAD).sum(-1)
    order = (torch.argsort(fours, descending=True, stable=True)[:, None] * QUAD + torch.arange(QUAD)).flatten()
    factor = factorize(hessian[order][:, order], activation_order=False)
    return Factor(order, factor.upper, factor.damping, factor.unused)


def sparsegpt(weight: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Returns the sparse weight [N, K] float32: two of every four values are kept, with changed values, and the others
    are 0.
    """
    return _sweep(weight, factor, None, CodeFormat(8, 0))


def sparsegpt_codes(weight: torch.Tensor, hessian: torch.Tensor, factor: Factor, code_format: CodeFormat) -> Codes:
    """Makes a weight sparse and chooses its integers, of 8 or 4 bits without offsets, in one sweep.

    The scales are those of the kept floats. For 4 bits they are solved for again, as in GPTQ.

    Args:
        weight: [N, K] float32.
        hessian: X^T X of its inputs.
        factor: ``factorize_by_fours`` of the Hessian.
        code_format: the format of the integers.

    Raises:
        PassError: the weight is too large for float16 scales.
    """
    pruned = sparsegpt(weight, factor)
    if code_format.bits == 4:
        importance = hessian.diagonal() / (hessian.diagonal().mean() or 1.0)
        scales, _ = choose_scales(pruned, importance, code_format)
    else:
        scales = _scales_of_8_bits(pruned, code_format.group_size)
    values = _sweep(weight, factor, scales, code_format).to(torch.int8)
    if code_format.bits == 4 and len(hessian) <= MOST_TO_REFIT:
        scales, _ = refit_scales(weight, hessian, values, scales, None, factor.damping)
    return Codes(values, scales)


def _scales_of_8_bits(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """Returns scales float16 [N, groups]: the largest magnitude of each group / 127."""
    size = weight.shape[1]
    groups, width = groups_of(size, group_size), group_size or size
    padded = torch.nn.functional.pad(weight, (0, groups * width - size)).unflatten(-1, (groups, width))
    scales: torch.Tensor = (padded.abs().amax(-1) / LARGEST).half()
    if not torch.isfinite(scales).all():
        raise PassError(
            f"a weight of magnitude {weight.abs().max().item():g} is too large for float16 scales",
            hint='Give the module another format by an override in the recipe, such as { storage = "f32" }.',
        )
    return scales


def _sweep(weight: torch.Tensor, factor: Factor, scales: torch.Tensor | None, code_format: CodeFormat) -> torch.Tensor:
    """Makes a weight sparse, column by column. Returns the sparse weight [N, K] as floats.

    With ``scales`` [N, groups], it returns integers in place of the weights, also as floats.
    """
    order = factor.order
    least, most = (LEAST, MOST) if code_format.bits == 4 else (-LARGEST, LARGEST)
    by_group = None if scales is None else scales.t().float().contiguous()  # [groups, N]
    result = torch.empty(weight.shape[::-1])
    mask = torch.empty(0)

    def choose(at: int, rest: torch.Tensor) -> torch.Tensor:
        nonlocal mask
        if at % QUAD == 0:
            four = rest[:QUAD] / factor.upper.diagonal()[at : at + QUAD, None]  # [4, N]
            mask = best_two(four.abs().t()).t()
        chosen = value = torch.where(mask[at % QUAD], rest[0], 0.0)
        if by_group is not None:
            scale = by_group[int(order[at]) // code_format.group_size if code_format.group_size else 0]
            chosen = (chosen / torch.where(scale == 0, torch.inf, scale)).round_().clamp_(least, most)
            value = chosen * scale
        result[order[at]] = chosen
        return value

    sweep(weight, factor, choose)
    return result.t().contiguous()
