"""Weights whose integers are known: read from a file's blocks, or chosen by a calibrated pass.

``quantized`` (quantized.py) uses these integers if they have the needed format. All other code sees the dequantized
floats.
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
    """A weight [.., N, K] as integers or 8-bit floats, in groups of G along K. A weight is ``value * scale + offset``.

    Attributes:
        values: int8 [.., N, K]. 8 bits: -128 to 127. 4 bits: -8 to 7, or 0 to 15 with offsets; 2 to 6 bits alike. 8-bit
            floats are float8_e4m3fn. Formats with codebooks: the bytes of blocks without their scale.
        scales: float16 [.., N, ceil(K/G)]; in blocks, int8 as ``ops.quantization.scales_in_blocks`` returns them.
        offsets: stored like scales; None without offsets.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The values, the scales, and the offsets if there are any."""
        return [t for t in (self.values, self.scales, self.offsets) if t is not None]


@dataclass(frozen=True)
class CodeFormat:
    """The format of ``Codes``.

    Attributes:
        bits: the bits of a value, 2 to 6, or 8.
        group_size: the size of a group.
        offsets: True if groups have offsets.
        kind: "int", or a format with other values, such as "fp8" and "iq4".
        scale_block: the number of groups that share a float16; 0 if each group has its own.
    """

    bits: int
    group_size: int
    offsets: bool = False
    kind: str = "int"
    scale_block: int = 0

    @property
    def storage(self) -> Storage:
        """The storage format of weights (``WeightFormat.storage``) with these codes."""
        return cast("Storage", f"int{self.bits}" if self.kind == "int" else self.kind)

    @property
    def in_4_bits(self) -> CodeFormat:
        """The 4-bit format, which every target supports, for integers of 2 or 3 bits; this format itself for others."""
        return replace(self, bits=4) if self.kind == "int" and self.bits < 4 and not self.scale_block else self

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of the values."""
        return TORCH_DTYPES[FORMATS[self.storage].dtype]

    @staticmethod
    def of(weight_format: WeightFormat) -> CodeFormat | None:
        """Returns the code format of a weight format; None for a format without scales, such as bf16."""
        stored = weight_format.stored
        if not stored.group_sizes:
            return None
        kind = "int" if stored.integers and not stored.levels else weight_format.storage
        return CodeFormat(
            stored.bits, weight_format.group_size, weight_format.zero_point, kind, weight_format.scale_block
        )


class Prequantized(WeightExpr):
    """A float32 weight [.., N, K] that evaluates to its dequantized codes.

    ``of_source``: True if the codes are the source's own, not chosen by a pass.
    """

    of_source: ClassVar[bool] = True

    @property
    @abstractmethod
    def code_format(self) -> CodeFormat: ...

    @abstractmethod
    def codes(self) -> Codes:
        """Returns the codes; they are read or computed at each call."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def evaluate(self) -> torch.Tensor:
        return decode(self.codes(), self.code_format)


@dataclass(frozen=True)
class SourceCodes(Source, Prequantized):
    """A float32 tensor that its checkpoint stores quantized: ``read_codes`` returns the integers, ``read`` the
    floats.
    """

    format: CodeFormat = field(kw_only=True)
    read_codes: Callable[[], Codes] = field(kw_only=True, compare=False, repr=False)

    @property
    def code_format(self) -> CodeFormat:
        return self.format

    def codes(self) -> Codes:
        return self.read_codes()


def decode(codes: Codes, code_format: CodeFormat) -> torch.Tensor:
    """Returns value * scale + offset as float32 [.., N, K]. The product is rounded, then the sum, as in GGUF's tools.

    For formats whose values are indices, such as nf4, the value is the format's number at that index.
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
