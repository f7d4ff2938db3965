"""Arrays whose memory libraries take as it lies."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from enginewright.plugins.steps.host_arrays import ALIGNMENT, Array, aligned, capsule_of, in_place


class Shared:
    """A capsule as ``np.from_dlpack`` takes it."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Owner(np.ndarray):  # type: ignore[type-arg]
    """An array that can be watched."""


@pytest.mark.matrix
@pytest.mark.parametrize("writeable", [True, False])
def test_a_capsule_holds_the_memory_that_it_is_of(writeable: bool) -> None:
    array: Array = np.arange(24, dtype=np.float32).reshape(4, 6).view(Owner)
    array.flags.writeable = writeable
    watched, address = weakref.ref(array), array.ctypes.data
    viewed = np.from_dlpack(Shared(capsule_of(array)))  # type: ignore[arg-type]
    del array
    gc.collect()
    assert viewed.ctypes.data == address and viewed.shape == (4, 6)
    assert watched() is not None
    del viewed
    gc.collect()
    assert watched() is None


def test_what_is_aligned_stays_where_it_is() -> None:
    array = aligned((3, 5), np.float32)
    assert array.ctypes.data % ALIGNMENT == 0 and not array.any()
    assert in_place(array) is array
    moved = in_place(array[1:])
    assert moved.ctypes.data % ALIGNMENT == 0 and moved.shape == (2, 5)
