"""The weights of a bundle: weights/index.json, and the blobs that it describes.

A blob is a file of tensors. Each tensor begins at a multiple of 64 bytes, so that vector loads can use the mapped file
(safetensors doesn't allow the gaps that this needs). Gaps are zero. Layouts of a tensor in its blob:

    rows      any shape, row-major
    panel32    [N, K] as [ceil(N/32)][K][32]: element (n, k) at ((n//32)*K + k)*32 + n%32
    panel32x2  [N, K] as [ceil(N/32)][ceil(K/2)][32][2], of bf16
    panel32x4  [N, K] as [ceil(N/32)][ceil(K/4)][32][4], of i8, each value + 128 in an unsigned byte
    panel32x8  [N, K] as [ceil(N/32)][ceil(K/8)][32][4] bytes, of i4 (each value + 8), u4, or iq4 and fp4 (the index
               of each value in its list). The 8 values of a row of a group of k are 4 bytes: byte j has value j in its
               low half, and value j + 4 in its high half
    planes32   [N, K] as [ceil(N/32)][K/16] pieces. A piece of i5 (each value + 16), u5 or i6 (value + 32) has the low
               4 bits of 16 k as in panel32x8, then 64 bytes with the fifth bits; i6 has this for 8 k each, and the 64
               bytes have the two upper bits. A piece of i2 (value + 2) or u2 has 64 bytes for 8 k, four values to a
               byte; one of i3 (value + 4) or u3 has two of these, then 64 bytes with the third bits
    blocks8, blocks16   bytes [N, G * 10] or [N, G * 18]: scales in G blocks of 8 or 16 groups. For 32 rows, a block has
               a float16 of each row, then for each group a byte of each row
    sparse32   [N, K] of f32, bf16, i8 or i4, at most two of every four values along K not zero: ``sparse_panels.py``
    nibbles    any shape, row-major, of i4 (two's complement) or u4: two to a byte, the first in the low half

A tensor with ``stored_as`` has another format in its blob than in memory: ``Bundle.weight`` expands it to its type and
layout. In the blob, its rows are blocks of G values, as the format defines; the last block is padded with zeros:

    {float16 scale; byte values[G / 2]}     two values to a byte, the first in its low half

or, for a format with a codebook, the blocks of ``runtime/shared/codebooks.py``.

In all layouts but rows and nibbles, the padding of N and K is zero. A weight [E, N, K] is stored as E weights [N, K].
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, field

from ..shared.dtypes import DTYPES, Dtype
from ..shared.errors import BundleError
from ..shared.panel_layouts import BIAS, BLOCKS, DEPTHS, PANEL, Layout
from ..shared.records import Count, Record, parse_versioned, read
from ..shared.weight_formats import FORMAT_OF, FORMATS, Storage
from .manifest import BundlePath
from .sparse_panels import block_bytes, pack_sparse, unpack_sparse

FORMAT_VERSION = 8
"""The newest version of the index.

2 added sparse32, 3 nibbles, 4 fp8, 5 stored_as, 6 planes32 and blocks of scales, 7 integers of 2 and 3 bits, 8
codebooks. An index has the lowest version with all its layouts and types, so that older readers open it.
"""
INDEX_PATH = "weights/index.json"
ALIGNMENT = 64

_DTYPES_OF: dict[str, frozenset[str]] = {
    **{name: frozenset(d for f in FORMATS.values() if f.layout == name for d in f.dtypes) for name in DEPTHS},
    "panel32": frozenset(("bf16", "f16", *(d for f in FORMATS.values() if f.layout == "panel32" for d in f.dtypes))),
    "blocks8": frozenset(("i8",)),
    "blocks16": frozenset(("i8",)),
    "sparse32": frozenset(f.dtype for f in FORMATS.values() if f.sparse),
    "nibbles": frozenset(d for f in FORMATS.values() if f.bits == 4 and not f.levels for d in f.dtypes),
}
_SINCE: dict[str, int] = {
    "sparse32": 2,
    "nibbles": 3,
    "planes32": 6,
    "blocks8": 6,
    "blocks16": 6,
    **{f.dtype if f.layout else name: f.since for name, f in FORMATS.items()},
}
"""Layout, type or stored format -> the version of the index that added it; version 1 had those that aren't listed."""


