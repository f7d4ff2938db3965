"""Decides the float type of each tensor in a graph that computes in 16 bits.

Products, caches, norms (which add in 32 bits internally), rotations, additions and moves between them use the 16-bit
type. Sums, powers, exponentials, softmax and computations with positions use 32 bits in every graph. An element-wise
operator has the type of its operands; if they differ, the 16-bit one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from enginewright.runtime.shared.dtypes import DTYPES, NAME_OF_ONNX

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
    """Returns the type to which an operator's float operands must be cast; None if they need no cast.

    Args:
        kind: the operator.
        computed: the float types of computed operands.
        constant: the float types of operands that are constants.
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
    """Returns the float type of an operator's result; None if the result isn't floats.

    ``operands`` has the operands' float types, ``to`` the type of a Cast.
    """
    if kind == "Cast":
        return to if to in ELEMENTS.values() else None
    if kind in _NO_FLOATS or not operands:
        return None
    return operands[0]


def narrowed(array: npt.NDArray[np.float32], kind: int) -> npt.NDArray[np.generic]:
    """Converts a constant to a narrower float type. Values beyond its range become its largest or smallest number."""
    dtype = DTYPES[NAME_OF_ONNX[kind]].numpy
    most = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    finite = np.where(np.isfinite(array), np.clip(array, -most, most), array)
    return np.asarray(finite.astype(dtype))
