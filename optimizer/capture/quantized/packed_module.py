"""A packed weight of a checkpoint: its tensors, its numbers, and the lazy weight made of them.

A weight is ``(value - zero) * scale``, in groups along its inputs K. It keeps its integers (``SourceCodes``) if one of
our formats holds it exactly; otherwise it evaluates to floats. Opening a folder reads scales and zero points, a few
percent of the file, to decide this. The packed values are read when a weight is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from enginewright.passes.ir.prequantized import CodeFormat, Codes, SourceCodes
from enginewright.passes.ir.stacked_weights import SwapAxes
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.shared.weight_formats import FORMATS, FP4, Storage

from .config import QuantizedFolder, Scheme

Read = Callable[[], torch.Tensor]

CHUNK_ELEMENTS = 1 << 22
"""The number of elements that are dequantized at a time, so that intermediate values take little memory."""

DOWNLOAD = "The checkpoint and its configuration don't belong together: download both again."


@dataclass(frozen=True)
class PackedNumbers:
    """The numbers of a weight [.., N, K] in its checkpoint.

    Attributes:
        shape: the shape of the weight, (.., N, K).
        label: its storage format, for messages.
        values: reads integers [.., N, K], the codes of a table, or float8_e4m3fn.
        scales: reads float32 [.., N, groups].
        group: the number of neighbouring columns that share a scale.
        lowest: minimum of the integer values.
        largest: maximum of the integer values.
        zeros: reads the numbers to subtract from values, int32 in the shape of the scales; None to subtract nothing.
        order: reads the group of each column, [K]; None if groups are neighbouring columns.
        kind: the kind of the values: "int", "fp8", codes of "nf4", or "float" for values that none of our formats has.
        table: the number for each code; None if values aren't codes.
        swapped: True if the model's parameter has the last two axes exchanged.
    """

    shape: tuple[int, ...]
    label: str
    values: Read
    scales: Read
    group: int
    lowest: int = 0
    largest: int = 0
    zeros: Read | None = None
    order: Read | None = None
    kind: Literal["int", "fp8", "nf4", "float"] = "int"
    table: torch.Tensor | None = None
    swapped: bool = False


@dataclass(frozen=True)
class PackedModule:
    """A packed weight of a checkpoint, and the tensors that belong to it.

    Attributes:
        name: the name of the weight's module.
        base: prefix of the names of the weight's tensors.
        values: the tensor with the packed values.
        scheme: the packing of the module, by the folder's configuration.
        folder: that configuration.
        tensors: all tensors of the checkpoint by their names.
        taken: the names of the tensors that were read for this weight so far.
    """

    name: str
    base: str
    values: Source
    scheme: Scheme
    folder: QuantizedFolder
    tensors: Mapping[str, WeightExpr]
    taken: set[str] = field(default_factory=set)

    def optional(self, *ends: str) -> Source | None:
        """Returns the module's first existing tensor whose name has one of these suffixes; None if there is none."""
        for end in ends:
            if isinstance(tensor := self.tensors.get(self.base + end), Source):
                self.taken.add(self.base + end)
                return tensor
        return None

    def part(self, *ends: str) -> Source:
        """Returns a tensor as ``optional`` does. Raises SourceError, naming it, if it is missing."""
        tensor = self.optional(*ends)
        if tensor is None:
            raise SourceError(
                f"{self.values.origin}: tensor {self.base + ends[0]} is missing ({self.values.name} is packed)",
                hint="The checkpoint is incomplete, or its configuration is of another one.",
            )
        return tensor

    def matrix(self) -> Source:
        """Returns the tensor with the values. Raises SourceError unless it has two axes."""
        if len(self.values.shape) != 2:
            raise self.wrong(self.values, f"has shape {self.values.shape}, not two axes")
        return self.values

    def stack(self) -> Source:
        """Returns the tensor with the values. Raises SourceError if it has fewer than two axes."""
        if len(self.values.shape) < 2:
            raise self.wrong(self.values, f"has shape {self.values.shape}, not two axes or more")
        return self.values

    def wrong(self, tensor: Source, text: str) -> SourceError:
        """Returns a SourceError with the message ``text``, which names the tensor and its file."""
        return SourceError(f"{tensor.origin}: tensor {tensor.name} {text}", hint=DOWNLOAD)

    def typed(self, tensor: Source, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None) -> Source:
        """Returns ``tensor``. Raises SourceError if it has none of the types, or another shape than ``shape``."""
        if tensor.dtype not in dtypes:
            raise self.wrong(tensor, f"is {short_name(tensor.dtype)}, not {' or '.join(map(short_name, dtypes))}")
        if shape is not None and tensor.shape != shape:
            raise self.wrong(tensor, f"has shape {tensor.shape}, not {shape}")
        return tensor


