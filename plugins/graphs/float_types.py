"""The float type of each tensor of a graph that computes in 16 bits.

Products, caches, norms (which sum in 32 bits themselves), rotations, and what is added or moved between them have the
narrow type. Sums, powers, exponentials, softmax and all that positions are computed with have 32 bits, also in a graph
of bf16 or f16. What works element by element has the type of what it gets, the narrow one if it gets both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from enginewright.runtime.shared.dtypes import DTYPES, NAME_OF_ONNX, NUMPY_DTYPES

FloatType = Literal["f32", "f16", "bf16"]

ELEMENTS: Mapping[FloatType, int] = {name: DTYPES[name].onnx for name in get_args(FloatType)}

_NARROW = frozenset(
    {"MatMul", "Gemm", "Attention", "TensorScatter", "RMSNormalization", "LayerNormalization", "RotaryEmbedding"}
)
_WIDE = frozenset(
    {"Cos", "Sin", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Softmax", "Erf"}
    | {"ReduceSum", "ReduceMean", "ReduceMax"}
)
_NO_FLOATS = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Shape"})
"""The operators whose results aren't floats, whatever their inputs are."""


def operand_type(kind: str, computed: Sequence[int], constant: Sequence[int], narrow: int) -> int | None:
    """The type that an operator's float operands must have; None: as they are.

    Args:
        kind: the operator.
        computed, constant: the float types of its operands, those known when the graph is built apart.
        narrow: the type of the graph.
    """
    if kind == "DequantizeLinear" or not (computed or constant):
        return None  # its scales are stored in the type that it gives
    if kind in _NARROW:
        return narrow
    if kind in _WIDE:
        return TensorProto.FLOAT
    if computed:
        return narrow if narrow in computed else TensorProto.FLOAT
    return None if len(set(constant)) == 1 else TensorProto.FLOAT


def result_type(kind: str, operands: Sequence[int], to: int | None) -> int | None:
    """The float type that an operator gives; None: no float. ``to``: of a Cast."""
    if kind == "Cast":
        return to if to in ELEMENTS.values() else None
    if kind in _NO_FLOATS or not operands:
        return None
    return operands[0]


def narrowed(array: npt.NDArray[np.float32], kind: int) -> npt.NDArray[np.generic]:
    """A constant in another float type; what is beyond its range becomes the last that is in it."""
    dtype = NUMPY_DTYPES[NAME_OF_ONNX[kind]]
    most = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    finite = np.where(np.isfinite(array), np.clip(array, -most, most), array)
    return np.asarray(finite.astype(dtype))