class SourceRows(Record, frozen=True, kw_only=True):
    """Rows ``rows[0]`` to ``rows[1]`` (exclusive) of a source tensor; a tensor's parts are stacked in order.

    Attributes:
        axis: the source's axis that the rows are along; 1 if the source holds the weight transposed.
        mixed: the number of rows that these rows were combined into, such as several heads into one. 0: they were
            combined into the rows of the previous part. None: they are unchanged.
    """

    source: str
    rows: tuple[int, int]
    axis: Count = 0
    mixed: Count | None = None

    @property
    def size(self) -> int:
        """The number of rows that these source rows make in the bundle's tensor."""
        return self.rows[1] - self.rows[0] if self.mixed is None else self.mixed


class Blob(Record, frozen=True, kw_only=True):
    """A file of tensors."""

    file: BundlePath
    bytes: Count


class TensorEntry(Record, frozen=True, kw_only=True):
    """The location and the form of a tensor.

    Attributes:
        blob: the index of the file with the bytes.
        offset, bytes: the position of the first byte in the file, and the number of bytes as stored.
        dtype: the type of the elements.
        shape: the logical shape.
        layout: the order of the elements.
        stored_as: the format in which the elements are stored; None if they are stored as they are.
        parts: the rows of source tensors that the tensor was made of.
    """

    blob: Count
    offset: Annotated[int, Meta(ge=0, multiple_of=ALIGNMENT)]
    bytes: Count
    dtype: Dtype
    shape: tuple[int, ...]
    layout: Layout = "rows"
    stored_as: Storage | None = None
    parts: tuple[SourceRows, ...] = ()

    @property
    def kind(self) -> str:
        """The name of the format in which the values are stored; their type if they are stored as they are."""
        return self.stored_as or self.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return stored_shape(self.shape, self.layout, self.dtype)

    @property
    def stored_dtype(self) -> np.dtype[np.generic]:
        return stored_dtype(self.dtype, self.layout)


class WeightsIndex(Record, frozen=True, kw_only=True):
    """The contents of weights/index.json: the files with weights, and the location of each tensor by its name."""

    format_version: int = 1
    blobs: tuple[Blob, ...] = ()
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @classmethod
    def from_tensors(cls, blobs: tuple[Blob, ...], tensors: dict[str, TensorEntry]) -> WeightsIndex:
        """Returns an index of the lowest format version that has all its layouts and types."""
        kinds = [kind for t in tensors.values() for kind in (t.layout, t.kind)]
        least = max((_SINCE.get(kind, 1) for kind in kinds), default=1)
        return cls(format_version=least, blobs=blobs, tensors=tensors)

    def stored_once(self) -> dict[str, TensorEntry]:
        """Returns the tensors without those that share the bytes of an earlier tensor."""
        first: dict[tuple[int, int, int], str] = {}
        for name, t in self.tensors.items():
            first.setdefault((t.blob, t.offset, t.bytes), name)
        return {name: self.tensors[name] for name in first.values()}

    def to_json(self) -> str:
        """Returns the index as JSON; equal indices give equal bytes."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = INDEX_PATH) -> WeightsIndex:
        """Parses an index. Raises BundleError naming the field or tensor that is wrong, such as a tensor beyond its
        blob.
        """
        index = read(cls, parse_versioned(text, FORMAT_VERSION, source), source)
        for name, tensor in index.tensors.items():
            if problem := index._problem(tensor):
                raise BundleError(f"{source}: tensors.{name}: {problem}", hint="Export the bundle again.")
        return index

    def _problem(self, tensor: TensorEntry) -> str | None:
        """Returns the first contradiction in a tensor's entry; None if there is none."""
        return _layout_problem(tensor) or _format_problem(tensor) or self._place_problem(tensor)

    def _place_problem(self, tensor: TensorEntry) -> str | None:
        """Returns a message if a tensor's bytes contradict its shape or its blob; None if they don't."""
        if tensor.bytes != (expected := stored_bytes(tensor.shape, tensor.layout, tensor.dtype, tensor.stored_as)):
            return f"bytes is {tensor.bytes}, but {tensor.kind} {list(tensor.shape)} in {tensor.layout} has {expected}"
        if tensor.blob >= len(self.blobs):
            return f"blob is {tensor.blob}, but there are {len(self.blobs)}"
        blob = self.blobs[tensor.blob]
        if tensor.offset + tensor.bytes > blob.bytes:
            return f"ends at byte {tensor.offset + tensor.bytes} of {blob.file}, which has {blob.bytes}"
        return None


