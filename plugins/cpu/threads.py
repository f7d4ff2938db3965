"""How many threads this process may use."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def available_threads(root: Path = Path("/")) -> int:
    """Cores by the process's affinity, and no more than its cgroup's CPU quota (version 2 or 1); at least 1.

    ``root`` is where /proc and /sys are looked for.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cgroup_quota(root: Path) -> float | None:
    """The least quota, in cores, of the process's cgroup and those above it; None if there is none."""
    quotas: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top, version = root / "sys/fs/cgroup", 2
        elif "cpu" in controllers.split(","):
            top, version = root / "sys/fs/cgroup/cpu", 1
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        for folder in (relative, *relative.parents):  # a container may see its own group at the top
            quota = _quota(top / folder, version)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        fields = _read(folder / "cpu.max").split()
    else:
        fields = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return None  # absent, "max", or -1: no limit
    return int(fields[0]) / int(fields[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
