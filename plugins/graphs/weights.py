"""Writes the weights of an ONNX graph into the bundle's blobs. They are external data, to which the graph refers by
offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, cast, get_args

import torch
from onnx import StringStringEntryProto, TensorProto, helper

from enginewright.passes.formats.rounding import TORCH_DTYPES
from enginewright.passes.ir.stacked_weights import pieces
from enginewright.passes.ir.weights import WeightExpr
from enginewright.passes.lowering.builder import Packing
from enginewright.runtime.bundle.weights import Array, TensorEntry, pack_nibbles
from enginewright.runtime.shared.dtypes import DTYPES, Dtype
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.lowered_program import WeightUse
from enginewright.runtime.shared.panel_layouts import Layout
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ..emit.bundle_writer import BundleWriter, blob_path
from ..emit.weights import add_weight, numpy_of, part_rows
from .float_types import FloatType

Form = Literal["rows", "columns"]
"""The order of a weight's axes: the program's, [.., N, K], or with the last two exchanged for a product, [.., K, N]."""

Stored = Literal["f32", "bf16", "f16", "fp8", "i8", "i4", "u4 less 8", "i4 pairs", "u4 pairs"]
"""The type of a weight's stored elements. Two values of 4 bits are in a byte, the first in its low half. "pairs" are
such bytes as u8 [.., K/2] in the graph, for operators without 4-bit types. "u4 less 8" is 0 .. 15 less 8, as i4,
because TensorRT has no u4.
"""

_DTYPES: Mapping[Stored, Dtype] = {"u4 less 8": "i4", "i4 pairs": "i4", "u4 pairs": "u4"}
"""The types of those stored elements that have another name."""
_MOST_F16 = 65504
_LEAST_SCALE: Mapping[Stored, float] = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-24}
"""The smallest positive scale of each type. The one of f16 is subnormal, but 127 times it is less than 1e-5."""
_CHUNK_BYTES = 32 << 20
"""The approximate size of the pieces in which a weight is transposed and written."""


class ExternalWeights:
    """Writes weights into the bundle when they are first needed, once for each form and type.

    Args:
        writer: the bundle's writer.
        progress: called with the stage "emit", for each weight.
        total: the number of weights in the program.
        suffix: a suffix of the weights' names in the bundle, since another target may store the same weight in another
            type.
    """

    def __init__(self, writer: BundleWriter, progress: Progress, total: int, suffix: str = "onnx") -> None:
        self._suffix = suffix
        self._writer = writer
        self._progress = progress
        self._total = total
        self._tensors: dict[tuple[str, Form, Stored], TensorProto] = {}
        self._panels: dict[str, TensorProto] = {}
        self._names: set[str] = set()

    def add(self, name: str, expr: WeightExpr, form: Form, stored: Stored, *, positive: bool = False) -> TensorProto:
        """Returns an initializer that refers to a weight's data, which is written first if necessary.

        One weight is in memory at a time, or one expert of a weight that is stored expert by expert.

        Args:
            name: the weight's name in the program.
            expr: the weight's values.
            form: the order of its axes.
            stored: the type of its elements.
            positive: True for scales, which may not be 0 as TensorRT-RTX rejects it. The scale of a group of zeros
                becomes the smallest positive number, with the same products.

        Raises:
            SourceError: its values aren't finite.
            UnsupportedModelError: values are beyond f16's range.
            BundleError, CapacityError: it can't be written.
        """
        key = (name, form, stored)
        if key not in self._tensors:
            self._tensors[key] = self._write(name, expr, form, stored, positive)
            self._names.add(name)
            self._progress(ProgressEvent("emit", min(len(self._names), self._total), self._total, name))
        return self._tensors[key]

    def add_panels(self, name: str, expr: WeightExpr, packing: Packing) -> TensorProto:
        """Returns an initializer for a weight in the kernels' layout. It shares the bytes of the cpu target's weight if
        possible.
        """
        label = f"{name}.{self._suffix}.panels"
        if label not in self._panels:
            use = WeightUse(name=label, dtype=packing.dtype, shape=expr.shape, layout=packing.layout)
            entry = add_weight(self._writer, use, expr)
            element = helper.np_dtype_to_tensor_dtype(entry.stored_dtype)
            self._panels[label] = _external(label, entry, element, entry.stored_shape)
        return self._panels[label]

    def _write(self, name: str, expr: WeightExpr, form: Form, stored: Stored, positive: bool) -> TensorProto:
        shape = expr.shape if form == "rows" else (*expr.shape[:-2], expr.shape[-1], expr.shape[-2])
        dtype = _dtype(stored)
        layout: Layout = "nibbles" if DTYPES[dtype].bits == 4 else "rows"
        # The cpu target may have stored the same weight in another layout, under its own name.
        label = f"{name}.{self._suffix}" if form == "rows" else f"{name}.{self._suffix}.columns"
        axis = 1 if form == "columns" and len(shape) == 2 else 0
        parts = tuple(part_rows(part) for part in expr.parts(axis))
        chunks = _chunks(name, expr, form, stored, positive)
        entry = self._writer.weights().add(label, chunks, layout, parts, shape=shape, dtype=dtype)
        if "pairs" in stored:
            return _external(label, entry, DTYPES["u8"].onnx, (*shape[:-1], shape[-1] // 2))
        return _external(label, entry, DTYPES[dtype].onnx, shape)


def _external(name: str, entry: TensorEntry, element: int, dims: tuple[int, ...]) -> TensorProto:
    """Returns a tensor that refers to the data of ``entry`` in a blob. ``element`` is ONNX's type of the elements."""
    tensor = TensorProto(name=name, data_type=element, dims=dims, data_location=TensorProto.EXTERNAL)
    for field, value in (
        ("location", blob_path(entry.blob)),
        ("offset", str(entry.offset)),
        ("length", str(entry.bytes)),
    ):
        tensor.external_data.append(StringStringEntryProto(key=field, value=value))
    return tensor