def _layout_problem(tensor: TensorEntry) -> str | None:
    """Returns a message if a tensor's layout contradicts its shape or type; None if it doesn't."""
    if tensor.layout not in ("rows", "nibbles") and len(tensor.shape) not in (2, 3):
        return f"layout {tensor.layout} needs two dimensions or three, shape is {list(tensor.shape)}"
    if tensor.layout != "rows" and tensor.dtype not in _DTYPES_OF[tensor.layout]:
        return f"layout {tensor.layout} is not for {tensor.dtype}"
    if any(n < 0 for n in tensor.shape):
        return f"shape is {list(tensor.shape)}"
    if tensor.layout == "sparse32" and (len(tensor.shape) != 2 or tensor.shape[1] % 4):
        return f"layout sparse32 needs two dimensions, the second a multiple of 4, shape is {list(tensor.shape)}"
    return None


def _format_problem(tensor: TensorEntry) -> str | None:
    """Returns a message if the format in which a tensor is stored contradicts its type or shape; None if it doesn't."""
    if tensor.stored_as is None:
        return None
    stored = FORMATS[tensor.stored_as]
    floats = DTYPES[tensor.dtype].numpy.kind == "f" or tensor.dtype == "bf16"
    if stored.layout or not floats:
        return f"{tensor.dtype} is not stored as {tensor.stored_as}"
    if stored.multiple and (not tensor.shape or tensor.shape[-1] % stored.multiple):
        return f"{tensor.stored_as} needs rows of a multiple of {stored.multiple}, shape is {list(tensor.shape)}"
    return None


