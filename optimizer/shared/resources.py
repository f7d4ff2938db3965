"""Measures and limits the memory of the process, and returns unused memory to the system."""

from __future__ import annotations

import gc
import mmap
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

from enginewright.runtime.shared.threads import available_threads

_YOUNG_OBJECTS = 10_000

THREADS = min(4, available_threads())
"""The number of threads for work that can be divided.

It is the number of cores that the process may run on, up to the number that keeps the memory busy.
"""


def peak_rss_bytes() -> int:
    """Returns the process's largest resident size so far, from the system."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes(status: Path = Path("/proc/self/statm")) -> int:
    """Returns the process's resident bytes, mapped files included; if the system doesn't report them, the peak."""
    try:
        return int(status.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return peak_rss_bytes()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Has Python's garbage collector skip, within the block, the objects that exist at its beginning.

    Objects that were frozen before stay frozen.
    """
    frozen = gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Has Python's garbage collector run less often within the block, and skip the objects that exist at its beginning.

    Torch and transformers have a million objects, and graphs many more: collecting them again and again takes an eighth
    of an export. Nothing changes in a process whose collector runs as seldom already.
    """
    before = gc.get_threshold()
    if before[0] >= _YOUNG_OBJECTS:  # as in the tests, where counting a million frozen objects takes long
        yield
        return
    gc.set_threshold(_YOUNG_OBJECTS if before[0] else 0, *before[1:])
    try:
        with frozen_objects():
            yield
    finally:
        gc.set_threshold(*before)


def release_pages(array: npt.NDArray[Any]) -> None:
    """Frees the resident pages of the mapped file that ``array`` is a part of.

    They are read again when they are needed.
    """
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = next((b for name in ("_mmap", "base", "obj") if (b := getattr(base, name, None)) is not None), None)
    if base is not None and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)
