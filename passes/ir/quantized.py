"""Weights quantized to integers or 8-bit floats, lazily: expressions for the values, scales and perhaps offsets of one
base.

A weight [.., N, K] in groups of G along K (0: all of K is one group) becomes

    values   int8 [.., N, K]              8 bits: -127 to 127; 4 bits: -8 to 7, with offsets 0 to 15; 2 to 6 alike
             e4m3fn [.., N, K]            8-bit floats: -448 to 448
    scales   float16 [.., N, ceil(K/G)]   8 bits: the largest magnitude of a group / 127, or for floats / 448, in
                                          float16; 4 bits: see round_to_4_bits.py
    offsets  the same shape               only for 2 to 5 bits, if the format has them

so that ``values * scales + offsets`` approximates it. In blocks of scales, scales and offsets are int8, as
``ops.quantization.scales_in_blocks`` returns them. Values are rounded for the scale as stored, not the exact one.

A ``Prequantized`` weight, or a slice of one, isn't rounded again if it has the requested format. The same holds for
integers of 2 or 3 bits if the format has 4 bits.

Computing the values also computes scales and offsets. These are kept until they are requested. So a weight is read once
if its scales and offsets are written right after its values. With ``CodeFiles``, a weight is also rounded only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields

import torch

from enginewright.runtime.shared.errors import PassError, SourceError
from enginewright.runtime.shared.threads import available_threads
from enginewright.runtime.shared.weight_formats import FORMATS

from ..formats.grid import Grid
from ..formats.rounding import ROUNDINGS, RoundedRows
from ..ops.quantization import groups_of, scales_as_floats, scales_in_blocks
from .chosen_rows import Chosen
from .code_files import CodeFiles
from .prequantized import CodeFormat, Codes, Prequantized, decode
from .provenance import Part
from .stacked_weights import Stack, pieces
from .weights import Cast, Concat, Shape, Slice, WeightExpr

_CHUNK_ELEMENTS = 1 << 18
"""The number of elements that a thread rounds at a time. So there is no second float copy of a large weight, and a
search for scales stays in the CPU's caches. With fewer elements, calls of torch would take most of the time.
"""


@dataclass(frozen=True)
class QuantizationCounts:
    """The effects of quantizing one weight.

    Attributes:
        values: the number of values in the weight.
        saturated: the number of 8-bit values that would exceed 127 (or 448) with the rounded scale, and were clamped.
            4-bit values are clamped on purpose where that has the least error, and aren't counted.
        vanished: the number of groups whose float16 scale is 0, although their values differ.
        kept: the number of values that are the source's integers.
    """

    values: int = 0
    saturated: int = 0
    vanished: int = 0
    kept: int = 0

    def __add__(self, other: QuantizationCounts) -> QuantizationCounts:
        return QuantizationCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def of_part(self, values: int) -> QuantizationCounts:
        """Returns the counts for a part of the weight with ``values`` values.

        Its ``kept`` is ``values`` if the whole weight was kept, otherwise 0, as it isn't known which values were. The
        other counts stay.
        """
        return QuantizationCounts(values, self.saturated, self.vanished, values if self.kept == self.values else 0)


@dataclass
class _Shared:
    """The state that the expressions for values, scales and offsets of one weight share: computed codes and counts, and
    the files of rounded weights, if there are any.
    """

    files: CodeFiles | None = None
    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: QuantizationCounts | None = None


@dataclass(frozen=True)
class Quantized(WeightExpr):
    """The base class of the expressions for values, scales and offsets of a quantized weight.

    Attributes:
        base: the weight to quantize.
        format: the format.
    """

    base: WeightExpr
    format: CodeFormat
    _shared: _Shared = field(compare=False, repr=False)

    @property
    def counts(self) -> QuantizationCounts | None:
        """The effects of quantizing the base; None until the values have been computed."""
        return self._shared.counts

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return self.base.parts(axis)

    def codes(self) -> Codes:
        """Computes and returns values, scales and offsets."""
        members = pieces(self.base)  # experts that are stored one by one are read so
        if len(members) == 1:
            codes, self._shared.counts = _codes(self.base, self.format, self._shared.files)
            return codes
        codes = _empty(self.base.shape, self.format)
        counts = QuantizationCounts()
        for i, member in enumerate(members):
            part, part_counts = _codes(member, self.format, self._shared.files)
            for to, value in zip(codes.tensors, part.tensors, strict=True):
                to[i] = value[0]
            counts += part_counts
        self._shared.counts = counts
        return codes


@dataclass(frozen=True)
class QuantizedValues(Quantized):
    """The integers, or 8-bit floats, of a quantized weight."""

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    def evaluate(self) -> torch.Tensor:
        """Computes the values. Raises SourceError if the base isn't finite, PassError if a scale is too large for
        float16.
        """
        codes = self.codes()
        self._shared.codes["scales"] = codes.scales
        if codes.offsets is not None:
            self._shared.codes["offsets"] = codes.offsets
        return codes.values

    def describe(self) -> str:
        return f"{self.format.storage}({self.base.describe()}, {self.format.group_size})"


@dataclass(frozen=True)
class QuantizedFloats(QuantizedValues):
    """A quantized weight's dequantized floats, for a format that no kernel reads."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def evaluate(self) -> torch.Tensor:
        """Returns the dequantized floats of ``codes()``. Raises the errors of ``QuantizedValues.evaluate``."""
        return decode(self.codes(), self.format)

    def describe(self) -> str:
        return f"floats({super().describe()})"


