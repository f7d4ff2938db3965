from __future__ import annotations

import gc
import mmap
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginewright.optimizer.shared.resources import (
    fewer_collections,
    peak_rss_bytes,
    release_pages,
    rss_bytes,
)
from enginewright.runtime.shared.memory import return_freed_memory


def test_the_size_now_is_no_more_than_the_largest() -> None:
    held = mmap.mmap(-1, 64 << 20)  # of the system's, where malloc might have had room left
    held.write(b"x" * len(held))
    now = rss_bytes()
    assert len(held) < now <= peak_rss_bytes() + (1 << 20)  # the system counts in batches
    held.close()
    assert rss_bytes() < now - (32 << 20)
    assert rss_bytes(Path("/proc/self/there is no such file")) == peak_rss_bytes()


@pytest.mark.parametrize("size", [16 << 20, 48 << 20])
def test_pages_of_a_mapped_file_are_given_back(size: int, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * (size // 256))
    mapped = np.memmap(path, mode="r")
    part = mapped[1:].view(np.ndarray)[: size // 2]
    before = rss_bytes()
    total = int(mapped.sum())
    assert rss_bytes() > before + size // 2
    release_pages(part)
    assert rss_bytes() < before + size // 4
    assert int(mapped.sum()) == total  # they are read again
    release_pages(np.ones(3))  # no mapped file at all


def test_a_map_is_found_behind_frombuffer(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(16 << 20))
    with path.open("rb") as file:
        array = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    assert int(array.sum()) == 0
    before = rss_bytes()
    release_pages(array)
    assert rss_bytes() < before - (8 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries can't be told")
def test_what_was_freed_is_given_back() -> None:
    blocks = [np.ones(100 << 10, dtype=np.uint8) for _ in range(1000)]  # too small for pages of their own
    last = blocks[-1]  # behind which the heap can't just end
    held = rss_bytes()
    del blocks
    return_freed_memory()
    assert rss_bytes() < held - (80 << 20)
    assert last[0] == 1


@pytest.fixture
def threshold() -> Iterator[tuple[int, int, int]]:
    """The collector's thresholds as Python has them, in place of the tests'."""
    before, usual = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*usual)
    yield usual
    gc.set_threshold(*before)


def test_what_is_there_is_not_gone_through_again(threshold: tuple[int, int, int]) -> None:
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # what the tests' own start has frozen
    there = len(gc.get_objects())
    try:
        with pytest.raises(KeyError), fewer_collections():
            assert gc.get_freeze_count() > 0.9 * there
            assert gc.get_threshold()[0] >= 10_000
            raise KeyError
        assert gc.get_freeze_count() == 0
        assert gc.get_threshold() == threshold
    finally:
        if frozen:
            gc.freeze()


@pytest.mark.parametrize("seldom", [False, True])
def test_what_somebody_else_has_frozen_stays_so(seldom: bool, threshold: tuple[int, int, int]) -> None:
    if seldom:
        gc.set_threshold(20_000, 20, 20)
    before = gc.get_threshold()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with fewer_collections():
        during = gc.get_freeze_count()
        assert gc.get_threshold() == (before if seldom else (10_000, 10, 10))
    # A few frozen objects may end meanwhile, by count of references; unfreezing would leave none.
    assert frozen - 1000 < during <= frozen
    assert frozen - 1000 < gc.get_freeze_count() <= frozen


def test_a_collector_that_is_switched_off_stays_so(threshold: tuple[int, int, int]) -> None:
    gc.set_threshold(0)
    with fewer_collections():
        assert gc.get_threshold()[0] == 0
