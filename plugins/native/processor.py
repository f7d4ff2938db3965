"""Reads the processor's name and its instructions."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name, or its architecture if the system doesn't know the name."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.M)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Returns the processor's instruction-set flags, with Linux's names; () if the system doesn't list them."""
    try:
        match = re.search(r"^flags\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.M)
    except OSError:
        return ()
    return tuple(match[1].split()) if match else ()
