"""Weights whose integers are known already: taken from a file's blocks, or chosen by a calibrated pass.

``quantized`` (quantized.py) takes these as they are where they have the format that is wanted. Everything else sees the
floats that they stand for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..formats.weight_format import Storage, WeightFormat
from .weights import Source, WeightExpr


@dataclass(frozen=True)
class Codes:
    """A weight [.., N, K] as integers, or floats of 8 bits, in groups of G along K.

    Attributes:
        values: int8 [.., N, K]. 8 bits: -128 .. 127. 4 bits: -8 .. 7, and 0 .. 15 where there are offsets. Floats are
            float8_e4m3fn.
        scales: float16 [.., N, ceil(K/G)].
        offsets: the same shape and type, or None. A weight is ``value * scale + offset``.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None


BITS: dict[Storage, int] = {"int8": 8, "int4": 4}
"""Of a weight's values, for the storage types of integers."""


@dataclass(frozen=True)
class CodeFormat:
    """What ``Codes`` are made for: bits of a value (4 or 8), size of a group, and whether groups have offsets.

    ``floats``: values are e4m3 floats of 8 bits, and no integers.
    """

    bits: int
    group_size: int
    offsets: bool = False
    floats: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return torch.float8_e4m3fn if self.floats else torch.int8

    @staticmethod
    def of(weight_format: WeightFormat) -> CodeFormat | None:
        """The integers, or 8-bit floats, of that format, None if it has none."""
        if weight_format.storage == "fp8":
            return CodeFormat(8, weight_format.group_size, floats=True)
        bits = BITS.get(weight_format.storage)
        return None if bits is None else CodeFormat(bits, weight_format.group_size, weight_format.zero_point)


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
    """value * scale + offset in float32: [.., N, K]. The product is rounded, then the sum, as GGUF's tools do it."""
    size = codes.values.shape[-1]
    width = code_format.group_size or size

    def spread(factors: torch.Tensor) -> torch.Tensor:
        return factors.float().repeat_interleave(width, dim=-1)[..., :size]

    value = codes.values.float() * spread(codes.scales)
    return value if codes.offsets is None else value + spread(codes.offsets)
