"""Evaluates, packs and writes weights in the layouts of kernels of lowered programs, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from enginewright.passes.formats.rounding import TORCH_DTYPES
from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.quantized import QuantizedFloats
from enginewright.passes.ir.stacked_weights import pieces
from enginewright.passes.ir.weights import WeightExpr
from enginewright.runtime.bundle.weights import Array, SourceRows, TensorEntry, pack, pack_blocks
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.lowered_program import WeightUse
from enginewright.runtime.shared.panel_layouts import PANEL
from enginewright.runtime.shared.weight_formats import Storage

from .bundle_writer import BundleWriter

_CHUNK_BYTES = 32 << 20
"""The approximate size of the pieces in which a weight is packed and written, so that a large table isn't copied."""


def add_weight(writer: BundleWriter, use: WeightUse, expr: WeightExpr, *, coded: bool = False) -> TensorEntry:
    """Evaluates a weight and writes it in its kernels' layout, a piece at a time.

    ``coded``: True if only ``Bundle.weight`` reads it. Then a format without kernels is stored as blocks instead of
    floats.

    Raises:
        UnsupportedModelError: a value can't be represented in the stored type.
        SourceError, BundleError, CapacityError: the weight can't be read or written.
    """
    stored: Array | Iterator[Array] = stored_chunks(use, expr)
    storage: Storage | None = None
    if coded and isinstance(expr, QuantizedFloats):
        codes, storage = expr.codes(), expr.format.storage
        stored = pack_blocks(codes.values.numpy(), codes.scales.numpy(), storage)
    rows = source_rows(expr)
    return writer.weights().add(use.name, stored, use.layout, rows, shape=use.shape, dtype=use.dtype, stored_as=storage)


def stored_chunks(use: WeightUse, expr: WeightExpr) -> Iterator[Array]:
    """Yields a weight's stored elements in order, a piece at a time. Raises the UnsupportedModelError of
    ``add_weight``.
    """
    return (chunk for p in pieces(expr) for chunk in _chunks(use, _stored_type(use, p.evaluate())))


def source_rows(expr: WeightExpr) -> tuple[SourceRows, ...]:
    """Returns the origins of a weight's rows, in the form of the weights index."""
    return tuple(part_rows(part) for part in expr.parts(0))


def part_rows(part: Part) -> SourceRows:
    """Returns the origin of the rows of one part."""
    return SourceRows(source=part.source, rows=(part.start, part.stop), axis=part.axis, mixed=part.mixed)


def _stored_type(use: WeightUse, value: torch.Tensor) -> torch.Tensor:
    """Returns a weight's values converted to the program's type. Raises UnsupportedModelError if one can't be
    represented.
    """
    narrow = value.to(TORCH_DTYPES[use.dtype])
    if use.dtype == "i32" and not torch.equal(narrow.to(value.dtype), value):
        raise UnsupportedModelError(
            f"weight {use.name}: it has integers beyond 32 bits", hint="The cpu target computes with 32-bit integers."
        )
    if use.dtype in ("bf16", "f16") and not torch.isfinite(narrow).all():
        raise UnsupportedModelError(
            f"weight {use.name}: it has values that are not finite in {use.dtype}",
            hint="Look at the checkpoint's tensor, or give the module another format by an override in the recipe.",
        )
    return narrow


def _chunks(use: WeightUse, value: torch.Tensor) -> Iterator[Array]:
    """Yields the stored elements of ``value`` in order, in pieces of whole panels or of some rows."""
    if value.dim() < 2:
        yield numpy_of(value.contiguous())
    elif value.dim() > 2 and use.layout != "rows":
        for matrix in value:
            yield from _chunks(use, matrix)
    else:
        row_bytes = max(1, value[0].numel() * value.element_size())
        step = max(1, _CHUNK_BYTES // (row_bytes * PANEL)) * PANEL
        for start in range(0, value.shape[0], step):
            yield pack(numpy_of(value[start : start + step]), use.layout, use.dtype)


def numpy_of(value: torch.Tensor) -> Array:
    """Returns a tensor as a numpy array that shares its memory, with ml_dtypes' types for bf16 and fp8."""
    dtype = next(DTYPES[name].numpy for name, of in TORCH_DTYPES.items() if of == value.dtype)
    if dtype.isbuiltin == 1:
        return value.numpy()
    return value.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy().view(dtype)
