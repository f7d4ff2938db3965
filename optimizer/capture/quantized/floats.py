"""Checkpoints of narrow floats: FP8, NVFP4, MXFP4 and MXFP8.

Each value of a weight [N, K] is a narrow float times a scale. The sizes of tensors of scales are rounded up:

    FP8           weight e4m3 [N, K]; weight_scale_inv f32 [N / 128, K / 128]: the scale of a block of 128 x 128.
                  compressed-tensors: weight_scale, of the whole weight, a channel, a group or a block
    NVFP4         weight_packed uint8 [N, K / 2]: two e2m1 a byte, the first in the low bits; weight_scale e4m3
                  [N, K / 16]. A scale is weight_scale / weight_global_scale, which is one f32.
                  ModelOpt: weight uint8 in place of weight_packed; a scale is weight_scale * weight_scale_2
    MXFP4         weight_packed as in NVFP4; weight_scale uint8 or F8_E8M0 [N, K / 32]: the scale is
                  2^(weight_scale - 127). gpt-oss, for the experts' parameter NAME [E, K, N]: NAME_blocks uint8
                  [E, N, K / 32, 16] and NAME_scales uint8 [E, N, K / 32]
    MXFP8         weight e4m3 [N, K]; weight_scale as in MXFP4

Sources: DeepSeek-V3 (README_WEIGHTS.md), compressed-tensors 0.20 (compressors/), gpt-oss (torch/weights.py).
"""

from __future__ import annotations

import math

import torch

from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.weight_formats import TWICE_E2M1

from .packed_module import PackedModule, PackedNumbers, Read, halves, powers_of_two, scales_of


def read_fp8(module: PackedModule) -> PackedNumbers:
    """Reads a weight in FP8 or MXFP8: values in e4m3, with scales of a weight, a channel, a group or a block."""
    weight, block = module.stack(), module.scheme.block
    ends = ("_scale_inv", "_scale")
    scale = module.part(*(ends if module.folder.method == "FP8" else ends[::-1]))
    # Stacks of experts whose parameter is [E, K, N] have a scale for each of the last axis.
    *lead, inputs, outputs = weight.shape
    swapped = bool(lead) and block is None and scale.shape == (*lead, 1, outputs) and outputs > 1
    shape = (*lead, outputs, inputs) if swapped else weight.shape

    def values() -> torch.Tensor:
        value = weight.evaluate()  # which must have no NaN
        return value.transpose(-1, -2) if swapped else value

    if swapped:
        scales: Read = lambda: scale.evaluate().float().transpose(-1, -2)  # noqa: E731
        group = inputs
    else:
        scales, group = scales_of(module, scale, weight.shape)
    grouping = f"in blocks of {block[0]} x {block[1]}" if block else "a scale for " + _of_whole(module, scale)
    return PackedNumbers(shape, f"FP8, {grouping}", values, scales, group, kind="fp8", swapped=swapped)


def _of_whole(module: PackedModule, scale: Source) -> str:
    if module.scheme.group_size:
        return f"{module.scheme.group_size} inputs"
    return "each weight" if math.prod(scale.shape) == 1 else "each output"


def _e2m1(octets: torch.Tensor) -> torch.Tensor:
    """Unpacks E2M1: uint8 [.., n] -> int8 [.., 2n], each element its value times 2; the low nibble comes first."""
    return torch.tensor(TWICE_E2M1, dtype=torch.int8)[halves(octets).int()]


def read_nvfp4(module: PackedModule, second: str = ".weight_global_scale", *, inverse: bool = True) -> PackedNumbers:
    """Reads a weight in NVFP4: E2M1 in groups of 16, whose scales are e4m3.

    Args:
        module: the packed weight.
        second: the end of the name of the tensor with the scale of the whole weight.
        inverse: True if that scale is a divisor, as in compressed-tensors; False if it is a factor, as in ModelOpt.
    """
    packed = module.typed(module.values, torch.uint8)
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    scale = module.typed(module.part(".weight_scale"), torch.float8_e4m3fn, shape=(*shape[:-1], -(-shape[-1] // 16)))
    whole = module.typed(module.part(second), torch.float32)
    if whole.shape not in ((), (1,)):
        raise module.wrong(whole, f"has shape {whole.shape}, not one number")
    if not float(whole.evaluate()) > 0:
        raise module.wrong(whole, f"is {float(whole.evaluate())}, not above 0")

    def scales() -> torch.Tensor:
        factor = whole.evaluate().reshape(1)
        fine = scale.evaluate().float()
        return (fine / factor if inverse else fine * factor) * 0.5  # values are twice as large

    return PackedNumbers(shape, "NVFP4", lambda: _e2m1(packed.evaluate()), scales, 16, -12, 12)


def _exponents(module: PackedModule, scale: Source) -> Read:
    """Returns a function that reads the factors of a packed weight in MXFP4, for the integers that ``_e2m1`` returns.

    These are twice the values, so the factors are half the scales.

    Args:
        module: the packed weight.
        scale: the tensor with the exponents of its scales.
    """
    factors = powers_of_two(module, scale)
    return lambda: factors() * 0.5


_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def read_mxfp4(module: PackedModule) -> PackedNumbers:
    """Reads a weight in MXFP4 from the tensors of compressed-tensors and ModelOpt."""
    packed = module.typed(module.values, torch.uint8)
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    scale = module.typed(module.part(".weight_scale"), *_E8M0, shape=(*shape[:-1], -(-shape[-1] // 32)))
    return PackedNumbers(shape, "MXFP4", lambda: _e2m1(packed.evaluate()), _exponents(module, scale), 32, -12, 12)


def read_mxfp4_blocks(module: PackedModule) -> PackedNumbers:
    """Reads a weight of experts in MXFP4 from the tensors of gpt-oss, which has blocks of 32 values."""
    blocks = module.values
    if len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise module.wrong(blocks, f"has shape {blocks.shape}, not (experts, outputs, blocks, 16)")
    experts, outputs, count, _ = blocks.shape
    scale = module.typed(module.part("_scales"), *_E8M0, shape=(experts, outputs, count))

    def values() -> torch.Tensor:
        return _e2m1(blocks.evaluate()).flatten(-2)

    shape = (experts, outputs, 32 * count)
    return PackedNumbers(shape, "MXFP4", values, _exponents(module, scale), 32, -12, 12, swapped=True)
