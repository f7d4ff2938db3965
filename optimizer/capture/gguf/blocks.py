"""The integers in a GGUF file's blocks, as they are, and which rows of them a weight of the model consists of.

A block is 32 neighbours of a row, or 64, 128 or 256 (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
Values of a scale are its group; d and m are float16, s and t integers of a group:

    Q4_0, Q5_0, Q8_0   groups of 32   weight = d * (value - 8), d * (value - 16), d * value
    Q4_1, Q5_1         32             weight = d * value + m
    Q4_K, Q5_K         32, 8 a block  weight = d * s * value - m * t
    Q2_K               16, 16         weight = d * s * value - m * t
    Q3_K, Q6_K         16, 16         weight = d * s * (value - 4), d * s * (value - 32)
    IQ4_NL, IQ4_XS     32; 32, 8      weight = d * code, d * s * code: a value stands for one of 16 integers
    MXFP4, NVFP4       32; 16         weight = scale * code; the scale is a power of 2, or 8 bits of OCP's OFP8 (e4m3)
    IQ2_*, IQ3_*       256            vectors of a codebook: see runtime/shared/codebooks.py; the bytes are kept
    Q1_0, Q2_0         128; 64        weight = d * (2 * value - 1), d * (value - 1): of 2 bits here, -d * (1 - value)

A code is an integer of 8 bits here, one of FP4 twice its number.
Of 16 packed bytes, byte j has value j in its low half, and value j + 16 in its high half; of 32, value j + 32.
Values of Q1_0 and Q2_0 lie one after the other, the lowest bits of a byte first.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, cast

import gguf
import numpy as np
import numpy.typing as npt
import torch

from enginewright.optimizer.shared.resources import THREADS, release_pages
from enginewright.passes.ir.prequantized import CodeFormat, Codes
from enginewright.passes.ops.quantization import block_bytes
from enginewright.runtime.shared.codebooks import CODEBOOKS, VALUES
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.shared.weight_formats import IQ4, TWICE_E2M1

BLOCK = 32


class _Newer(IntEnum):
    """Types of blocks that the package ``gguf`` doesn't know yet."""

    Q2_0 = 42


Bytes = npt.NDArray[np.uint8]
Type = gguf.GGMLQuantizationType
Q2_0 = cast("Type", getattr(Type, "Q2_0", _Newer.Q2_0))
SIZES: Mapping[Type, tuple[int, int]] = {**gguf.GGML_QUANT_SIZES, Q2_0: (64, 18)}
"""Type of blocks -> (values of a block, bytes of a block)."""


class GgufTensor(NamedTuple):
    """A tensor of a file.

    Attributes: as in the package ``gguf``. ``shape`` begins with the innermost dimension. ``data`` is the mapped file
    from byte ``data_offset`` on, with the tensor's unread blocks; ``origin`` is the file.
    """

    name: str
    tensor_type: Type
    shape: tuple[int, ...]
    data: Bytes
    data_offset: int
    origin: str

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.data.size


_CHUNK_ELEMENTS = 1 << 16
"""The number of elements that are dequantized at a time, so that intermediate values stay in caches."""


class _Factors(NamedTuple):
    """Scales, or offsets, of blocks: float16 [.., blocks], and the integers of groups, int8 [.., blocks, groups]."""

    halves: npt.NDArray[np.float16]
    own: npt.NDArray[np.int8] | None = None

    def tensor(self) -> torch.Tensor:
        """Returns the factors as a tensor in the layout of ``Codes``."""
        halves = torch.from_numpy(np.ascontiguousarray(self.halves))
        return halves if self.own is None else block_bytes(halves, torch.from_numpy(np.ascontiguousarray(self.own)))


class _Unpacked(NamedTuple):
    """Values int8 [.., blocks, values of a block], and their factors. For codebooks the values are bytes."""

    values: npt.NDArray[np.int8]
    scales: _Factors
    offsets: _Factors | None = None


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """Returns the float16 at byte ``at`` of each block."""
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]
    return halves.astype(np.float16, copy=False)


def _halves(packed: Bytes) -> Bytes:
    """Unpacks values of 4 bits: bytes [.., n] to [.., 2 n], the low halves before the high ones."""
    return np.concatenate((packed & 0xF, packed >> 4), axis=-1)


