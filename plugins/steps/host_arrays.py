"""Arrays in the layout that libraries accept: dense, at multiples of 64 bytes, passed through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""The alignment of arrays that XLA's CPU client, IREE and TVM's kernels use without a copy."""


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Returns zeros aligned to 64 bytes, which use memory only once written. Raises MemoryError."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def in_place(array: Array) -> Array:
    """Returns the array itself if it is aligned and dense, otherwise a copy that is."""
    if array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous:
        return array
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def capsule_of(array: Array) -> Any:
    """Returns an array's memory as a DLPack capsule, which holds the array. Read-only arrays are passed as writable."""
    return (array if array.flags.writeable else np.asarray(_Writable(array))).__dlpack__()


class _Writable:
    """An array's memory in NumPy's array interface, marked as writable."""

    def __init__(self, array: Array) -> None:
        self._array = array  # what NumPy makes of this holds this, and so the memory
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
