"""What the processor calls itself, and its instructions."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself, or its architecture where the system doesn't say."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """What instructions the processor has, as Linux calls them; none where the system doesn't say."""
    try:
        found = re.search(r"^flags\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.M)
    except OSError:
        return ()
    return tuple(found[1].split()) if found else ()
