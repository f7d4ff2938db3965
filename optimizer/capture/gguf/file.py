"""Opens a GGUF file, or a file in several parts: keys by name, and tensors whose blocks are mapped and not read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .blocks import Q2_0, SIZES, Bytes, GgufTensor, Type, floats
from .header import GgufArray, Header, Scalar, StoredTensor, Value, part_paths, read_header

_AGAIN = "Download or convert the file again."

_KINDS = {
    "adapter": "a LoRA adapter, not a whole model; adapters aren't supported yet",
    "imatrix": "an importance matrix, which llama.cpp quantizes with, not a model",
    "mmproj": "the image or sound encoder of a model (mmproj), not a language model",
    "vocab": "a vocabulary alone, without weights",
    "controlvector": "a control vector, not a model",
}
"""Value of general.type or general.architecture of a file that isn't a model -> its description."""
_KIND_OF_ARCHITECTURE = {"clip": "mmproj", "imatrix": "imatrix", "controlvector": "controlvector"}
_HINTS = {
    "adapter": "Merge it into its base model, and pass the merged model.",
    "mmproj": "Pass the model's own file, which lies next to this one; images and sounds aren't supported.",
}


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: the file, the first of a split one.
        tensors: the tensors of all parts, by name.
        metadata: the values of keys; arrays are decoded when they are read.
        parts: all files of the model.
    """

    path: Path
    tensors: dict[str, GgufTensor]
    metadata: dict[str, Value]
    parts: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def array(self, key: str) -> list[Scalar] | None:
        """Decodes the array of a key; None if the key is missing. Raises SourceError if it isn't an array."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, GgufArray):
            raise SourceError(f"{self.path}: key {key} is {value!r:.80}, and no array", hint=_AGAIN)
        return value.read()


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file; given the first part of a split file, all parts.

    Raises:
        SourceError: it is damaged, a part is missing, or a tensor has blocks of a type that can't be read.
        UnsupportedModelError: it isn't a language model but an adapter, an image encoder or an importance matrix.
    """
    header = read_header(path)
    metadata = header.keys
    _check_kind(path, header)
    if not isinstance(metadata.get("general.architecture"), str):
        raise SourceError(f"{path}: general.architecture is missing or no text", hint=_AGAIN)
    parts = part_paths(path, header)
    tensors: dict[str, GgufTensor] = {}
    for index, part in enumerate(parts):
        of_part = header if index == 0 else _header_of_part(part, index, len(parts))
        data = np.memmap(part, mode="r", dtype=np.uint8)
        starts = sorted({stored.offset for stored in of_part.tensors})
        ends = dict(zip(starts, [*(of_part.data_start + n for n in starts[1:]), of_part.size], strict=False))
        for stored in of_part.tensors:
            if stored.name in tensors:
                raise SourceError(
                    f"{part}: tensor {stored.name} is in {Path(tensors[stored.name].origin).name} too", hint=_AGAIN
                )
            tensors[stored.name] = _map(part, of_part, stored, data, ends[stored.offset])
    stated = metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and stated != len(tensors):
        raise SourceError(
            f"{path}: split.tensors.count is {stated}, and the {len(parts)} parts have {len(tensors)} tensors",
            hint=_AGAIN,
        )
    if not tensors:
        raise _not_a_model(path, "vocab")
    return GgufFile(path, tensors, metadata, parts)


def _header_of_part(part: Path, index: int, count: int) -> Header:
    header = read_header(part)
    for key, expected in (("split.no", index), ("split.count", count)):
        if header.keys.get(key) != expected:
            raise SourceError(
                f"{part}: key {key} is {header.keys.get(key)!r:.80}, and should be {expected}", hint=_AGAIN
            )
    return header


def _check_kind(path: Path, header: Header) -> None:
    """Raises UnsupportedModelError if the keys of a file say that it isn't a model."""
    stated, architecture = header.keys.get("general.type"), header.keys.get("general.architecture")
    names = {tensor.name for tensor in header.tensors}
    kind = stated if isinstance(stated, str) and stated in _KINDS else None
    if kind is None and isinstance(architecture, str):
        kind = _KIND_OF_ARCHITECTURE.get(architecture)
    if kind is None and any(name.endswith((".lora_a", ".lora_b")) for name in names):
        kind = "adapter"
    if kind is None and "imatrix.chunk_count" in header.keys:
        kind = "imatrix"
    if kind is None and names and all(name.startswith("direction.") for name in names):
        kind = "controlvector"
    if kind is not None:
        raise _not_a_model(path, kind)


def _not_a_model(path: Path, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} is {_KINDS[kind]}", hint=_HINTS.get(kind, "Pass the GGUF file of a language model.")
    )


def _map(path: Path, header: Header, stored: StoredTensor, data: Bytes, end: int) -> GgufTensor:
    """Maps the blocks of a tensor, which end before byte ``end``.

    Raises SourceError if the blocks can't be dequantized, or the file has no room for them.
    """
    where = f"{path}: tensor {stored.name}"
    kind = _readable_type(stored.kind)
    if kind is None:
        name = next((t.name for t in Type if t.value == stored.kind), str(stored.kind))
        raise SourceError(
            f"{where} has blocks of type {name}, which can't be dequantized",
            hint="Export from a file in F32, F16, BF16, Q8_0, Q4_1 or Q4_0.",
        )
    values, size = SIZES[kind]
    innermost = stored.dimensions[0] if stored.dimensions else 1
    if innermost % values:
        raise SourceError(f"{where} has rows of {innermost}, which isn't a multiple of {values}", hint=_AGAIN)
    length = math.prod(stored.dimensions) // values * size
    start = header.data_start + stored.offset
    if kind == Q2_0 and start + length > end:
        raise SourceError(
            f"{where} has {max(0, end - start):,} bytes at most, blocks of Q2_0 would be {length:,}: it is cut off, or "
            "has the blocks of 128 of an older layout, which can't be read",
            hint=_AGAIN,
        )
    if start + length > header.size:
        raise SourceError(
            f"{path}: damaged or truncated GGUF file: it has {header.size:,} bytes, and should have "
            f"{start + length:,} or more (tensor {stored.name})",
            hint=_AGAIN,
        )
    if start + length > end:
        raise SourceError(
            f"{where} overlaps the next: it has {length:,} bytes, and {end - start:,} of room", hint=_AGAIN
        )
    return GgufTensor(stored.name, kind, stored.dimensions, data[start : start + length], start, str(path))


@cache
def _readable_type(number: int) -> Type | None:
    """Returns the type of blocks with ggml's number; None if such blocks can't be dequantized.

    Each type is tried once, on a block of zeros.
    """
    try:
        kind = Q2_0 if number == Q2_0 else Type(number)
        floats(np.zeros((1, SIZES[kind][1]), dtype=np.uint8), kind)
    except (NotImplementedError, ValueError, KeyError):
        return None
    return kind
