"""Reads the CPU's name and its instruction sets."""

from __future__ import annotations

import platform
from pathlib import Path

from enginewright.runtime.shared.memory import proc_field

_CPUINFO = Path("/proc/cpuinfo")


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Returns the CPU's name, or its architecture if the system doesn't know the name."""
    return proc_field(cpuinfo, "model name") or platform.processor() or platform.machine()


def processor_features() -> tuple[str, ...]:
    """Returns the CPU's instruction-set flags, with Linux's names; () if the system doesn't list them."""
    return tuple(proc_field(_CPUINFO, "flags").split())
