"""Bytes of memory: how sizes are read and written, how many are free, and how freed ones go back to the system."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from pathlib import Path

from .errors import CapacityError, RequestError, shown

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_MOST_BYTES = 1 << 62
_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 256 << 10
_SHARE_OF_FREE = 4
"""The KV cache takes at most 1/4 of the free memory unless told otherwise: the mapped weights need the rest."""


def parse_size(value: int | str, name: str = "memory", *, least: int = 0) -> int:
    """Returns the bytes of 1048576, "512MiB", "1.5 GB" or "2g".

    Raises RequestError with that name for anything else, and for fewer bytes than ``least``.
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
    """Writes a size for people: "512 B", "1.2 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {units[power]}"


def default_budget() -> int:
    """Bytes for the KV cache where the caller says nothing: a quarter of the memory that is free here."""
    return free_memory() // _SHARE_OF_FREE


def check_free(needed: int, what: str) -> None:
    """Raises CapacityError if less than ``needed`` bytes are free in the system or container, swap included.

    ``what``: their use, for the message.

    The system promises more memory than it has and ends the process that uses it. Other processes may still take what
    is free now.
    """
    if needed > (free := free_memory() + _free_swap()):
        raise CapacityError(
            f"memory: {what} of {format_bytes(needed)} is more than the {format_bytes(free)} that are free",
            hint="Pass less memory, fewer max_requests or a smaller context, or free some.",
        )


def _free_swap(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        match = re.search(r"^SwapFree:\s+(\d+)", meminfo.read_text(), re.M)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may still be used: what the system has, or the container allows, whichever is less.

    What a container holds of files that nobody has touched lately counts as free: the system drops it when asked.
    """
    try:
        available = int(re.search(r"^MemAvailable:\s+(\d+)", meminfo.read_text(), re.M)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):  # no Linux, or one without this line
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
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


def return_freed_memory() -> None:
    """Gives it back to the system, where that can be asked for (glibc); else does nothing.

    What opening a bundle parses, the tokenizer's vocabulary above all, takes several times what is left of it, in
    pieces too small for the library to give back by itself. A server would have them resident for good.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def return_large_blocks_at_once() -> None:
    """Has the C library (glibc) give large blocks back to the system when they are freed; else does nothing.

    Left alone, it raises its threshold with each large block that is freed. Blocks of up to 32 MB then stay with the
    process: some hundred MB after tensors, or bodies of requests, of many sizes.
    """
    if sys.platform.startswith("linux") and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