@dataclass(frozen=True)
class _Factors(Quantized):
    @property
    def shape(self) -> Shape:
        return _factors_shape(self.base.shape, self.format)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.format.scale_block else torch.float16


@dataclass(frozen=True)
class QuantizedScales(_Factors):
    """The scales of a quantized weight."""

    def evaluate(self) -> torch.Tensor:
        """Returns the scales. If the values were computed before, they are those that were kept then.

        Raises the errors of ``QuantizedValues.evaluate``.
        """
        scales = self._shared.codes.pop("scales", None)
        return self.codes().scales if scales is None else scales

    def describe(self) -> str:
        return f"scales({self.base.describe()}, {self.format.group_size})"


@dataclass(frozen=True)
class QuantizedOffsets(_Factors):
    """The offsets of a quantized weight."""

    def evaluate(self) -> torch.Tensor:
        """Returns the offsets. If the values were computed before, they are those that were kept then.

        Raises the errors of ``QuantizedValues.evaluate``.
        """
        offsets = self._shared.codes.pop("offsets", None)
        if offsets is None:
            offsets = self.codes().offsets
        assert offsets is not None
        return offsets

    def describe(self) -> str:
        return f"offsets({self.base.describe()}, {self.format.group_size})"


def quantized(
    base: WeightExpr, code_format: CodeFormat, files: CodeFiles | None = None
) -> tuple[QuantizedValues, QuantizedScales, QuantizedOffsets | None]:
    """Returns expressions for the values, the scales and, if the format has them, the offsets of a float weight.

    ``files`` keeps the rounded weight; with None it is rounded at each evaluation.

    Raises PassError if the weight isn't floats, has no dimension to group, or has a K that the groups don't fit.
    """
    size = code_format.group_size
    if len(base.shape) < 2 or size < 0 or not base.dtype.is_floating_point:
        raise PassError(f"a weight {base.dtype} {base.shape} can't be quantized in groups of {size}")
    stored = FORMATS.get(code_format.storage)
    blocks = groups_of(base.shape[-1], size) % (code_format.scale_block or 1) == 0
    shifted = stored is not None and (stored.shifted or not code_format.offsets)
    if stored is None or not shifted or not blocks or not stored.fits(base.shape[-1], size):
        raise PassError(f"a weight {base.shape} can't be quantized to {code_format}")
    shared = _Shared(files)
    offsets = QuantizedOffsets(base, code_format, shared) if code_format.offsets else None
    return QuantizedValues(base, code_format, shared), QuantizedScales(base, code_format, shared), offsets


