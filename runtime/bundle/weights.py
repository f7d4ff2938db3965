"""weights/index.json and the blobs it describes.

A blob is a plain file of tensors, each at a multiple of 64 bytes, so that a mapped blob can be used by vector loads as
it is (safetensors forbids the holes that alignment needs). Holes are zero. Layouts of a tensor in its blob:

    rows      any shape, row-major
    panel32    [N, K] as [ceil(N/32)][K][32]: element (n, k) at ((n//32)*K + k)*32 + n%32
    panel32x2  [N, K] as [ceil(N/32)][ceil(K/2)][32][2], of bf16
    panel32x4  [N, K] as [ceil(N/32)][ceil(K/4)][32][4], of i8, each value + 128 in a byte without sign

In the last three rows past N, and places past K, are zero. A weight [E, N, K] has E of them, one after the other.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from enginewright.plugins.contracts import BYTES_PER_ELEMENT
from enginewright.plugins.errors import BundleError
from enginewright.plugins.json_document import parse_json

from .manifest import BundlePath, check_format_version, parse

FORMAT_VERSION = 1
INDEX_PATH = "weights/index.json"
ALIGNMENT = 64
PANEL = 32

Layout = Literal["rows", "panel32", "panel32x2", "panel32x4"]
WeightDtype = Literal["f32", "bf16", "f16", "i32", "i8"]

NEIGHBOURS: dict[Layout, int] = {"panel32": 1, "panel32x2": 2, "panel32x4": 4}
"""How many values along K lie side by side."""

_DTYPES_OF: dict[Layout, tuple[WeightDtype, ...]] = {
    "panel32": ("f32", "f16", "bf16"),
    "panel32x2": ("bf16",),
    "panel32x4": ("i8",),
}
_BIAS = 128  # of values in panel32x4

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRows(_Entry):
    """Rows a <= r < b of a source tensor; the parts of a tensor are stacked in their order.

    ``axis`` is the source's axis that they lie along: 1 where the source holds the weight transposed.
    """

    source: str
    rows: tuple[int, int]
    axis: int = Field(default=0, ge=0)


class Blob(_Entry):
    """A file of tensors."""

    file: BundlePath
    bytes: int = Field(ge=0)


class TensorEntry(_Entry):
    """Where a tensor lies. ``shape`` is the logical one; ``bytes`` counts what the layout stores."""

    blob: int = Field(ge=0)
    offset: int = Field(ge=0, multiple_of=ALIGNMENT)
    bytes: int = Field(ge=0)
    dtype: WeightDtype
    shape: tuple[int, ...]
    layout: Layout = "rows"
    parts: tuple[SourceRows, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return stored_shape(self.shape, self.layout)

    @property
    def stored_dtype(self) -> np.dtype[np.generic]:
        return stored_dtype(self.dtype, self.layout)


class WeightsIndex(_Entry):
    """The whole index."""

    format_version: int = FORMAT_VERSION
    blobs: tuple[Blob, ...] = ()
    tensors: dict[str, TensorEntry] = Field(default_factory=dict)

    def to_json(self) -> str:
        """Stable text: the same index gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = INDEX_PATH) -> WeightsIndex:
        """Raises BundleError naming the field or the tensor that is wrong; every tensor lies within its blob."""
        try:
            data = parse_json(text)
        except ValueError as e:
            raise BundleError(f"{source}: not JSON: {e}", hint="Export the bundle again.") from e
        check_format_version(data, FORMAT_VERSION, source)
        index = parse(cls, data, source)
        for name, tensor in index.tensors.items():
            if problem := index._problem(tensor):
                raise BundleError(f"{source}: tensors.{name}: {problem}", hint="Export the bundle again.")
        return index

    def _problem(self, tensor: TensorEntry) -> str | None:
        if tensor.layout != "rows" and len(tensor.shape) not in (2, 3):
            return f"layout {tensor.layout} needs two dimensions or three, shape is {list(tensor.shape)}"
        if tensor.layout != "rows" and tensor.dtype not in _DTYPES_OF[tensor.layout]:
            return f"layout {tensor.layout} is not for {tensor.dtype}"
        if any(n < 0 for n in tensor.shape):
            return f"shape is {list(tensor.shape)}"
        if tensor.bytes != (expected := stored_bytes(tensor.shape, tensor.layout, tensor.dtype)):
            return f"bytes is {tensor.bytes}, but {tensor.dtype} {list(tensor.shape)} in {tensor.layout} has {expected}"
        if tensor.blob >= len(self.blobs):
            return f"blob is {tensor.blob}, but there are {len(self.blobs)}"
        blob = self.blobs[tensor.blob]
        if tensor.offset + tensor.bytes > blob.bytes:
            return f"ends at byte {tensor.offset + tensor.bytes} of {blob.file}, which has {blob.bytes}"
        return None


def stored_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Shape of the array as stored: [.., N, K] in panel32x4 is [.., ceil(N/32), ceil(K/4), 32, 4]."""
    if layout == "rows":
        return shape
    *lead, rows, columns = shape
    side = NEIGHBOURS[layout]
    panels = (*lead, -(-rows // PANEL), -(-columns // side), PANEL)
    return panels if layout == "panel32" else (*panels, side)


def stored_dtype(dtype: WeightDtype, layout: Layout) -> np.dtype[np.generic]:
    """The type of the elements as stored: bytes without sign in panel32x4, else ``dtype``'s own."""
    return np.dtype(np.uint8) if layout == "panel32x4" else NUMPY_DTYPES[dtype]


def stored_bytes(shape: tuple[int, ...], layout: Layout, dtype: WeightDtype) -> int:
    """Bytes that a tensor takes in its blob, without the alignment before it."""
    return math.prod(stored_shape(shape, layout)) * BYTES_PER_ELEMENT[dtype]


Array = npt.NDArray[Any]


def pack(weight: Array, layout: Layout) -> Array:
    """A weight [.., N, K] as ``layout`` stores it."""
    if layout == "rows":
        return np.ascontiguousarray(weight)
    if layout == "panel32x4":
        weight = weight.view(np.uint8) ^ _BIAS  # a signed byte + 128 is the same byte with its first bit flipped
    *lead, rows, columns = weight.shape
    side = NEIGHBOURS[layout]
    panels, groups = -(-rows // PANEL), -(-columns // side)
    if (rows, columns) == (panels * PANEL, groups * side):
        padded = np.ascontiguousarray(weight)
    else:
        padded = np.full((*lead, panels * PANEL, groups * side), _BIAS if layout == "panel32x4" else 0, weight.dtype)
        padded[..., :rows, :columns] = weight
    # Neighbours move as one word.
    words = padded if layout == "panel32" else padded.view(np.uint32)
    moved = words.reshape(*lead, panels, PANEL, groups).swapaxes(-1, -2)
    return np.ascontiguousarray(moved).view(weight.dtype).reshape(stored_shape((*lead, rows, columns), layout))


def unpack(stored: Array, shape: tuple[int, ...], layout: Layout) -> Array:
    """The reverse of ``pack``: the weight [.., N, K] of this ``shape``."""
    if layout == "rows":
        return stored
    *lead, rows, columns = shape
    panels, groups, side = stored.shape[len(lead)], stored.shape[len(lead) + 1], NEIGHBOURS[layout]
    values = stored.reshape(*lead, panels, groups, PANEL, side).swapaxes(-2, -3)
    weight = values.reshape(*lead, panels * PANEL, groups * side)[..., :rows, :columns]
    return (weight ^ _BIAS).view(np.int8) if layout == "panel32x4" else weight
