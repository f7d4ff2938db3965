"""Weights as 8-bit integers and float16 scales, lazily: two expressions over one base.

A weight [.., N, K] in groups of G along K (0: all of K is one group) becomes

    values  int8 [.., N, K]               in -127 .. 127
    scales  float16 [.., N, ceil(K/G)]    the largest magnitude of a group / 127, to the nearest float16

and ``values * scales`` stands for it. Values are rounded by the scale as it is stored, not by the exact one.

The values need the base, and make the scales on their way. These stay with the pair until they are asked for, so that a
weight is read once if its scales are written right after its values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from enginewright.plugins.errors import PassError, SourceError
from enginewright.plugins.ops.quantization import LARGEST, groups_of

from .provenance import Part
from .stacked_weights import pieces
from .weights import Shape, WeightExpr

_CHUNK_ELEMENTS = 1 << 20
"""Elements quantized at a time: no second float copy of a large weight is made."""


@dataclass(frozen=True)
class QuantizationCounts:
    """What rounding did to one weight beyond rounding.

    ``saturated``: values that the rounded scale would have taken beyond 127, and that were clamped. ``vanished``:
    groups that were not all zero, but so small that their float16 scale is.
    """

    values: int
    saturated: int
    vanished: int


@dataclass
class _Shared:
    """What the two expressions of a pair leave for each other and for the report."""

    scales: torch.Tensor | None = None
    counts: QuantizationCounts | None = None


@dataclass(frozen=True)
class Quantized(WeightExpr):
    """What values and scales have in common: the base, the group size, and what one leaves for the other."""

    base: WeightExpr
    group_size: int
    _shared: _Shared = field(compare=False, repr=False)

    @property
    def counts(self) -> QuantizationCounts | None:
        """What quantizing did to the base; None until it has been evaluated."""
        return self._shared.counts

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return self.base.parts(axis)

    def _quantize(self, values: torch.Tensor | None) -> torch.Tensor:
        """The scales; fills ``values``, if given."""
        if values is None:
            values = torch.empty(self.base.shape, dtype=torch.int8)
        size = self.base.shape[-1]
        scales = torch.empty((*self.base.shape[:-1], groups_of(size, self.group_size)), dtype=torch.half)
        flat_values, flat_scales = values.view(-1, size), scales.view(-1, scales.shape[-1])
        step = max(1, _CHUNK_ELEMENTS // size)
        at = saturated = vanished = 0
        for piece in pieces(self.base):  # experts that are stored one by one are read so
            value = piece.evaluate()
            for rows in value.reshape(-1, size).split(step):
                part = slice(at, at + len(rows))
                flat_values[part], flat_scales[part], s, v = _quantize_rows(rows.float(), self.group_size)
                at, saturated, vanished = at + len(rows), saturated + s, vanished + v
                if not torch.isfinite(flat_scales[part]).all():
                    raise self._error(value)
        self._shared.counts = QuantizationCounts(values.numel(), saturated, vanished)
        return scales

    def _error(self, value: torch.Tensor) -> SourceError | PassError:
        sources = ", ".join(dict.fromkeys(p.source for p in self.base.parts(0)))
        if not torch.isfinite(value).all():
            return SourceError(f"weight {sources}: it has NaN or infinite values", hint="The checkpoint is damaged.")
        return PassError(
            f"weight {sources}: its largest magnitude is {value.abs().max().item():g}, too large for float16 scales",
            hint='Give the module another format by an override in the recipe, such as { storage = "f32" }.',
        )


@dataclass(frozen=True)
class QuantizedValues(Quantized):
    """The integers of a quantized weight."""

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    def evaluate(self) -> torch.Tensor:
        """Raises SourceError if the base isn't finite, PassError if a scale is too large for float16."""
        values = torch.empty(self.base.shape, dtype=torch.int8)
        self._shared.scales = self._quantize(values)
        return values

    def describe(self) -> str:
        return f"int8({self.base.describe()}, {self.group_size})"


@dataclass(frozen=True)
class QuantizedScales(Quantized):
    """The scales of a quantized weight."""

    @property
    def shape(self) -> Shape:
        return (*self.base.shape[:-1], groups_of(self.base.shape[-1], self.group_size))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16

    def evaluate(self) -> torch.Tensor:
        """As ``QuantizedValues.evaluate``, and what that has made already if it came before."""
        scales, self._shared.scales = self._shared.scales, None
        return self._quantize(None) if scales is None else scales

    def describe(self) -> str:
        return f"scales({self.base.describe()}, {self.group_size})"


def quantized(base: WeightExpr, group_size: int) -> tuple[QuantizedValues, QuantizedScales]:
    """Values and scales of a weight of floats. Raises PassError for another, or one without a dimension to group."""
    if len(base.shape) < 2 or group_size < 0 or not base.dtype.is_floating_point:
        raise PassError(f"a weight {base.dtype} {base.shape} can't be quantized in groups of {group_size}")
    shared = _Shared()
    return QuantizedValues(base, group_size, shared), QuantizedScales(base, group_size, shared)


def _quantize_rows(rows: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """float32 [N, K] -> values [N, K], scales [N, groups], and how many saturated and vanished."""
    size = rows.shape[1]
    groups, width = groups_of(size, group_size), group_size or size
    padded = torch.nn.functional.pad(rows, (0, groups * width - size)).view(len(rows), groups, width)
    largest = padded.abs().amax(-1)  # [N, groups]
    scales = (largest / LARGEST).half()
    divisor = torch.where(scales == 0, torch.inf, scales.float())  # all values of a group that vanishes are zero
    rounded = (padded / divisor[..., None]).round_()
    values = rounded.clamp(-LARGEST, LARGEST)
    saturated = int((rounded != values).sum())
    vanished = int(((scales == 0) & (largest != 0)).sum())
    return values.to(torch.int8).view(len(rows), -1)[:, :size], scales, saturated, vanished