def quantized_floats(base: WeightExpr, code_format: CodeFormat, files: CodeFiles | None = None) -> QuantizedFloats:
    """Returns the dequantized floats of a weight that is quantized to ``code_format``.

    ``files`` is as for ``quantized``, whose errors are raised.
    """
    values, _, _ = quantized(base, code_format, files)
    return QuantizedFloats(base, code_format, values._shared)


def _factors_shape(shape: Shape, code_format: CodeFormat) -> Shape:
    groups, block = groups_of(shape[-1], code_format.group_size), code_format.scale_block
    return (*shape[:-1], groups // block * (2 + block) if block else groups)


def _empty(shape: Shape, code_format: CodeFormat) -> Codes:
    """Allocates the codes of a weight of shape ``shape``."""
    factors = _factors_shape(shape, code_format)
    kind = torch.int8 if code_format.scale_block else torch.half
    offsets = torch.empty(factors, dtype=kind) if code_format.offsets else None
    codebook = FORMATS[code_format.storage].codebook
    values = shape if codebook is None else (*shape[:-1], factors[-1] * (codebook.block_bytes - 2))
    return Codes(torch.empty(values, dtype=code_format.dtype), torch.empty(factors, dtype=kind), offsets)


def round_rows(rows: torch.Tensor, code_format: CodeFormat) -> RoundedRows:
    """Rounds rows [N, K] float32 to a format. The result of a row doesn't depend on other rows."""
    result = ROUNDINGS[code_format.storage].round(rows, code_format.group_size, code_format.offsets)
    return _in_blocks(result, rows, code_format) if code_format.scale_block else result


def _in_blocks(found: RoundedRows, rows: torch.Tensor, code_format: CodeFormat) -> RoundedRows:
    """Converts the scales and offsets of rounded rows from a float16 per group to blocks of groups.

    ``found`` is the result of rounding ``rows`` [N, K]. The new scales and offsets are the nearest to the old ones, and
    values are rounded again for them.
    """
    block = code_format.scale_block
    groups = groups_of(rows.shape[1], code_format.group_size)
    scales = scales_in_blocks(found.scales, block)
    offsets = None if found.offsets is None else scales_in_blocks(found.offsets, block)
    exact = scales_as_floats(scales, groups)[..., None]
    shift = 0.0 if offsets is None else scales_as_floats(offsets, groups)[..., None]
    grid = Grid.of(code_format.storage, offsets=code_format.offsets)
    values = grid.quantized(rows.unflatten(-1, (groups, -1)), exact, shift)
    return RoundedRows(values.flatten(-2).to(torch.int8), scales, offsets, found.saturated, found.vanished)


def _finite(factors: Iterable[torch.Tensor], size: int, code_format: CodeFormat) -> bool:
    """Returns True if these scales and offsets of rows with K = ``size`` are finite."""
    groups = groups_of(size, code_format.group_size)
    return all(bool(torch.isfinite(scales_as_floats(t, groups)).all()) for t in factors)


def formats_of_rows(expr: WeightExpr) -> frozenset[CodeFormat | None]:
    """Returns the formats of a weight's rows that are integers already; None is among them if some rows aren't
    integers.
    """
    last = len(expr.shape) - 1
    match expr:
        case Prequantized():
            return frozenset({expr.code_format})
        case Concat() | Stack() if expr.dim != last:
            return frozenset[CodeFormat | None]().union(*(formats_of_rows(b) for b in expr.bases))
        case Slice() | Chosen() if expr.dim != last:
            return formats_of_rows(expr.base)
        case Cast(to=torch.float32 | torch.float64):
            return formats_of_rows(expr.base)
        case _:
            return frozenset({None})


def _codes(expr: WeightExpr, code_format: CodeFormat, files: CodeFiles | None) -> tuple[Codes, QuantizationCounts]:
    """Returns the codes of a weight, and counts: known integers of the format are unchanged, other values are
    rounded.
    """
    if not any(kind is not None and code_format in (kind, kind.in_4_bits) for kind in formats_of_rows(expr)):
        return _rounded(expr, code_format, files)
    match expr:
        case Prequantized():
            codes = expr.codes()
            if not _finite(codes.tensors[1:], expr.shape[-1], code_format):
                raise _error(expr, expr.evaluate())
            count = math.prod(expr.shape)
            return codes, QuantizationCounts(count, kept=count if expr.of_source else 0)
        case Concat() | Stack():
            members = [_codes(b, code_format, files) for b in expr.bases]
            join = torch.cat if isinstance(expr, Concat) else torch.stack
            joined = [join(kind, expr.dim) for kind in zip(*(c.tensors for c, _ in members), strict=True)]
            return Codes(*joined), sum((n for _, n in members), QuantizationCounts())
        case Slice():
            codes, counts = _codes(expr.base, code_format, files)
            rows = [t.narrow(expr.dim, expr.start, expr.stop - expr.start) for t in codes.tensors]
            return Codes(*rows), counts.of_part(math.prod(expr.shape))
        case Chosen():
            codes, counts = _codes(expr.base, code_format, files)
            rows = [t.index_select(expr.dim, torch.tensor(expr.indices)) for t in codes.tensors]
            return Codes(*rows), counts.of_part(math.prod(expr.shape))
        case Cast():
            return _codes(expr.base, code_format, files)
        case _:
            raise PassError(f"{expr.describe()} has no integers")


def _rounded(expr: WeightExpr, code_format: CodeFormat, files: CodeFiles | None) -> tuple[Codes, QuantizationCounts]:
    rounded = None if files is None else files.get(expr, code_format)
    if rounded is None:
        rounded = _round(expr, code_format)
        if files is not None:
            files.add(expr, code_format, rounded)
    tensors = (t for t in (rounded.values, rounded.scales, rounded.offsets) if t is not None)
    counts = QuantizationCounts(math.prod(expr.shape), rounded.saturated, rounded.vanished)
    return Codes(*(t.unflatten(0, expr.shape[:-1]) for t in tensors)), counts


def _round(expr: WeightExpr, code_format: CodeFormat) -> RoundedRows:
    value = expr.evaluate()
    size = value.shape[-1]
    rounded = round_matrix(value.reshape(-1, size), code_format)
    if not _finite((t for t in (rounded.scales, rounded.offsets) if t is not None), size, code_format):
        raise _error(expr, value)
    return rounded


def round_matrix(rows: torch.Tensor, code_format: CodeFormat) -> RoundedRows:
    """Rounds rows [N, K] of any float type to a format, a chunk at a time, on all cores.

    The result is the same for any number of cores.
    """
    codes, (count, size) = _empty(rows.shape, code_format), rows.shape
    step = max(1, _CHUNK_ELEMENTS // size)

    def round_chunk(start: int) -> tuple[int, int]:
        result = round_rows(rows[start : start + step].float(), code_format)
        tensors = (t for t in (result.values, result.scales, result.offsets) if t is not None)
        for to, part in zip(codes.tensors, tensors, strict=True):
            to[start : start + step] = part
        return result.saturated, result.vanished

    starts = range(0, count, step)
    threads = min(available_threads(), len(starts))
    counts = [round_chunk(start) for start in starts] if threads == 1 else _in_threads(threads, round_chunk, starts)
    saturated, vanished = (sum(kind) for kind in zip(*counts, strict=True))
    return RoundedRows(codes.values, codes.scales, codes.offsets, saturated, vanished)


def _in_threads(threads: int, work: Callable[[int], tuple[int, int]], tasks: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the results of ``work`` on tasks, in order, computed in new threads; torch runs each op in one thread."""
    threads_of_torch = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, tasks))
    finally:
        torch.set_num_threads(threads_of_torch)  # for later threads


def _error(expr: WeightExpr, value: torch.Tensor) -> SourceError | PassError:
    sources = ", ".join(dict.fromkeys(p.source for p in expr.parts(0)))
    if not torch.isfinite(value).all():
        return SourceError(f"weight {sources}: it has NaN or infinite values", hint="The checkpoint is damaged.")
    return PassError(
        f"weight {sources}: its largest magnitude is {value.abs().max().item():g}, too large for float16 scales",
        hint='Give the module another format by an override in the recipe, such as { storage = "f32" }.',
    )