def weight_of(numbers: PackedNumbers, name: str, packed: Source) -> WeightExpr:
    """Makes the lazy weight: with its integers if one of our formats holds them exactly, otherwise as floats.

    Args:
        numbers: the weight's numbers.
        name: the name of the model's parameter.
        packed: the tensor with the packed values, whose file appears in errors.
    """
    read = partial(_dequantized, numbers)
    exact = _exact(numbers)
    expr: WeightExpr
    if exact is None:
        expr = Source(name, numbers.shape, torch.float32, read, packed.origin, numbers.label)
    else:
        codes = partial(_codes, numbers, exact)
        expr = SourceCodes(
            name, numbers.shape, torch.float32, read, packed.origin, numbers.label, format=exact, read_codes=codes
        )
    rank = len(numbers.shape)
    return SwapAxes(expr, rank - 2, rank - 1) if numbers.swapped else expr


def _exact(numbers: PackedNumbers) -> CodeFormat | None:
    """Returns our format that holds the weight bit for bit, with float16 scales and offsets; None if none does.

    Codes of 4 bits with varying zero points would need offsets ``-zero * scale``, which float16 seldom holds. Their
    differences value - zero are exact in the narrowest format with more bits.
    """
    if numbers.order is not None or numbers.kind == "float":
        return None
    scales = numbers.scales()
    if not torch.equal(scales.half().float(), scales):
        return None
    size = numbers.shape[-1]
    if numbers.kind != "int":
        group = _group_of(numbers.kind, numbers.group, size)
        return None if group is None else CodeFormat(8 if numbers.kind == "fp8" else 4, group, kind=numbers.kind)
    zeros = torch.zeros(1, dtype=torch.int32) if numbers.zeros is None else numbers.zeros()
    low, high = numbers.lowest - int(zeros.max()), numbers.largest - int(zeros.min())
    if (low, high) == (FP4[0], FP4[-1]) and (group := _group_of("fp4", numbers.group, size)) is not None:
        return CodeFormat(4, group, kind="fp4")
    plain = [name for name, of in FORMATS.items() if of.integers and not of.levels]
    widths = sorted(plain, key=lambda name: FORMATS[name].bits)
    for storage in widths:
        bits, group = FORMATS[storage].bits, _group_of(storage, numbers.group, size)
        half = 1 << (bits - 1)
        if group is None:
            continue
        if low >= -half and high < half:
            return CodeFormat(bits, group)
        if bits == 4 and (numbers.lowest, numbers.largest) == (0, 15):
            offsets = -zeros * scales
            if torch.equal(offsets.half().float(), offsets):
                return CodeFormat(bits, group, offsets=True)
    return None


def _group_of(storage: Storage, group: int, size: int) -> int | None:
    """Returns the largest group size of a format that divides the weight's group size; 0 for whole rows, None if none
    does.

    Args:
        storage: the format.
        group: the weight's group size.
        size: the number of columns.
    """
    stored = FORMATS[storage]
    if group >= size and not stored.multiple and 0 in stored.group_sizes:
        return 0
    fitting = [g for g in stored.group_sizes if g and group % g == 0 and stored.fits(size, g)]
    return max(fitting, default=None)


