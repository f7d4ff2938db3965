"""Tensors that a pass has computed, stored in memory or in a file until weights are written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from enginewright.runtime.shared.errors import CapacityError


def keep(tensors: Sequence[torch.Tensor], file: Path | None) -> tuple[str, Callable[[], list[torch.Tensor]]]:
    """Stores tensors in ``file``, or in memory if it is None. The caller must not change them afterwards.

    Returns the SHA-256 of their bits, and a function that returns the tensors; it reads the file at each call. Raises
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