def _chunks(name: str, expr: WeightExpr, form: Form, stored: Stored, positive: bool) -> Iterator[Array]:
    """Yields the stored elements of a weight in order, in pieces. The arguments are those of
    ``ExternalWeights.add``.
    """
    for part in pieces(expr):
        value = part.evaluate()
        if positive:
            value = value.to(TORCH_DTYPES[stored])
            value = torch.where(value == 0, torch.tensor(_LEAST_SCALE[stored], dtype=value.dtype), value)
        if stored == "f16" and not value.abs().max() <= _MOST_F16:
            raise UnsupportedModelError(
                f"weight {name}: it has values beyond {_MOST_F16:,}, which f16 does not have",
                hint="Take bf16 for this target: dtype in [engines] of the recipe.",
            )
        if form == "columns":
            value = value.transpose(-1, -2)
        for matrix in value if value.dim() > 2 else (value,):  # of 4 bits one fills its last byte: K is even
            yield from _rows(matrix, stored)


def _rows(value: torch.Tensor, stored: Stored) -> Iterator[Array]:
    if value.dim() < 2:
        yield _array(value, stored)
        return
    step = max(1, _CHUNK_BYTES // max(1, 4 * value.shape[1])) // 2 * 2 or 2  # an even number has whole bytes
    for start in range(0, value.shape[0], step):
        array = _array(value[start : start + step], stored)
        yield pack_nibbles(array) if DTYPES[_dtype(stored)].bits == 4 else array


def _dtype(stored: Stored) -> Dtype:
    return _DTYPES.get(stored) or cast("Dtype", stored)


def _array(value: torch.Tensor, stored: Stored) -> Array:
    if stored == "u4 less 8":
        value = value - 8
    return numpy_of((value.to(TORCH_DTYPES[stored]) if stored in get_args(FloatType) else value).contiguous())
