"""The weight formats in torch: rounding of rows to each format, the largest error, and the types of tensors.

``runtime/shared/weight_formats.py`` has the storage of each format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from enginewright.runtime.shared.codebooks import CODEBOOKS
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.weight_formats import FORMATS, Storage

from ..ops.dequantize import LARGEST_E4M3
from ..ops.quantization import LARGEST, groups_of
from .grid import Grid
from .round_to_4_bits import round_symmetric, round_with_offsets

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, of.torch) for name, of in DTYPES.items()}
"""Our names of types -> torch's. A type of 4 bits is an int8 here, which holds one value."""

_FIRST_BEYOND = 464.0
"""The middle between the largest e4m3 value, 448, and the next step. Larger values are counted as saturated."""


class RoundedRows(NamedTuple):
    """The result of rounding rows [N, K].

    Attributes:
        values: [N, K].
        scales: [N, groups].
        offsets: [N, groups]; None if the format has none.
        saturated: the number of values beyond the largest one of the format.
        vanished: the number of groups whose float16 scale is 0, although their values differ.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    saturated: int
    vanished: int


def _grouped(rows: torch.Tensor, group_size: int) -> torch.Tensor:
    """Splits rows [N, K] into groups, [N, groups, G]. The last group is padded with zeros."""
    size = rows.shape[1]
    groups, width = groups_of(size, group_size), group_size or size
    return torch.nn.functional.pad(rows, (0, groups * width - size)).view(len(rows), groups, width)


def round_to_8_bits(rows: torch.Tensor, group_size: int, offsets: bool = False, floats: bool = False) -> RoundedRows:
    """Rounds rows float32 [N, K] to int8, or with ``floats`` to e4m3, with a float16 scale for each group along K.

    Args:
        rows: the rows.
        group_size: the values of a group; 0 means the whole row.
        offsets: has no effect: 8-bit formats have no offsets.
        floats: True rounds to e4m3.
    """
    most = LARGEST_E4M3 if floats else float(LARGEST)
    padded = _grouped(rows, group_size)
    largest = padded.abs().amax(-1)  # [N, groups]
    scales = (largest / most).half()
    divisor = torch.where(scales == 0, torch.inf, scales.float())  # all values of a group that vanishes are zero
    scaled = padded / divisor[..., None]
    if not floats:
        scaled.round_()
    saturated = int((scaled.abs() > (_FIRST_BEYOND if floats else most)).sum())
    vanished = int(((scales == 0) & (largest != 0)).sum())
    # To the nearest, ties to even; torch makes NaN of what is beyond the largest e4m3 value.
    values = scaled.clamp_(-most, most).to(torch.float8_e4m3fn if floats else torch.int8)
    return RoundedRows(values.flatten(1)[:, : rows.shape[1]], scales, None, saturated, vanished)


def _round_to_few_bits(rows: torch.Tensor, group_size: int, with_offsets: bool, *, bits: int) -> RoundedRows:
    """Rounds rows float32 [N, K] to integers of 2 to 6 bits. The group size must divide K.

    Values are clamped on purpose where that has the least error, so ``saturated`` is 0.
    """
    groups = rows.unflatten(-1, (-1, group_size))  # [N, groups, G]
    offsets: torch.Tensor | None = None
    if with_offsets:
        values, scales, offsets = round_with_offsets(groups, bits)
        unlike = (groups != groups[..., :1]).any(-1)
    else:
        values, scales = round_symmetric(groups, bits)
        unlike = (groups != 0).any(-1)
    return RoundedRows(values.flatten(-2), scales, offsets, 0, int(((scales == 0) & unlike).sum()))


def _round_to_codes(rows: torch.Tensor, group_size: int, offsets: bool, *, codes: Sequence[float]) -> RoundedRows:
    """Rounds rows float32 [N, K] to indices into ``codes``, which rise from -1 to 1. A scale is its group's largest
    magnitude.

    ``offsets`` has no effect.
    """
    padded = _grouped(rows, group_size)
    largest = padded.abs().amax(-1)  # [N, groups]
    scales = largest.half()
    divisor = torch.where(scales == 0, torch.inf, scales.float())
    numbers = torch.tensor(codes)
    places = torch.bucketize((padded / divisor[..., None]).contiguous(), (numbers[1:] + numbers[:-1]) / 2).to(
        torch.int8
    )
    vanished = int(((scales == 0) & (largest != 0)).sum())
    return RoundedRows(places.flatten(1)[:, : rows.shape[1]], scales, None, 0, vanished)


def _round_to_levels(rows: torch.Tensor, group_size: int, offsets: bool, *, grid: Grid) -> RoundedRows:
    """Rounds rows float32 [N, K] to the levels of ``grid``. The group size must divide K.

    A group's value of the largest magnitude becomes the lowest level. ``offsets`` has no effect.
    """
    groups = rows.unflatten(-1, (-1, group_size))  # [N, groups, G]
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (largest / grid.low).half()
    values = grid.quantized(groups, scales.float()[..., None]).to(torch.int8)
    return RoundedRows(values.flatten(-2), scales, None, 0, int(((scales == 0) & (largest != 0)).sum()))


def _uncoded(rows: torch.Tensor, group_size: int, offsets: bool) -> RoundedRows:
    raise NotImplementedError("a format without scales is a type: rows are cast to it")


def _only_kept(rows: torch.Tensor, group_size: int, offsets: bool) -> RoundedRows:
    raise PassError(
        "weights can't be rounded to a format with a codebook",
        hint="Such formats are kept from a GGUF file (keep_blocks). Give the module another one, such as int3.",
    )


@dataclass(frozen=True)
class Rounding:
    """The rounding to one format.

    Attributes:
        coarseness: an upper limit of the relative error in a column of a product whose weight and input are rounded. In
            trained models, the worst of some 100,000 columns usually has a quarter of it.
        round: rounds rows [N, K] float32; the other arguments are the group size, and True for offsets.
        trained: True if training can round to the format.
    """

    coarseness: float
    round: Callable[[torch.Tensor, int, bool], RoundedRows] = _uncoded
    trained: bool = True


ROUNDINGS: Mapping[Storage, Rounding] = {
    "f32": Rounding(0.0),
    "bf16": Rounding(0.02),
    "int8": Rounding(0.2, round_to_8_bits),
    "int4": Rounding(0.6, partial(_round_to_few_bits, bits=4)),
    "fp8": Rounding(0.4, partial(round_to_8_bits, floats=True), trained=False),
    "nf4": Rounding(0.6, partial(_round_to_codes, codes=FORMATS["nf4"].codes), trained=False),
    "int5": Rounding(0.4, partial(_round_to_few_bits, bits=5)),
    "int6": Rounding(0.3, partial(_round_to_few_bits, bits=6)),
    "iq4": Rounding(0.6, partial(_round_to_levels, grid=Grid.of("iq4", offsets=False)), trained=False),
    "fp4": Rounding(0.7, partial(_round_to_levels, grid=Grid.of("fp4", offsets=False)), trained=False),
    "int3": Rounding(1.0, partial(_round_to_few_bits, bits=3)),
    "int2": Rounding(2.0, partial(_round_to_few_bits, bits=2)),
    **dict.fromkeys(CODEBOOKS, Rounding(0.0, _only_kept, trained=False)),
}