def _codes(numbers: PackedNumbers, code_format: CodeFormat) -> Codes:
    """Converts numbers to codes of ``code_format``, which ``_exact`` returned for them."""
    values, scales = numbers.values(), numbers.scales()
    offsets = None
    if numbers.zeros is not None:
        zeros = numbers.zeros()
        if code_format.offsets:
            offsets = (-zeros * scales).half()
        else:
            values = values.to(torch.int16)
            values -= _spread(zeros.to(torch.int16), numbers)
    width = code_format.group_size or numbers.shape[-1]
    times, groups = max(1, min(numbers.group, numbers.shape[-1]) // width), -(-numbers.shape[-1] // width)

    def repeated(factors: torch.Tensor) -> torch.Tensor:
        return factors.repeat_interleave(times, dim=-1)[..., :groups]

    if code_format.kind != "fp8":
        values = values.to(torch.int8)
    return Codes(
        values,
        repeated(scales.half()),
        None if offsets is None else repeated(offsets),
    )


def _dequantized(numbers: PackedNumbers) -> torch.Tensor:
    """Computes the floats [.., N, K]: the difference of whole numbers is exact, and the product is rounded once."""
    size = numbers.shape[-1]
    values = numbers.values().reshape(-1, size)
    scales = numbers.scales().reshape(len(values), -1)
    zeros = None if numbers.zeros is None else numbers.zeros().reshape(len(values), -1).float()
    result = torch.empty(values.shape, dtype=torch.float32)
    step = max(1, CHUNK_ELEMENTS // size)
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        part = values[rows].float() if numbers.table is None else numbers.table[values[rows].int()]
        if zeros is not None:
            part -= _spread(zeros[rows], numbers)
        torch.mul(part, _spread(scales[rows], numbers), out=result[rows])
    return result.reshape(numbers.shape)


def _spread(factors: torch.Tensor, numbers: PackedNumbers) -> torch.Tensor:
    """Expands factors of groups [.., groups] to columns [.., K], or to a shape that broadcasts to that."""
    if factors.shape[-1] == 1:
        return factors
    if numbers.order is not None:
        return factors[..., numbers.order()]
    return factors.repeat_interleave(numbers.group, dim=-1)[..., : numbers.shape[-1]]


def scales_of(module: PackedModule, scale: Source, shape: tuple[int, ...]) -> tuple[Read, int]:
    """Returns a function that reads the scales [.., N, groups] of a weight in float32, and the columns of a group.

    A file has a scale for the weight, each member of a stack, each channel, each group or each block.

    Args:
        module: the packed weight.
        scale: the tensor with the scales.
        shape: the shape (.., N, K) of the weight.

    Raises SourceError naming the tensor if the configuration doesn't allow its shape.
    """
    exponents = (torch.uint8,) if module.scheme.layout == "mxfp8" else ()
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    module.typed(scale, *floats, torch.float8_e8m0fnu, *exponents)
    *lead, rows, size = shape
    block = module.scheme.block
    factors: Read = lambda: scale.evaluate().float()  # noqa: E731
    if scale.dtype not in floats:
        factors = powers_of_two(module, scale)

    def made(view: tuple[int, ...], step: int = 1) -> Read:
        def read() -> torch.Tensor:
            value = factors().reshape(view)
            if step > 1:
                value = value.repeat_interleave(step, dim=-2)[..., :rows, :]
            return value.expand(*lead, rows, view[-1])

        return read

    has = scale.shape
    if block is not None and has == (*lead, -(-rows // block[0]), -(-size // block[1])):
        return made(has, block[0]), block[1]
    if block is None and module.scheme.group_size:
        if has == (*lead, rows, -(-size // module.scheme.group_size)):
            return made(has), module.scheme.group_size
    elif block is None:
        if scale.shape in ((), (1,), (1, 1), (1,) * len(shape)):
            return made((1,) * len(shape)), size
        if lead and has in (tuple(lead), (*lead, 1), (*lead, 1, 1)):
            return made((*lead, 1, 1)), size
        if has in ((*lead, rows), (*lead, rows, 1)):
            return made((*lead, rows, 1)), size
    grouping = f"blocks of {block[0]} x {block[1]}" if block else group_label(module.scheme.group_size)
    raise module.wrong(scale, f"has shape {has}, which isn't one of a weight {shape} with {grouping}")


def powers_of_two(module: PackedModule, scale: Source) -> Read:
    """Returns a function that reads 2^(value - 127) of scales that are exponents (E8M0), as bytes or as F8_E8M0."""
    if bool((scale.evaluate().view(torch.uint8) == 255).any()):
        raise module.wrong(scale, "has a scale of 255, which is NaN")

    def read() -> torch.Tensor:
        bits = scale.evaluate().view(torch.uint8).int()
        return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)

    return read


def halves(octets: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Splits each byte into two codes of 4 bits: uint8 [.., n] to [.., 2n], the low one first unless ``high_first``."""
    low, high = octets & 0xF, octets >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def group_label(size: int) -> str:
    return f"groups of {size}" if size else "whole rows"


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