def _fields(packed: Bytes, bits: int, per_byte: int) -> Bytes:
    """Unpacks values of ``bits`` bits: bytes [.., n] to [.., per_byte * n], the lowest bits of all bytes first."""
    places = np.arange(0, bits * per_byte, bits, dtype=np.uint8)[:, None]
    fields: Bytes = packed[..., None, :] >> places & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _signed(values: npt.NDArray[Any], zero: int) -> npt.NDArray[np.int8]:
    return (values - np.uint8(zero)).view(np.int8)


def _simple(blocks: Bytes, *, bits: int, offsets: bool) -> _Unpacked:
    """Unpacks blocks of Q4_0, Q4_1, Q5_0 and Q5_1."""
    values = _halves(blocks[..., -BLOCK // 2 :])
    if bits == 5:
        at = 4 if offsets else 2
        values |= np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little") << 4
    if offsets:
        return _Unpacked(values.view(np.int8), _Factors(_half(blocks, 0)), _Factors(_half(blocks, 2)))
    return _Unpacked(_signed(values, 1 << (bits - 1)), _Factors(_half(blocks, 0)))


def _bytes(blocks: Bytes) -> _Unpacked:
    return _Unpacked(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _Factors(_half(blocks, 0)))


def _q4_k(blocks: Bytes, *, bits: int = 4) -> _Unpacked:
    """Unpacks blocks of Q4_K and Q5_K, in which 12 bytes hold 8 scales and 8 minima of 6 bits."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    packed = blocks[..., -128:].reshape(*blocks.shape[:-1], 4, BLOCK)
    values = _halves(packed).reshape(*blocks.shape[:-1], 256)
    if bits == 5:
        values |= _fields(blocks[..., 16:48], 1, 8) << 4
    return _Unpacked(
        values.view(np.int8), _Factors(_half(blocks, 0), scales.view(np.int8)), _minus(_half(blocks, 2), minima)
    )


def _minus(halves: npt.NDArray[np.float16], minima: npt.NDArray[Any]) -> _Factors:
    """Returns the minima of blocks, which are subtracted, as negative offsets."""
    return _Factors(-halves, minima.view(np.int8))


def _q2_k(blocks: Bytes) -> _Unpacked:
    of_groups = blocks[..., :16]
    values = _fields(blocks[..., 16:80].reshape(*blocks.shape[:-1], 2, BLOCK), 2, 4).reshape(*blocks.shape[:-1], 256)
    scales = _Factors(_half(blocks, 80), (of_groups & 15).view(np.int8))
    return _Unpacked(values.view(np.int8), scales, _minus(_half(blocks, 82), of_groups >> 4))


def _q3_k(blocks: Bytes) -> _Unpacked:
    low = _fields(blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, BLOCK), 2, 4).reshape(*blocks.shape[:-1], 256)
    values = low | _fields(blocks[..., :32], 1, 8) << 2
    scales = _halves(blocks[..., 96:104]) | _fields(blocks[..., 104:108], 2, 4) << 4
    return _Unpacked(_signed(values, 4), _Factors(_half(blocks, 108), _signed(scales, 32)))


def _q6_k(blocks: Bytes) -> _Unpacked:
    low = _halves(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64))
    high = _fields(blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, BLOCK), 2, 4)
    values = (low | high << 4).reshape(*blocks.shape[:-1], 256)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _Unpacked(_signed(values, 32), _Factors(_half(blocks, 208), scales))


_LEVELS = np.array(IQ4, np.int8)
"""The numbers that the codes of IQ4_NL and IQ4_XS stand for."""
_E2M1 = np.array(TWICE_E2M1, np.int8)
"""Twice the numbers that the codes of MXFP4 and NVFP4 stand for, by code."""


def _iq4_nl(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_LEVELS[_halves(blocks[..., 2:])], _Factors(_half(blocks, 0)))


def _iq4_xs(blocks: Bytes) -> _Unpacked:
    low = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=-1).reshape(*blocks.shape[:-1], 8)
    two = blocks[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    scales = low | two.reshape(*blocks.shape[:-1], 8) << 4
    codes = _halves(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)).reshape(*blocks.shape[:-1], 256)
    return _Unpacked(_LEVELS[codes], _Factors(_half(blocks, 0), _signed(scales, 32)))


def _mxfp4(blocks: Bytes) -> _Unpacked:
    scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)  # 127 is 1, and codes are twice as large
    exact = scales.astype(np.float16)
    if not np.array_equal(exact.astype(np.float32), scales):
        raise ValueError("a scale of MXFP4 is below 2^-24 or above 2^15, which float16 doesn't have")
    return _Unpacked(_E2M1[_halves(blocks[..., 1:])], _Factors(exact))


_UE4M3 = np.ldexp(
    np.where(np.arange(256) & 0x78, 8 + np.arange(256) % 8, 2 * (np.arange(256) % 8)) / 8.0,
    (np.arange(256) >> 3 & 15) - 8,
).astype(np.float16)
"""Half of the number that a scale of NVFP4 stands for, by its byte: no sign, 4 bits of exponent, 3 of mantissa; 127 is
0.

The half makes up for codes that are twice their numbers.
"""
_UE4M3[127] = 0


def _nvfp4(blocks: Bytes) -> _Unpacked:
    codes = _halves(blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)).reshape(*blocks.shape[:-1], 64)
    return _Unpacked(_E2M1[codes], _Factors(_UE4M3[blocks[..., :4]].reshape(*blocks.shape[:-2], -1)))


def _q1_0(blocks: Bytes) -> _Unpacked:
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").view(np.int8)
    return _Unpacked(2 * bits - np.int8(1), _Factors(_half(blocks, 0)))


def _q2_0(blocks: Bytes) -> _Unpacked:
    values = blocks[..., 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return _Unpacked(1 - values.reshape(*blocks.shape[:-1], 64).view(np.int8), _Factors(-_half(blocks, 0)))


_TYPES: Mapping[Type, tuple[CodeFormat, Callable[[Bytes], _Unpacked]]] = {
    Type.Q4_0: (CodeFormat(4, BLOCK), partial(_simple, bits=4, offsets=False)),
    Type.Q4_1: (CodeFormat(4, BLOCK, offsets=True), partial(_simple, bits=4, offsets=True)),
    Type.Q5_0: (CodeFormat(5, BLOCK), partial(_simple, bits=5, offsets=False)),
    Type.Q5_1: (CodeFormat(5, BLOCK, offsets=True), partial(_simple, bits=5, offsets=True)),
    Type.Q8_0: (CodeFormat(8, BLOCK), _bytes),
    Type.Q2_K: (CodeFormat(2, 16, offsets=True, scale_block=16), _q2_k),
    Type.Q3_K: (CodeFormat(3, 16, scale_block=16), _q3_k),
    Type.Q4_K: (CodeFormat(4, BLOCK, offsets=True, scale_block=8), _q4_k),
    Type.Q5_K: (CodeFormat(5, BLOCK, offsets=True, scale_block=8), partial(_q4_k, bits=5)),
    Type.Q6_K: (CodeFormat(6, 16, scale_block=16), _q6_k),
    Type.IQ4_NL: (CodeFormat(4, BLOCK, kind="iq4"), _iq4_nl),
    Type.IQ4_XS: (CodeFormat(4, BLOCK, kind="iq4", scale_block=8), _iq4_xs),
    Type.MXFP4: (CodeFormat(4, BLOCK, kind="fp4"), _mxfp4),
    Type.NVFP4: (CodeFormat(4, 16, kind="fp4"), _nvfp4),
    Type.Q1_0: (CodeFormat(2, 128), _q1_0),
    Q2_0: (CodeFormat(2, 64), _q2_0),
    **{gguf.GGMLQuantizationType[name.upper()]: (CodeFormat(8, VALUES, kind=name), _bytes) for name in CODEBOOKS},
}
_OWN = (Type.Q1_0, Q2_0)
"""Types of blocks that the package ``gguf`` can't convert to floats, so that this module does."""

FORMATS: Mapping[Type, CodeFormat] = {name: of[0] for name, of in _TYPES.items()}
"""Type of blocks -> the format in which a bundle can hold their integers."""


def format_of(tensors: Sequence[GgufTensor]) -> CodeFormat | None:
    """Returns the format of the tensors' blocks; None if they differ, or if a bundle can't store them."""
    kinds = {t.tensor_type for t in tensors}
    return FORMATS.get(kinds.pop()) if len(kinds) == 1 else None


def rows_of(
    tensors: Sequence[GgufTensor],
    changes: Sequence[Callable[[npt.NDArray[Any]], npt.NDArray[Any]]],
    joined: Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any]],
) -> npt.NDArray[np.int64] | None:
    """Returns for each row of a weight [.., K] the row of the tensors from which it comes: [..].

    Rows are counted through all tensors. Returns None if a change does more than reorder rows, which is found out by
    applying the changes to row numbers and to column numbers.

    Args:
        tensors: the tensors of which the weight consists.
        changes: the change of each tensor.
        joined: joins the changed tensors along an axis before the last.
    """
    size, start, rows = int(tensors[0].shape[0]), 0, []
    for tensor, change in zip(tensors, changes, strict=True):
        shape = shape_of(tensor)
        numbers = np.arange(start, start + _rows(tensor), dtype=np.int64).reshape(*shape[:-1], 1)
        start += _rows(tensor)
        by_row = change(np.broadcast_to(numbers, shape))
        by_column = change(np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape))
        if by_row.ndim < 2 or by_row.shape[-1] != size or (_distinct(by_row) != by_row[..., :1]).any():
            return None
        if (_distinct(by_column) != np.arange(size)).any():
            return None
        rows.append(by_row[..., 0].copy())
    order = joined(rows)
    return order if np.array_equal(np.sort(order, axis=None), np.arange(start)) else None


