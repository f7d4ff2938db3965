"""Which memory a piece of work reads, as the processor marks it: pages of 4 KiB that were accessed (Linux).

Writing 1 to /proc/self/clear_refs clears the mark of every page; /proc/self/smaps then counts those that have it again.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE
_RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
_REFERENCED = re.compile(r"^Referenced: +(\d+) kB")

Bytes = npt.NDArray[np.uint8]


def pages_are_counted() -> bool:
    """Returns True if this system marks pages that are read, and reports the marks."""
    try:
        clear()
        return "Referenced:" in Path("/proc/self/smaps").read_text()
    except OSError:
        return False


class Arena:
    """Memory in pages of 4 KiB that nothing else lies in, for arrays whose reads are counted.

    It lies between two pages that can't be touched, so that the system does not join it with what is beside it.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes + 3 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(self._memory, np.uint8)
        address = whole.ctypes.data
        self.array: Bytes = whole[PAGE : PAGE + -(-nbytes // PAGE) * PAGE]
        libc = ctypes.CDLL(None, use_errno=True)
        for guard in (address, address + PAGE + self.array.nbytes):
            if libc.mprotect(ctypes.c_void_p(guard), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        keep_small(self.array)

    def copies(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays, one behind the other as in a bundle: each begins at a multiple of 64 bytes."""
        places: dict[str, npt.NDArray[np.generic]] = {}
        at = 0
        for name, array in arrays.items():
            place = self.array[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            place[...] = array
            places[name] = place
            at += -(-array.nbytes // 64) * 64
        return places


def keep_small(array: npt.NDArray[np.generic]) -> None:
    """Has the system use no huge pages for an array's whole pages; before it is touched."""
    libc = ctypes.CDLL(None, use_errno=True)
    start, length = _whole_pages(array)
    if length > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), 15):  # MADV_NOHUGEPAGE
        raise OSError(ctypes.get_errno(), "madvise")


def clear(arrays: Iterable[npt.NDArray[np.generic]] = ()) -> None:
    """Forgets what was accessed.

    The whole pages of ``arrays``, which must be of private memory, lose their entries in the processor's TLB too: an
    access by way of an entry makes no mark, and clear_refs leaves entries there.
    """
    Path("/proc/self/clear_refs").write_text("1")
    libc = ctypes.CDLL(None, use_errno=True)
    for array in arrays:
        start, length = _whole_pages(array)
        for protection in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE):
            if length > 0 and libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(length), protection):
                raise OSError(ctypes.get_errno(), "mprotect")


def accessed(arrays: Iterable[npt.NDArray[np.generic]]) -> int:
    """Bytes of the pages that were accessed since ``clear``, in the mappings that some arrays lie in."""
    spans = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
    total, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := _RANGE.match(line):
            within = _touches(spans, int(match[1], 16), int(match[2], 16))
        elif within and (match := _REFERENCED.match(line)):
            total += int(match[1]) * 1024
    return total


def _whole_pages(array: npt.NDArray[np.generic]) -> tuple[int, int]:
    """The first address, and the bytes."""
    start = -(-array.ctypes.data // PAGE) * PAGE
    return start, (array.ctypes.data + array.nbytes - start) // PAGE * PAGE


def _touches(spans: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    return any(a < end and b > start for a, b in spans)
