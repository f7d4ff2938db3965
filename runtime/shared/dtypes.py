"""Types of elements: a row for each type, a column for its name in each library.

No library but numpy is imported here; code that uses one looks its name up here. ml_dtypes, whose types numpy lacks, is
imported when one of them is needed: it takes 22 ms, and a bundle in int8 needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

Dtype = Literal[
    "f32", "bf16", "f16", "i32", "i8", "i4", "u4", "fp8", "i5", "u5", "i6", "iq4", "fp4", "i3", "u3", "i2", "u2"
]
"""The types in lowered programs and in the weights of bundles. fp8 is e4m3fn of OCP's OFP8 specification; iq4 and
fp4 are one of the integers that their format lists (``levels``)."""


class ElementType(NamedTuple):
    """A type of elements. A column is "" or 0 if the library lacks the type or we don't use it there.

    Attributes:
        bits: the bits of a stored element.
        array: the name of the type of arrays, in numpy or ml_dtypes; below 8 bits, one value per int8.
        torch: the attribute of ``torch``.
        onnx: the number in ``TensorProto``.
        tensorrt: the attribute of ``tensorrt.DataType``.
        stablehlo: its name in a module's text.
        tvm: the type as which kernels compiled by TVM read it.
        safetensors: its name in a file.
        triton: the type of a pointer to it, in a kernel's signature.
    """

    bits: int
    array: str
    torch: str
    onnx: int = 0
    tensorrt: str = ""
    stablehlo: str = ""
    tvm: str = "uint8"
    safetensors: str = ""
    triton: str = ""

    @property
    def numpy(self) -> np.dtype[Any]:
        """The type of arrays."""
        return _numpy_type(self.array)


@cache
def _numpy_type(name: str) -> np.dtype[Any]:
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)


DTYPES: Mapping[str, ElementType] = {
    "f64": ElementType(64, "float64", "float64", 11, safetensors="F64", triton="fp64"),
    "f32": ElementType(32, "float32", "float32", 1, "FLOAT", "f32", "float32", "F32", "fp32"),
    "bf16": ElementType(16, "bfloat16", "bfloat16", 16, "BF16", "bf16", "uint16", "BF16", "bf16"),
    "f16": ElementType(16, "float16", "float16", 10, "HALF", "f16", "uint16", "F16", "fp16"),
    "fp8": ElementType(8, "float8_e4m3fn", "float8_e4m3fn", 17, "FP8", "f8E4M3FN", "uint8", "F8_E4M3", "fp8e4nv"),
    "f8_e5m2": ElementType(8, "float8_e5m2", "float8_e5m2", safetensors="F8_E5M2"),
    "f8_e8m0": ElementType(8, "float8_e8m0fnu", "float8_e8m0fnu", safetensors="F8_E8M0"),
    "i64": ElementType(64, "int64", "int64", 7, "INT64", "i64", safetensors="I64", triton="i64"),
    "i32": ElementType(32, "int32", "int32", 6, "INT32", "i32", "int32", "I32", "i32"),
    "i16": ElementType(16, "int16", "int16", safetensors="I16"),
    "i8": ElementType(8, "int8", "int8", 3, "INT8", "i8", "int8", "I8", "i8"),
    "u16": ElementType(16, "uint16", "uint16", stablehlo="ui16"),
    "u8": ElementType(8, "uint8", "uint8", 2, "UINT8", "ui8", safetensors="U8", triton="u8"),
    "bool": ElementType(8, "bool", "bool", 9, "BOOL", "i1", safetensors="BOOL"),
    "i4": ElementType(4, "int8", "int8", 22, "INT4", "i4"),
    "u4": ElementType(4, "int8", "int8", 21),
    "i5": ElementType(5, "int8", "int8"),
    "u5": ElementType(5, "int8", "int8"),
    "i6": ElementType(6, "int8", "int8"),
    "iq4": ElementType(4, "int8", "int8"),
    "fp4": ElementType(4, "int8", "int8"),
    "i3": ElementType(3, "int8", "int8"),
    "u3": ElementType(3, "int8", "int8"),
    "i2": ElementType(2, "int8", "int8"),
    "u2": ElementType(2, "int8", "int8"),
}

BYTES_PER_ELEMENT: Mapping[str, int] = {name: of.bits // 8 for name, of in DTYPES.items() if of.bits >= 8}
NAME_OF_ONNX: Mapping[int, str] = {of.onnx: name for name, of in DTYPES.items() if of.onnx}


def stored_bytes(dtype: str, elements: int) -> int:
    """Returns the bytes of contiguous elements; elements of fewer than 8 bits share bytes."""
    return -(-elements * DTYPES[dtype].bits // 8)
