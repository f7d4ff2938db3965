from __future__ import annotations

import os
from pathlib import Path

import pytest

from enginewright.runtime.shared.threads import available_threads, core_shares

CORES = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_it_is_the_affinity(tmp_path: Path) -> None:
    assert available_threads(tmp_path) == CORES


def test_affinity_is_respected(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_threads(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", CORES), ("100000 100000", 1), ("50000 100000", 1)])
def test_version_2_quota(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": quota})
    assert available_threads(tmp_path) == cores


def test_a_group_above_may_be_tighter(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "150000 100000"}
    write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **files})
    assert available_threads(tmp_path) == 1


@pytest.mark.parametrize(("quota", "cores"), [("200000 100000", 2), ("299999 100000", 2), ("max 100000", 64)])
def test_many_cores_and_a_small_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    assert available_threads(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", CORES), ("100000", 1), ("150000", 1)])
def test_version_1_quota(tmp_path: Path, quota: str, cores: int) -> None:
    folder = "sys/fs/cgroup/cpu"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    write(tmp_path, {"proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:memory:/m\n", **files})
    assert available_threads(tmp_path) == cores


def test_ranks_get_neighbouring_cores_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two cores with two threads each: processors c and c + 4 are one core."""
    nodes = {"node0": "0-1,4-5\n", "node1": "2,3,6-7\n"}
    write(tmp_path, {f"sys/devices/system/node/{name}/cpulist": cores for name, cores in nodes.items()})
    for core in range(8):
        topology = f"sys/devices/system/cpu/cpu{core}/topology"
        write(tmp_path, {f"{topology}/core_id": f"{core % 4}\n", f"{topology}/physical_package_id": "0\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert core_shares(2, tmp_path) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert core_shares(4, tmp_path) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert core_shares(3, tmp_path) == ((0, 4), (1, 5, 2), (6, 3, 7))
    assert core_shares(9, tmp_path) == ()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 1, 3})
    assert core_shares(3, tmp_path) == ((1,), (3,), (7,))
    assert core_shares(2, tmp_path / "nothing") == ((1,), (3, 7))  # a system that says nothing
