"""weights/index.json and the blobs it describes.

A blob is a plain file of tensors, each at a multiple of 64 bytes, so that a mapped blob can be used by vector loads as
it is (safetensors forbids the holes that alignment needs). Holes are zero. Layouts of a tensor in its blob:

    rows      any shape, row-major
    panel32   [N, K] as [ceil(N/32)][K][32]: element (n, k) at ((n//32)*K + k)*32 + n%32; rows past N are zero
"""

from __future__ import annotations

import json
import math
from typing import Literal, TypeVar

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

Layout = Literal["rows", "panel32"]
WeightDtype = Literal["f32", "bf16", "i32"]

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i32": np.dtype(np.int32),
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
        if tensor.layout == "panel32" and len(tensor.shape) != 2:
            return f"layout panel32 needs two dimensions, shape is {list(tensor.shape)}"
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
    """Shape of the array as stored: [N, K] in panel32 is [ceil(N/32), K, 32]."""
    if layout == "rows":
        return shape
    rows, columns = shape
    return (-(-rows // PANEL), columns, PANEL)


def stored_bytes(shape: tuple[int, ...], layout: Layout, dtype: WeightDtype) -> int:
    """Bytes that a tensor takes in its blob, without the alignment before it."""
    return math.prod(stored_shape(shape, layout)) * BYTES_PER_ELEMENT[dtype]


T = TypeVar("T", bound=np.generic)


def pack_panel32(weight: npt.NDArray[T]) -> npt.NDArray[T]:
    """[N, K] -> [ceil(N/32), K, 32], rows past N zero."""
    rows, columns = weight.shape
    panels = -(-rows // PANEL)
    padded = np.zeros((panels * PANEL, columns), weight.dtype)
    padded[:rows] = weight
    return np.ascontiguousarray(padded.reshape(panels, PANEL, columns).transpose(0, 2, 1))


def unpack_panel32(panels: npt.NDArray[T], rows: int) -> npt.NDArray[T]:
    """The reverse of ``pack_panel32``: [ceil(N/32), K, 32] -> [N, K] with N = ``rows``."""
    return panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])[:rows]
