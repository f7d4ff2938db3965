"""Finds the number of threads that this process may use, and the cores that ranks share out."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path, PurePosixPath


def available_threads(root: Path = Path("/")) -> int:
    """Returns the cores of the process's affinity, and no more than ``cpu_quota``; at least 1.

    ``root``: the folder that contains /proc and /sys.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return cores if quota is None else min(cores, quota)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Returns the smallest CPU quota (version 2 or 1) of the process's cgroup and its ancestors, in cores, rounded
    down but at least 1; None if there is none.
    """
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
    return max(1, int(min(quotas))) if quotas else None


def core_shares(ranks: int, root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """Divides the cores of this process among ranks: neighbours together, by NUMA node, with both threads of a core.

    Empty if there are fewer cores than ranks, or the system has no affinities. ``root``: the folder that contains /sys.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    nodes = {
        core: int(folder.name.removeprefix("node"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        for core in _numbers(_read(folder / "cpulist"))
    }

    def place(core: int) -> tuple[int, int, int, int]:
        topology = root / f"sys/devices/system/cpu/cpu{core}/topology"
        package, core_id = (_read(topology / name).strip() for name in ("physical_package_id", "core_id"))
        return nodes.get(core, 0), int(package or 0), int(core_id or core), core

    cores = sorted(os.sched_getaffinity(0), key=place)
    if len(cores) < ranks:
        return ()
    cuts = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return tuple(tuple(cores[a:b]) for a, b in pairwise(cuts))


def _numbers(text: str) -> list[int]:
    """Parses a list of numbers such as 0-3,8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


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
