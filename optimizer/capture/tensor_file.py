"""Reads tensors from a safetensors file, each into memory of its own.

Format: https://github.com/huggingface/safetensors#format. The library returns views of a mapping of the file, whose
pages count as the process's memory and stay, so that the whole model would end up in memory. The memory of a tensor
that is read here is freed with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.shared.errors import SourceError


def tensor_places(path: Path) -> dict[str, int]:
    """Returns the file offset of each tensor's bytes. The library has checked the header. Raises OSError,
    ValueError.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + int(entry["data_offsets"][0]) for name, entry in header.items()}


def read_tensor(path: Path, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor whose bytes begin at offset ``place``. Raises SourceError naming the file if they can't be
    read.
    """
    value = torch.empty(shape, dtype=dtype)
    rest = value.view(-1).view(torch.uint8).numpy().data
    try:
        with open_regular(path) as file:
            file.seek(place)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
    except OSError as e:
        raise SourceError(f"{path} can't be read: {e}", hint="Check the file's permissions and the disk.") from e
    if rest:
        raise SourceError(f"{path}: it ends {len(rest):,} bytes too early", hint="It changed meanwhile; start again.")
    return value
