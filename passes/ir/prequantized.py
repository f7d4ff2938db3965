"""Weights whose integers are known already: taken from a file's blocks, or chosen by a calibrated pass.

``quantized`` (quantized.py) takes these as they are where they have the format that is wanted. Everything else sees the
floats that they stand for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch

from enginewright.runtime.shared.weight_formats import FORMATS, Storage

from ..formats.rounding import TORCH_DTYPES
from ..formats.weight_format import WeightFormat
from ..ops.quantization import groups_of, scales_as_floats
from .weights import Source, WeightExpr


@dataclass(frozen=True)
class Codes:
    """A weight [.., N, K] as integers, or floats of 8 bits, in groups of G along K.

    Attributes:
        values: int8 [.., N, K]. 8 bits: -128 .. 127. 4 bits: -8 .. 7, and 0 .. 15 where there are offsets; fewer, 5 and
            6 bits alike. Floats are float8_e4m3fn. Of codebooks: the bytes of blocks without their scale.
        scales: float16 [.., N, ceil(K/G)]; in blocks, int8 as ``ops.quantization.scales_in_blocks`` gives them.
        offsets: the same shape and type, or None. A weight is ``value * scale + offset``.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None


@dataclass(frozen=True)
class CodeFormat:
    """The format of ``Codes``: bits of a value (2 .. 6, or 8), size of a group, and whether groups have offsets.

    ``kind``: "int", or the format whose values aren't all integers of that many bits, such as "fp8" and "iq4".
    ``scale_block``: the number of groups that share a float16; 0 if none do.
    """

    bits: int
    group_size: int
    offsets: bool = False
    kind: str = "int"
    scale_block: int = 0

    @property
    def storage(self) -> Storage:
        """The weight format that stores them."""
        return cast("Storage", f"int{self.bits}" if self.kind == "int" else self.kind)

    @property
    def in_4_bits(self) -> CodeFormat:
        """The format that holds the same integers of 2 or 3 bits and is every target's; others are themselves."""
        return replace(self, bits=4) if self.kind == "int" and self.bits < 4 and not self.scale_block else self

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return TORCH_DTYPES[FORMATS[self.storage].dtype]

    @staticmethod
    def of(weight_format: WeightFormat) -> CodeFormat | None:
        """The integers, or what else is stored with scales, of that format; None if it has none."""
        stored = weight_format.stored
        if not stored.group_sizes:
            return None
        kind = "int" if stored.integers and not stored.levels else weight_format.storage
        return CodeFormat(
            stored.bits, weight_format.group_size, weight_format.zero_point, kind, weight_format.scale_block
        )


class Prequantized(WeightExpr):
    """A float32 weight [.., N, K] that evaluates to what its codes stand for.

    ``of_source``: the source has these very integers; no pass has chosen them.
    """

    of_source: ClassVar[bool] = True

    @property
    @abstractmethod
    def code_format(self) -> CodeFormat: ...

    @abstractmethod
    def codes(self) -> Codes:
        """The integers; read or made each time that it is called."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def evaluate(self) -> torch.Tensor:
        return decode(self.codes(), self.code_format)


@dataclass(frozen=True)
class SourceCodes(Source, Prequantized):
    """A float32 tensor that its checkpoint holds as integers, which ``read_codes`` gives; ``read`` gives the floats."""

    format: CodeFormat = field(kw_only=True)
    read_codes: Callable[[], Codes] = field(kw_only=True, compare=False, repr=False)

    @property
    def code_format(self) -> CodeFormat:
        return self.format

    def codes(self) -> Codes:
        return self.read_codes()


def decode(codes: Codes, code_format: CodeFormat) -> torch.Tensor:
    """value * scale + offset in float32: [.., N, K]. The product is rounded, then the sum, as GGUF's tools do it.

    A value that is a code stands for the format's number.
    """
    size = codes.values.shape[-1]
    width = code_format.group_size or size

    def spread(factors: torch.Tensor) -> torch.Tensor:
        return scales_as_floats(factors, groups_of(size, width)).repeat_interleave(width, dim=-1)[..., :size]

    stored = FORMATS[code_format.storage]
    if stored.codebook is not None:
        blocks = stored.codebook.join(codes.values.numpy(), codes.scales.numpy())
        return torch.from_numpy(stored.codebook.expand(blocks)).flatten(-2)
    numbers = stored.codes
    value = torch.tensor(numbers)[codes.values.long()] if numbers else codes.values.float()
    value = value * spread(codes.scales)
    return value if codes.offsets is None else value + spread(codes.offsets)
