"""The integers in a GGUF file's blocks, as they are, and which rows of them a weight of the model consists of.

A block is 32 neighbours of a row (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h):

    Q4_0  scale f16, 16 bytes          weight = scale * (value - 8)
    Q4_1  scale f16, min f16, 16 bytes weight = scale * value + min
    Q8_0  scale f16, 32 signed bytes   weight = scale * value

Byte j of the 16 has value j in its low half, and value j + 16 in its high half.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from enginewright.optimizer.shared.resources import THREADS, release_pages
from enginewright.passes.ir.prequantized import CodeFormat, Codes

BLOCK = 32

_CHUNK_ELEMENTS = 1 << 16
"""Dequantized at a time: what is made on the way stays in caches."""

FORMATS: Mapping[gguf.GGMLQuantizationType, CodeFormat] = {
    gguf.GGMLQuantizationType.Q4_0: CodeFormat(4, BLOCK),
    gguf.GGMLQuantizationType.Q4_1: CodeFormat(4, BLOCK, offsets=True),
    gguf.GGMLQuantizationType.Q8_0: CodeFormat(8, BLOCK),
}
"""Types of blocks whose integers a bundle can hold."""

Rearrange = Callable[[Callable[[gguf.ReaderTensor], npt.NDArray[Any]]], npt.NDArray[Any]]
"""Makes a weight of the model of its tensors, each of which is given by the function that it takes."""


def format_of(tensors: Sequence[gguf.ReaderTensor]) -> CodeFormat | None:
    """The format of the tensors' blocks, if they all have one and the same that a bundle can hold."""
    kinds = {t.tensor_type for t in tensors}
    return FORMATS.get(kinds.pop()) if len(kinds) == 1 else None


def rows_of(tensors: Sequence[gguf.ReaderTensor], rearrange: Rearrange) -> npt.NDArray[np.int64] | None:
    """Which row of the tensors, counted one after the other, is where in the weight: [..] for a weight [.., K].

    None if ``rearrange`` does more than put rows in another order. That is seen by what it makes of numbers of rows,
    and of numbers of columns.
    """
    starts = np.cumsum([0, *(_rows(t) for t in tensors)])
    size = int(tensors[0].shape[0])
    first = {t.name: int(start) for t, start in zip(tensors, starts, strict=False)}

    def row_numbers(tensor: gguf.ReaderTensor) -> npt.NDArray[Any]:
        lead = shape_of(tensor)[:-1]
        numbers = np.arange(math.prod(lead), dtype=np.int32).reshape(*lead, 1) + np.int32(first[tensor.name])
        return np.broadcast_to(numbers, shape_of(tensor))

    def column_numbers(tensor: gguf.ReaderTensor) -> npt.NDArray[Any]:
        return np.broadcast_to(np.arange(shape_of(tensor)[-1], dtype=np.int32), shape_of(tensor))

    rows = rearrange(row_numbers)
    if rows.ndim < 2 or rows.shape[-1] != size or (_distinct(rows) != rows[..., :1]).any():
        return None
    if (_distinct(rearrange(column_numbers)) != np.arange(size)).any():
        return None
    found = rows[..., 0].astype(np.int64)
    return found if np.array_equal(np.sort(found, axis=None), np.arange(starts[-1])) else None


def read_codes(tensors: Sequence[gguf.ReaderTensor], rows: npt.NDArray[np.int64]) -> Codes:
    """The integers of a weight of which ``rows_of`` says which rows it has."""
    parts = [_unpack(t) for t in tensors]
    stored = [np.concatenate(kind) if len(kind) > 1 else kind[0] for kind in zip(*parts, strict=True)]
    in_order = np.array_equal(rows.reshape(-1), np.arange(rows.size))
    values, scales, *offsets = (
        torch.from_numpy(kind.reshape(*rows.shape, -1) if in_order else kind[rows]) for kind in stored
    )
    release_pages(tensors[0].data)
    return Codes(values, scales, offsets[0] if offsets else None)


def dequantize(tensor: gguf.ReaderTensor) -> npt.NDArray[np.float32]:
    """The floats that a tensor's blocks stand for, in its shape: the package's, made of some thousand blocks at a time.

    Left to itself it takes 16 rows at a time, however short they are, and holds the result twice. Pieces are made
    side by side: numpy leaves Python's lock to others while it computes.
    """
    size, bytes_of_block = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    if size == 1:
        value: npt.NDArray[Any] = gguf.dequantize(tensor.data, tensor.tensor_type)
        return value.astype(np.float32, copy=False).reshape(shape_of(tensor))
    blocks = tensor.data.reshape(-1, bytes_of_block)
    result = np.empty((len(blocks), size), np.float32)
    step = max(1, _CHUNK_ELEMENTS // size)

    def fill(start: int) -> None:
        part = blocks[start : start + step]
        result[start : start + step] = gguf.dequantize(part.reshape(1, -1), tensor.tensor_type).reshape(-1, size)

    with ThreadPoolExecutor(THREADS) as threads:
        collections.deque(threads.map(fill, range(0, len(blocks), step)), maxlen=0)  # raises what one of them raised
    return result.reshape(shape_of(tensor))


def shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """Outermost first, as numpy has it; GGUF counts dimensions from the innermost."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _distinct(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array less what broadcasting repeats."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def _rows(tensor: gguf.ReaderTensor) -> int:
    return math.prod(shape_of(tensor)[:-1])


def _unpack(tensor: gguf.ReaderTensor) -> tuple[npt.NDArray[Any], ...]:
    """Values int8 [rows, K], scales float16 [rows, K / 32] and, of Q4_1, offsets of the same shape."""
    kind = tensor.tensor_type
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rows = _rows(tensor)
    blocks = tensor.data.reshape(rows, -1, size)  # bytes
    factors = [
        np.ascontiguousarray(blocks[..., 2 * i : 2 * i + 2]).view("<f2")[..., 0].astype(np.float16, copy=False)
        for i in range(1 + FORMATS[kind].offsets)
    ]
    if kind == gguf.GGMLQuantizationType.Q8_0:
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    else:
        packed = blocks[..., -BLOCK // 2 :]
        values = np.concatenate((packed & 0xF, packed >> 4), axis=-1).view(np.int8)
        if kind == gguf.GGMLQuantizationType.Q4_0:
            values -= np.int8(8)
    return values.reshape(rows, -1), *factors
