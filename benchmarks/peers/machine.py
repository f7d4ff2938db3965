"""The machine and the commit that a result was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from peers.loading import REPOSITORY


def commit() -> str:
    """The commit that was measured, with -dirty if files differ from it; empty outside a clone."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def processor() -> str:
    """The processor's name, as the system has it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Processor, its instruction sets that matter, caches, memory, system."""
    flags = set(_cpuinfo("flags").split())
    known = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [flag for flag in known if flag in flags],
        "caches": caches(Path("/sys/devices/system/cpu/cpu0/cache")),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }


def caches(folder: Path) -> dict[str, str]:
    """Size of each cache of a core, as the system has it, such as {"L2": "1024K"}."""
    sizes = {}
    for index in sorted(folder.glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        sizes[f"L{level}" + {"Data": "d", "Instruction": "i"}.get(kind, "")] = size
    return sizes


def _cpuinfo(name: str) -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
