"""Bytes of memory: parsing and formatting of sizes, free memory, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from .errors import CapacityError, RequestError, shown

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_MOST_BYTES = 1 << 62
_MEMINFO = Path("/proc/meminfo")
_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 256 << 10
_SHARE_OF_FREE = 4
"""The default size of the KV cache, as a share of the free memory. The mapped weights need the rest."""


def parse_size(value: int | str, name: str = "memory", *, least: int = 0) -> int:
    """Returns the bytes of a size such as 1048576, "512MiB", "1.5 GB" or "2g".

    Raises RequestError naming ``name`` for an invalid size, or one below ``least``.
    """
    hint = 'Pass bytes, or a size such as "512MiB" or "2GB".'
    size = math.nan
    if isinstance(value, int) and not isinstance(value, bool):
        plain = int.__int__(value)
        size = plain if 0 <= plain <= _MOST_BYTES else math.nan
    elif isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str.__str__(value).strip().lower())
        if match is not None and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
    if not least <= size <= _MOST_BYTES:
        raise RequestError(f"{name}: {shown(value)} isn't a size", hint=hint)
    return int(size)


def format_bytes(size: int) -> str:
    """Returns a size as text: "512 B", "1.2 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {units[power]}"


def default_budget() -> int:
    """Returns the default bytes for the KV cache: a quarter of the free memory."""
    return free_memory() // _SHARE_OF_FREE


def check_free(needed: int, what: str) -> None:
    """Raises CapacityError if fewer than ``needed`` bytes, swap included, are free in the system or container.

    Without the check, the system would allocate more memory than it has, and later kill the process. Other processes
    may still take the free memory afterwards. ``what`` is the use of the memory, for the message.
    """
    swap = int(proc_field(_MEMINFO, "SwapFree").partition(" ")[0] or 0) * 1024
    if needed > (free := free_memory() + swap):
        raise CapacityError(
            f"memory: {what} of {format_bytes(needed)} is more than the {format_bytes(free)} that are free",
            hint="Pass less memory, fewer max_requests or a smaller context, or free some.",
        )


def proc_field(file: Path, name: str) -> str:
    """Returns the value of the first line ``name: value`` in a file of /proc; "" if there is no such file or line."""
    try:
        match = re.search(rf"^{name}\s*:\s*(.+)$", file.read_text(errors="replace"), re.M)
    except OSError:
        return ""
    return match[1].strip() if match else ""


def free_memory(meminfo: Path = _MEMINFO, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that may still be used: the system's free memory or the container's limit, whichever is less.

    A container's cache of files that weren't used lately counts as free: the system drops it on demand.

    Args:
        meminfo: the system's file with the free memory.
        cgroup: the system's folder with the container's limits.
    """
    listed = proc_field(meminfo, "MemAvailable").partition(" ")[0]  # none on other systems than Linux
    available = int(listed) * 1024 if listed else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return available
    try:
        held = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.M)
    except OSError:
        held = None
    return max(0, min(available, limit - used + (int(held[1]) if held else 0)))


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Advises the system to use huge pages (2 MB) for memory that steps read again and again, or for a mapped file.

    A file system with large folios, such as ext4 in Linux 6.18, then reads a mapped file in huge pages; what is cached
    in small ones stays so. With fewer pages fewer searches of page tables are needed.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)


def return_freed_memory() -> None:
    """Returns freed memory to the system, with glibc; otherwise does nothing.

    Opening a bundle, mainly the tokenizer's vocabulary, temporarily takes several times the memory that remains, in
    pieces too small for the library to return by itself. In a server they would stay resident forever.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def return_large_blocks_at_once() -> None:
    """Makes glibc return large blocks to the system as soon as they are freed. Does nothing with another C library.

    By default glibc raises its threshold with each large block that is freed, up to 32 MB. Then some hundred MB stay
    with the process after tensors or request bodies of many sizes.
    """
    if sys.platform.startswith("linux") and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
