"""What machine figures are from."""

from __future__ import annotations

import os
import platform

from enginewright.plugins.cpu.threads import available_threads
from enginewright.runtime.executors.machine import processor_name


def machine_facts() -> dict[str, str | int]:
    """Processor, cores that this process may use, memory and system; no name of the machine."""
    return {
        "processor": processor_name(),
        "cores": available_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
