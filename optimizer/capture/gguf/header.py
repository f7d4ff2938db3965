"""Reads the header of a GGUF file: keys with their values, and name, shape, type and offset of each tensor.

It imports neither torch, numpy nor the package `gguf`, whose import takes longer than reading a header: 0.2 s for a
vocabulary of 262,144 tokens. Arrays are located and counted, and read on use. Every count, length and offset is
compared with the file's size before anything is allocated, so memory is bounded by the file's size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, number of tensors and of keys; the
keys with their values; for each tensor its name, dimensions, block type and offset.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.shared.errors import SourceError

KEPT_BLOCKS = {
    **{2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 21: "IQ3_S", 22: "IQ2_S"},
    **{20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"},
}
"""ggml's numbers of the types of blocks that a bundle can keep, which are the keys of ``FORMATS`` in blocks.py."""

READER_VERSION = 2
"""The version of this reader. It rises when the same file is read as another model.

Version 1 was transformers' reader, and bundles don't name it.
"""

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The struct format of each number type, by GGUF's number of the type."""
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8

Scalar = int | float | bool | str


class GgufArray:
    """An array in a header: ``count`` items, decoded by ``read``."""

    def __init__(self, header: _Cursor, key: str, kind: int, count: int, start: int) -> None:
        self._header, self._key, self._kind, self._start = header, key, kind, start
        self.count = count

    def __len__(self) -> int:
        return self.count

    @property
    def of_strings(self) -> bool:
        """Returns True if the items are strings."""
        return self._kind == _STRING

    def read(self) -> list[Scalar]:
        """Decodes the items. Raises SourceError naming the key for a string that isn't UTF-8."""
        return self._header.items(self._key, self._kind, self.count, self._start)

    def read_bytes(self) -> Iterator[bytes]:
        """Iterates over the undecoded items of an array of strings."""
        return self._header.strings(self.count, self._start)


