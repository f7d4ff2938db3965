"""Arrays in the layout that libraries accept without a copy: dense, aligned to 64 bytes, passed through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""The alignment with which XLA's CPU client, IREE and TVM's kernels use arrays without a copy."""


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Returns an array of zeros aligned to 64 bytes. Its memory is used only once it is written. Raises MemoryError."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def in_place(array: Array) -> Array:
    """Returns the array itself if it is aligned and dense, otherwise an aligned, dense copy."""
    if array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous:
        return array
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def capsule_of(array: Array) -> Any:
    """Returns an array's memory as a DLPack capsule, which keeps the array alive. Read-only arrays are passed as
    writable.
    """
    return (array if array.flags.writeable else np.asarray(_Writable(array))).__dlpack__()


class _Writable:
    """A view of an array's memory, through NumPy's array interface, that is marked as writable."""

    def __init__(self, array: Array) -> None:
        self._array = array  # what NumPy makes of this holds this, and so the memory
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
