"""Tensors that a pass has computed, kept until weights are written: in memory or in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from enginewright.runtime.shared.errors import CapacityError


def keep(tensors: Sequence[torch.Tensor], file: Path | None) -> tuple[str, Callable[[], list[torch.Tensor]]]:
    """Keeps tensors, which must not change, in ``file``, or without one in memory.

    Returns the SHA-256 of their bits, and what gives them, reading the file each time that it is called. Raises
    CapacityError naming the file if it can't be written.
    """
    contiguous = [tensor.contiguous() for tensor in tensors]
    digest = hashlib.sha256()
    for tensor in contiguous:
        digest.update(tensor.numpy().data)
    if file is None:
        return digest.hexdigest(), lambda: contiguous
    try:
        torch.save(contiguous, file)
    except (OSError, RuntimeError) as e:  # torch's own writer raises the latter
        raise CapacityError(f"{file} can't be written: {e}", hint="Free space on that disk.") from e

    def read() -> list[torch.Tensor]:
        loaded: list[torch.Tensor] = torch.load(file, weights_only=True)
        return loaded

    return digest.hexdigest(), read