Value = Scalar | GgufArray


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's entry in the header: ``dimensions`` from the innermost, ``kind`` is ggml's number of the block type.

    ``offset`` is counted from the start of the tensor data.
    """

    name: str
    dimensions: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """The header of one file.

    ``data_start`` is the byte at which the first tensor begins, ``size`` the number of bytes of the file.
    """

    keys: dict[str, Value]
    tensors: tuple[StoredTensor, ...]
    data_start: int
    alignment: int
    size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads a header. Raises SourceError naming the file, and the damaged key or tensor."""
    try:
        with open_regular(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:  # mmap raises ValueError for an empty file
        raise SourceError(f"{path}: damaged or truncated GGUF file: {e}", hint="Download the file again.") from e
    if data[: len(MAGIC)] != MAGIC:
        begin = data[: len(MAGIC)]
        raise SourceError(f"{path} isn't a GGUF file: it begins with {begin!r}", hint="Pass a GGUF file.")
    return _Cursor(Path(path), data).header()


def part_paths(path: Path, header: Header) -> tuple[Path, ...]:
    """Returns all files of the model whose first file is ``path``.

    Parts have the names of llama.cpp's ``llama-gguf-split``: NAME-00001-of-00003.gguf. Raises SourceError if ``path``
    isn't the first part, or a part is missing.
    """
    count, number = header.keys.get("split.count", 0), header.keys.get("split.no", 0)
    for key, value in (("split.count", count), ("split.no", number)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 100_000:
            raise SourceError(
                f"{path}: key {key} is {value!r:.80}, and not a number of parts",
                hint="Download or convert the file again.",
            )
    assert isinstance(count, int) and isinstance(number, int)
    if count <= 1:
        return (path,)
    match = _PART.search(path.name)
    first = path.name if match is None else f"{path.name[: match.start()]}-{1:05d}-of-{match[2]}.gguf"
    if number:
        raise SourceError(
            f"{path} is part {number + 1} of a model in {count} files", hint=f"Pass the first of them: {first}."
        )
    if match is None or int(match[1]) != 1 or int(match[2]) != count:
        raise SourceError(
            f"{path}: split.count is {count}, and the file isn't named NAME-00001-of-{count:05d}.gguf",
            hint="Give the parts their names again: the others are found by them.",
        )
    stem = path.name[: match.start()]
    parts = tuple(path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    for part in parts[1:]:
        if not part.is_file():
            raise SourceError(
                f"{path} is the first of {count} files, and {part.name} isn't next to it",
                hint="Download all parts into one folder.",
            )
    return (path, *parts[1:])


def all_parts(path: Path) -> tuple[Path, ...]:
    """Returns the parts of a split file; only the file itself if it isn't split or can't be read."""
    try:
        return part_paths(path, read_header(path))
    except SourceError:
        return (path,)


def has_kept_blocks(path: str | os.PathLike[str]) -> bool:
    """Returns True if a matrix of the file is stored in one of KEPT_BLOCKS.

    False also for a damaged file or one of another format; opening it later raises the error.
    """
    try:
        first = read_header(path)
        headers = [first, *(read_header(part) for part in part_paths(Path(path), first)[1:])]
    except SourceError:
        return False
    tensors = (tensor for header in headers for tensor in header.tensors)
    return any(len(tensor.dimensions) > 1 and tensor.kind in KEPT_BLOCKS for tensor in tensors)


class _Cursor:
    """A position in a header, which moves on as values are read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, len(MAGIC)
        self._reading = "the header"

    def header(self) -> Header:
        version = self._number("I")
        if version & 0xFFFF == 0 and version:
            self._fail(
                "it is big-endian, which isn't read",
                hint="Convert it with gguf-py's gguf_convert_endian.py, or download the little-endian file.",
            )
        if version not in _VERSIONS:
            self._fail(f"version {version} of the format isn't read", hint="Convert the model again with llama.cpp.")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        self._check_room(key_count * _SMALLEST_KEY + tensor_count * _SMALLEST_TENSOR)
        keys: dict[str, Value] = {}
        for index in range(key_count):
            self._reading = f"key {index + 1} of {key_count}"
            name = self._string()
            self._reading = f"key {name}"
            if name in keys:
                self._fail("it is there twice")
            keys[name] = self._value(name)
        alignment = self._alignment(keys)
        tensors: dict[str, StoredTensor] = {}
        for index in range(tensor_count):
            self._reading = f"tensor {index + 1} of {tensor_count}"
            name = self._string()
            self._reading = f"tensor {name}"
            if name in tensors:
                self._fail("it is there twice")
            tensors[name] = self._tensor(name, alignment)
        start = -(-self._at // alignment) * alignment
        return Header(keys, tuple(tensors.values()), start, alignment, len(self._data))

    def items(self, key: str, kind: int, count: int, start: int) -> list[Scalar]:
        self._reading = f"key {key}"
        if kind == _STRING:
            return [self._decode(item) for item in self.strings(count, start)]
        return list(struct.unpack_from(f"<{count}{_NUMBERS[kind]}", self._data, start))

    def strings(self, count: int, start: int) -> Iterator[bytes]:
        data, at, unpack = self._data, start, struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = unpack(data, at)
            yield data[at + 8 : at + 8 + length]
            at += 8 + length

    def _alignment(self, keys: dict[str, Value]) -> int:
        alignment = keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        self._reading = "key general.alignment"
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0 or alignment.bit_count() > 1:
            self._fail(f"it is {alignment!r:.80}, which isn't a power of two")
        return alignment

    def _value(self, name: str) -> Value:
        kind = self._number("I")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(kind)
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            self._fail("it is an array of arrays, which no key of a model is")
        start = self._at
        if kind == _STRING:
            self._skip_strings(count)
        else:
            size = struct.calcsize(self._format(kind)) * count
            self._check_room(size)
            self._at += size
        return GgufArray(self, name, kind, count, start)

    def _tensor(self, name: str, alignment: int) -> StoredTensor:
        rank = self._number("I")
        if rank > _MOST_DIMENSIONS:
            self._fail(f"it has {rank} dimensions, and {_MOST_DIMENSIONS} is the most")
        dimensions = tuple(self._number("Q") for _ in range(rank))
        kind, offset = self._number("I"), self._number("Q")
        if 0 in dimensions:
            self._fail(f"its shape is {dimensions}: a dimension is 0")
        if offset % alignment:
            self._fail(f"its offset is {offset}, which isn't a multiple of the alignment, {alignment}")
        return StoredTensor(name, dimensions, kind, offset)

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            self._fail(f"it has values of type {kind}, which GGUF doesn't have")
        return f"<{_NUMBERS[kind]}"

    def _scalar(self, kind: int) -> Scalar:
        layout = self._format(kind)
        self._check_room(struct.calcsize(layout))
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value  # type: ignore[no-any-return]

    def _number(self, layout: str) -> int:
        size = struct.calcsize(f"<{layout}")
        self._check_room(size)
        (value,) = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += size
        return int(value)

    def _string(self) -> str:
        length = self._number("Q")
        self._check_room(length)
        self._at += length
        return self._decode(self._data[self._at - length : self._at])

    def _skip_strings(self, count: int) -> None:
        self._check_room(8 * count)
        data, at, unpack, end = self._data, self._at, struct.Struct("<Q").unpack_from, len(self._data)
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + unpack(data, at)[0]
        self._check_room(at - self._at)
        self._at = at

    def _check_room(self, size: int) -> None:
        """Raises SourceError if the file ends before ``size`` more bytes."""
        if self._at + size > len(self._data):
            self._fail(f"it has {len(self._data):,} bytes, and should have {self._at + size:,} or more", file=True)

    def _decode(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError as e:
            self._fail(f"{text[:40]!r} isn't UTF-8", cause=e)

    def _fail(
        self,
        reason: str,
        *,
        hint: str = "Download or convert the file again.",
        file: bool = False,
        cause: Exception | None = None,
    ) -> NoReturn:
        """Raises SourceError. ``file`` True means that ``reason`` describes the file rather than the item being
        read.
        """
        if self._reading == "the header":
            reason = f"damaged or truncated GGUF file: {reason}" if file else f"GGUF file: {reason}"
        else:
            reason = (
                f"damaged or truncated GGUF file: {reason} ({self._reading})"
                if file
                else f"damaged GGUF file: {self._reading}: {reason}"
            )
        raise SourceError(f"{self._path}: {reason}", hint=hint) from cause
