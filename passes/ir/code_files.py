"""The codes of an export's weights in files, so that each weight is rounded once in each format."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from ..formats.rounding import RoundedRows
from .prequantized import CodeFormat
from .weights import WeightExpr

Bytes = npt.NDArray[np.uint8]

_PIECE = 1 << 22
"""The number of values that are packed or unpacked at a time: an even number."""


@dataclass(frozen=True)
class _File:
    """A rounded weight in a file: its values, scales and offsets, one after the other.

    Attributes:
        path: the file.
        tensors: the shape and the type of each tensor.
        saturated, vanished: see ``RoundedRows``.
    """

    path: Path
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    saturated: int
    vanished: int


class CodeFiles:
    """Files with the rounded rows of weights in ``folder``. Integers of at most 4 bits take half a byte.

    The files never take more than the disk has left. A weight that has no file is rounded again when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[WeightExpr, CodeFormat], _File] = {}
        self._numbers = count()
        self._bytes = 0

    def get(self, expr: WeightExpr, code_format: CodeFormat) -> RoundedRows | None:
        """Returns the rows of a weight [.., N, K], rounded to a format; None if they aren't in a file."""
        stored = self._files.get((expr, code_format))
        if stored is None:
            return None
        try:
            with open(stored.path, "rb") as file:
                tensors = [
                    _read(file, shape, dtype, code_format if number == 0 else None)
                    for number, (shape, dtype) in enumerate(stored.tensors)
                ]
        except OSError:
            return None
        values, scales, *offsets = tensors
        return RoundedRows(values, scales, offsets[0] if offsets else None, stored.saturated, stored.vanished)

    def add(self, expr: WeightExpr, code_format: CodeFormat, rounded: RoundedRows) -> None:
        """Writes the rows of a weight to a file, if the disk has room."""
        tensors = [t for t in (rounded.values, rounded.scales, rounded.offsets) if t is not None]
        size = sum(t.numel() * t.element_size() for t in tensors)
        path = self._folder / f"{next(self._numbers)}.rounded"
        try:
            if self._bytes + 2 * size > shutil.disk_usage(self._folder).free:
                return
            with open(path, "wb") as file:
                for number, tensor in enumerate(tensors):
                    _write(file, tensor, code_format if number == 0 else None)
            self._bytes += path.stat().st_size
        except OSError:
            path.unlink(missing_ok=True)
            return
        kinds = tuple((t.shape, t.dtype) for t in tensors)
        self._files[expr, code_format] = _File(path, kinds, rounded.saturated, rounded.vanished)

    def clear(self) -> None:
        """Deletes all files."""
        for stored in self._files.values():
            stored.path.unlink(missing_ok=True)
        self._files.clear()
        self._bytes = 0


def _is_packed(code_format: CodeFormat | None) -> bool:
    return code_format is not None and code_format.kind == "int" and code_format.bits <= 4


def _write(file: BinaryIO, tensor: torch.Tensor, code_format: CodeFormat | None) -> None:
    """Writes the bytes of a tensor. ``code_format`` is the format of values; None for scales and offsets."""
    octets: Bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    if not _is_packed(code_format):
        file.write(octets.data)
        return
    for start in range(0, len(octets), _PIECE):
        file.write(_packed(octets[start : start + _PIECE]).data)


def _read(file: BinaryIO, shape: torch.Size, dtype: torch.dtype, code_format: CodeFormat | None) -> torch.Tensor:
    """Reads a tensor that ``_write`` has written."""
    size = shape.numel() * dtype.itemsize
    if not _is_packed(code_format):
        return torch.from_numpy(np.fromfile(file, np.uint8, size)).view(dtype).view(shape)
    assert code_format is not None
    octets = np.empty(size, np.uint8)
    for start in range(0, size, _PIECE):
        piece = octets[start : start + _PIECE]
        piece[:] = _unpacked(np.fromfile(file, np.uint8, -(-len(piece) // 2)))[: len(piece)]
    values = octets.view(np.int8)
    if not code_format.offsets:  # the sign is the highest of 4 bits
        values ^= 8
        values -= 8
    return torch.from_numpy(values).view(shape)


def _packed(octets: Bytes) -> Bytes:
    """Returns the lowest 4 bits of bytes, two in a byte, the first in the low half."""
    pairs: npt.NDArray[Any] = np.pad(octets, (0, len(octets) % 2)).view("<u2")
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).astype(np.uint8)


def _unpacked(packed: Bytes) -> Bytes:
    """Returns the two numbers of 4 bits in each byte as bytes."""
    pairs = packed.astype("<u2")
    octets: Bytes = ((pairs & 0x0F) | ((pairs & 0xF0) << 4)).view(np.uint8)
    return octets