def read_codes(tensors: Sequence[GgufTensor], rows: npt.NDArray[np.int64]) -> Codes:
    """Reads the integers of a weight. ``rows``: the result of ``rows_of``.

    Raises SourceError naming the tensor if its scales or offsets can't be represented.
    """
    parts = [_unpack(t) for t in tensors]
    stored = [torch.cat(kind) if len(kind) > 1 else kind[0] for kind in zip(*parts, strict=True)]
    in_order = np.array_equal(rows.reshape(-1), np.arange(rows.size))
    order = torch.from_numpy(np.ascontiguousarray(rows))
    values, scales, *offsets = (kind.reshape(*rows.shape, -1) if in_order else kind[order] for kind in stored)
    release_pages(tensors[0].data)
    return Codes(values, scales, offsets[0] if offsets else None)


def dequantize(tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """Returns a tensor's values as floats, in its shape. Raises NotImplementedError for a type that can't be converted.

    It calls the package `gguf` for some thousand blocks at a time, on several threads. By itself the package converts
    16 rows at a time, however short, and holds the result twice.
    """
    size, bytes_of_block = SIZES[tensor.tensor_type]
    if tensor.tensor_type == Type.BF16:  # a tenth of the time that the package takes
        stored = np.ascontiguousarray(tensor.data).view(np.uint16)
        return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32).reshape(shape_of(tensor))
    if size == 1:
        value: npt.NDArray[Any] = gguf.dequantize(tensor.data, tensor.tensor_type)
        return value.astype(np.float32, copy=False).reshape(shape_of(tensor))
    blocks = tensor.data.reshape(-1, bytes_of_block)
    result = np.empty((len(blocks), size), np.float32)
    step = max(1, _CHUNK_ELEMENTS // size)

    def fill(start: int) -> None:
        part = blocks[start : start + step]
        result[start : start + step] = floats(part, tensor.tensor_type)

    with ThreadPoolExecutor(THREADS) as threads:
        collections.deque(threads.map(fill, range(0, len(blocks), step)), maxlen=0)  # raises what one of them raised
    return result.reshape(shape_of(tensor))


def floats(blocks: Bytes, kind: Type) -> npt.NDArray[np.float32]:
    """Converts blocks [n, bytes] to floats [n, values of a block].

    Raises NotImplementedError as ``dequantize`` does.
    """
    if kind in _OWN:
        unpacked = _TYPES[kind][1](blocks)
        return np.multiply(unpacked.values, unpacked.scales.halves[:, None], dtype=np.float32)
    values: npt.NDArray[np.float32] = gguf.dequantize(blocks.reshape(1, -1), kind).reshape(-1, SIZES[kind][0])
    return values


def shape_of(tensor: GgufTensor) -> tuple[int, ...]:
    """Returns a tensor's shape with the outermost dimension first, as numpy has it. GGUF has the innermost first."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _distinct(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the array without the copies that broadcasting makes."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def _rows(tensor: GgufTensor) -> int:
    return math.prod(shape_of(tensor)[:-1])


def _unpack(tensor: GgufTensor) -> list[torch.Tensor]:
    """Unpacks a tensor's values, scales and, if the type has them, offsets: [rows, ..], as ``Codes`` has them."""
    kind = tensor.tensor_type
    rows = _rows(tensor)
    blocks = tensor.data.reshape(rows, -1, SIZES[kind][1])  # bytes
    try:
        unpacked = _TYPES[kind][1](blocks)
    except ValueError as e:
        raise SourceError(
            f"tensor {tensor.name}: {e}", hint="Export with a recipe that rounds weights anew, such as int8."
        ) from e
    factors = [f.tensor().reshape(rows, -1) for f in (unpacked.scales, unpacked.offsets) if f is not None]
    return [torch.from_numpy(np.ascontiguousarray(unpacked.values).reshape(rows, -1)), *factors]