def stored_shape(shape: tuple[int, ...], layout: Layout, dtype: Dtype = "f32") -> tuple[int, ...]:
    """Returns the shape of the array as stored: [.., N, K] in panel32x4 is [.., ceil(N/32), ceil(K/4), 32, 4]."""
    if layout == "rows":
        return shape
    if layout == "nibbles":
        return (-(-math.prod(shape) // 2),)
    *lead, rows, columns = shape
    if layout == "sparse32":
        return (*lead, -(-rows // PANEL), -(-columns // DEPTHS[layout]), block_bytes(dtype))
    side = DEPTHS[layout]
    if layout in BLOCKS:
        return (*lead, -(-rows // PANEL), -(-columns // side), side * PANEL)
    if layout == "planes32":
        return (*lead, -(-rows // PANEL), -(-columns // side), side * PANEL * DTYPES[dtype].bits // 8)
    panels = (*lead, -(-rows // PANEL), -(-columns // side), PANEL)
    if layout == "panel32":
        return panels
    return (*panels, side // 2 if layout == "panel32x8" else side)


def stored_dtype(dtype: Dtype, layout: Layout) -> np.dtype[np.generic]:
    """Returns the type of the stored elements: unsigned bytes for packed integers, otherwise the type of ``dtype``."""
    bytes_of = ("panel32x4", "panel32x8", "planes32", *BLOCKS, "sparse32", "nibbles")
    return np.dtype(np.uint8) if layout in bytes_of else DTYPES[dtype].numpy


def stored_bytes(shape: tuple[int, ...], layout: Layout, dtype: Dtype, stored_as: Storage | None = None) -> int:
    """Returns the number of bytes that a tensor takes in its blob, without alignment."""
    if stored_as is not None:
        return math.prod(_blocks_shape(shape, stored_as))
    return math.prod(stored_shape(shape, layout, dtype)) * stored_dtype(dtype, layout).itemsize


Array = npt.NDArray[Any]


def pack(weight: Array, layout: Layout, dtype: Dtype | None = None) -> Array:
    """Returns a weight [.., N, K] in ``layout``. ``dtype`` is needed if the layout has several types, such as i4 and
    u4.

    Raises ValueError for sparse32 if more than two of four values aren't zero.
    """
    if layout == "rows":
        return np.ascontiguousarray(weight)
    if layout == "sparse32":
        return pack_sparse(weight, dtype or "f32")
    if layout == "nibbles":
        return pack_nibbles(weight)
    if layout == "planes32":
        return pack_planes(weight, dtype or "i6")
    if layout in BLOCKS:
        return _pack_scales(weight, layout)
    if (levels := _levels(dtype)) is not None:
        weight = np.searchsorted(levels, weight).astype(np.int8)
    bias = BIAS.get("i8" if layout == "panel32x4" else dtype or "u4", 0) if weight.dtype == np.int8 else 0
    if layout in ("panel32x4", "panel32x8"):
        weight = weight.view(np.uint8) + np.uint8(bias)  # wraps around: -1 + 128 is 127
    *lead, rows, columns = weight.shape
    side = DEPTHS[layout]
    panels, groups = -(-rows // PANEL), -(-columns // side)
    if (rows, columns) == (panels * PANEL, groups * side):
        padded = np.ascontiguousarray(weight)
    else:
        padded = np.full((*lead, panels * PANEL, groups * side), bias, weight.dtype)
        padded[..., :rows, :columns] = weight
    if layout == "panel32x8":
        octets = padded.reshape(*lead, panels * PANEL, groups, 2, 4)
        padded = (octets[..., 0, :] | octets[..., 1, :] << 4).reshape(*lead, panels * PANEL, groups * 4)
    # Neighbours move as one word.
    words = padded if layout == "panel32" else padded.view(np.uint32)
    moved = words.reshape(*lead, panels, PANEL, groups).swapaxes(-1, -2)
    shape = stored_shape((*lead, rows, columns), layout, dtype or "f32")
    return np.ascontiguousarray(moved).view(weight.dtype).reshape(shape)


def unpack(stored: Array, shape: tuple[int, ...], layout: Layout, dtype: Dtype | None = None) -> Array:
    """Reverses ``pack``: returns the weight [.., N, K] of this ``shape``."""
    if layout == "rows":
        return stored
    if layout == "sparse32":
        return unpack_sparse(stored, shape, dtype or "f32")
    if layout == "nibbles":
        return unpack_nibbles(stored, shape, dtype or "i4")
    if layout == "planes32":
        return unpack_planes(stored, shape, dtype or "i6")
    if layout in BLOCKS:
        return _unpack_scales(stored, shape, layout)
    *lead, rows, columns = shape
    if layout == "panel32x8":
        stored = np.concatenate((stored & 0xF, stored >> 4), axis=-1)
    panels, groups, side = stored.shape[len(lead)], stored.shape[len(lead) + 1], DEPTHS[layout]
    values = stored.reshape(*lead, panels, groups, PANEL, side).swapaxes(-2, -3)
    weight = values.reshape(*lead, panels * PANEL, groups * side)[..., :rows, :columns]
    if (levels := _levels(dtype)) is not None:
        return np.append(levels, levels[-1:])[weight] if len(levels) < 16 else levels[weight]
    if layout in ("panel32x4", "panel32x8"):
        return (weight - np.uint8(BIAS.get("i8" if layout == "panel32x4" else dtype or "u4", 0))).view(np.int8)
    return weight


def _levels(dtype: Dtype | None) -> npt.NDArray[np.int8] | None:
    """Returns the list of integers whose indices a type stores; None if the type stores the values themselves."""
    of = FORMATS[FORMAT_OF[dtype]] if dtype is not None and dtype in FORMAT_OF else None
    return np.array(of.levels, np.int8) if of is not None and of.levels else None


def _planes(dtype: Dtype) -> tuple[int, int, int]:
    """Returns (low bits of a value, bits in the plane that follows, number of groups of 8 k in a piece) of a type."""
    bits = DTYPES[dtype].bits
    first = 4 if bits > 4 else 2
    return first, bits - first, 1 + bits % 2


def pack_planes(values: Array, dtype: Dtype) -> Array:
    """Packs int8 [.., N, K], with K a multiple of 16, into planes32."""
    *lead, rows, columns = values.shape
    first, more, octets = _planes(dtype)
    panels = -(-rows // PANEL)
    padded = np.zeros((*lead, panels * PANEL, columns), np.uint8)
    padded[..., :rows, :] = values.view(np.uint8) + np.uint8(BIAS[dtype])
    # [.., panels, column // 16, column % 16, pieces, octet, half, k % 4] -> a vector is 16 columns of 4 k.
    cut = padded.reshape(*lead, panels, 2, 16, -1, octets, 2, 4)
    vectors = np.moveaxis(cut, (-4, -3, -2, -6, -5, -1), (-6, -5, -4, -3, -2, -1))  # pieces, octet, half, c, column, k
    low, high = vectors & ((1 << first) - 1), vectors >> first
    if first == 4:
        front = low[..., 0, :, :, :] | low[..., 1, :, :, :] << 4  # [.., pieces, octets, c, 16, 4]
    else:
        quarters = (np.arange(4, dtype=np.uint8) * 2)[:, None]
        front = np.bitwise_or.reduce(low.reshape(*low.shape[:-4], 4, 64) << quarters, axis=-2)  # [.., octets, 64]
    flat = high.reshape(*high.shape[:-5], octets * 4, 64)  # by the vector's number
    places = (np.arange(octets * 4, dtype=np.uint8) * more)[:, None]
    plane = np.bitwise_or.reduce(flat << places, axis=-2)  # [.., pieces, 64]
    parts = (front.reshape(*plane.shape[:-1], -1), *([plane] if more else []))
    return np.concatenate(parts, -1).reshape(stored_shape(values.shape, "planes32", dtype))


def unpack_planes(stored: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
    """Returns the integers [N, K] of a tensor in the layout ``planes32``. Reverses ``pack_planes``."""
    *lead, rows, columns = shape
    first, more, octets = _planes(dtype)
    panels, size = -(-rows // PANEL), octets * 32 * first
    pieces = stored.reshape(*lead, panels, -1, size + (64 if more else 0))
    shape_of_vectors = (*pieces.shape[:-1], octets, 2, 2, 16, 4)  # .., pieces, octet, half, c, column, k
    if first == 4:
        halves = pieces[..., :size].reshape(*pieces.shape[:-1], octets, 1, 2, 16, 4)
        low = np.concatenate((halves & 0xF, halves >> 4), axis=-4)
    else:
        quarters = (np.arange(4, dtype=np.uint8) * 2)[:, None]
        low = pieces[..., :size].reshape(*pieces.shape[:-1], octets, 1, 64) >> quarters & 3
    places = (np.arange(octets * 4, dtype=np.uint8) * more)[:, None]
    high = pieces[..., None, -64:] >> places & ((1 << more) - 1)
    vectors: Array = low.reshape(shape_of_vectors) | high.reshape(shape_of_vectors) << first
    cut = np.moveaxis(vectors, (-6, -5, -4, -3, -2, -1), (-4, -3, -2, -6, -5, -1))
    weight: Array = cut.reshape(*lead, panels * PANEL, columns)[..., :rows, :]
    signed: Array = (weight - np.uint8(BIAS[dtype])).view(np.int8)
    return signed


def _pack_scales(scales: Array, layout: Layout) -> Array:
    """Packs int8 [.., N, blocks * depth] into uint8 [.., panels, blocks, depth * 32], layout blocks8 or blocks16."""
    *lead, rows, columns = scales.shape
    panels, depth = -(-rows // PANEL), DEPTHS[layout]
    padded = np.zeros((*lead, panels * PANEL, columns), np.uint8)
    padded[..., :rows, :] = scales.view(np.uint8)
    blocks = padded.reshape(*lead, panels, PANEL, -1, depth).swapaxes(-2, -3)  # [.., panels, blocks, 32, depth]
    halves = np.ascontiguousarray(blocks[..., :2]).reshape(*blocks.shape[:-2], 2 * PANEL)
    sub_scales = np.ascontiguousarray(blocks[..., 2:].swapaxes(-1, -2)).reshape(*blocks.shape[:-2], -1)
    return np.concatenate((halves, sub_scales), -1)


def _unpack_scales(stored: Array, shape: tuple[int, ...], layout: Layout) -> Array:
    """Reverses ``_pack_scales``."""
    *lead, rows, columns = shape
    panels, depth = -(-rows // PANEL), DEPTHS[layout]
    blocks = stored.reshape(*lead, panels, -1, depth * PANEL)
    halves = blocks[..., : 2 * PANEL].reshape(*blocks.shape[:-1], PANEL, 2)
    sub_scales = blocks[..., 2 * PANEL :].reshape(*blocks.shape[:-1], depth - 2, PANEL).swapaxes(-1, -2)
    rows_of = np.concatenate((halves, sub_scales), -1).swapaxes(-2, -3)  # [.., panels, 32, blocks, depth]
    return np.ascontiguousarray(rows_of.reshape(*lead, panels * PANEL, columns)[..., :rows, :]).view(np.int8)


def pack_nibbles(values: Array) -> Array:
    """Packs n int8 values from -8 to 15 into uint8 [ceil(n/2)]: the low 4 bits of each, the first in the low half."""
    flat = values.reshape(-1).view(np.uint8) & 0xF
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return flat[0::2] | flat[1::2] << 4


def unpack_nibbles(stored: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
    """Returns the integers of a tensor in the layout ``nibbles``; for i4, values 8 to 15 become -8 to -1. Reverses
    ``pack_nibbles``.
    """
    values = np.stack((stored & 0xF, stored >> 4), axis=-1).reshape(-1)[: math.prod(shape)].view(np.int8)
    return (np.where(values > 7, values - np.int8(16), values) if dtype == "i4" else values).reshape(shape)


def _blocks_shape(shape: tuple[int, ...], storage: Storage) -> tuple[int, ...]:
    """Returns the shape of a weight [.., N, K] as bytes in blocks: [.., N, blocks, bytes of a block]."""
    stored = FORMATS[storage]
    size = stored.group_sizes[0]
    bytes_of = 2 + size // 2 if stored.codebook is None else stored.codebook.block_bytes
    return (*shape[:-1], -(-shape[-1] // size), bytes_of)


def pack_blocks(values: Array, scales: Array, storage: Storage) -> Array:
    """Packs values int8 [.., N, K] and scales float16 [.., N, blocks] into uint8 [.., N, blocks, bytes of a block].

    For a format with a codebook, ``values`` are the bytes of the blocks without their scales.
    """
    if (codebook := FORMATS[storage].codebook) is not None:
        return codebook.join(values, scales)
    blocks = np.zeros(_blocks_shape(values.shape, storage), np.uint8)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    padded = np.zeros((*blocks.shape[:-1], 2 * (blocks.shape[-1] - 2)), np.uint8)
    padded.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]] = values
    blocks[..., 2:] = padded[..., 0::2] | padded[..., 1::2] << 4
    return blocks


def unpack_blocks(stored: Array, shape: tuple[int, ...], storage: Storage) -> npt.NDArray[np.float32]:
    """Returns the values of blocks as float32 of this ``shape``."""
    blocks = stored.reshape(_blocks_shape(shape, storage))
    if (codebook := FORMATS[storage].codebook) is not None:
        return codebook.expand(blocks).reshape(shape)
    numbers = np.asarray(FORMATS[storage].codes, np.float32)
    pairs = np.stack((numbers[np.arange(256) & 15], numbers[np.arange(256) >> 4]), axis=-1)  # by byte
    values = pairs[blocks[..., 2:]].reshape(*blocks.shape[:-1], -1)
    values *= np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    return np.ascontiguousarray(values.reshape(*shape[:-1], -1)[..., : shape[-1]])


_EXPANDED_ELEMENTS = 1 << 17
"""The number of elements that are expanded at a time, so that memory never holds a weight twice."""


def expand(stored: Array, entry: TensorEntry, into: npt.NDArray[np.uint8]) -> None:
    """Expands rows of a tensor from the format ``stored_as`` to the type and layout that kernels read.

    Args:
        stored: the blocks of these rows, as bytes. The first row is the first of a matrix or of a panel of 32 rows.
        entry: the tensor; its ``shape`` may be that of these rows alone.
        into: the result; it has as many bytes as the rows in their layout.
    """
    assert entry.stored_as is not None
    *lead, rows, columns = entry.shape if len(entry.shape) > 1 else (1, *entry.shape)
    blocks = stored.reshape(_blocks_shape((math.prod(lead), rows, columns), entry.stored_as))
    step = max(1, _EXPANDED_ELEMENTS // max(columns, 1) // PANEL) * PANEL
    at = 0
    for matrix in blocks:
        for start in range(0, rows, step):
            part = matrix[start : start + step]
            floats = unpack_blocks(part, (len(part), columns), entry.stored_as).astype(DTYPES[entry.dtype].numpy)
            packed = pack(floats, entry.layout, entry.dtype).reshape(-1).view(np.uint8)
            into[at : at + packed.size] = packed
            at += packed.size
