from __future__ import annotations

import pytest

from enginewright.plugins.cpu.compile import machine
from enginewright.plugins.cpu.compile.machine import MOST_BYTES, Machine, measure_machine
from enginewright.plugins.native.executable import isas


@pytest.mark.parametrize("isa", [isas()[0], isas()[-1]])
def test_the_limits_of_this_machine(isa: str) -> None:
    measured = measure_machine(isa, 1, {"f32", "bf16", "i8"}, 8 << 20)
    assert (measured.isa, measured.threads) == (isa, 1)
    assert 1e8 < measured.bandwidth < 1e13
    assert set(measured.peaks) == {"f32", "bf16", "i8"}
    assert all(1e6 < peak < 1e14 for peak in measured.peaks.values())


@pytest.mark.parametrize(("working_set", "read"), [(100, 2 << 20), (50 << 20, 50 << 20), (9 << 30, MOST_BYTES)])
def test_the_bandwidth_is_that_of_the_working_set(working_set: int, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working set that another cache holds than 256 MiB of anything has another bandwidth."""
    calls: list[tuple[int, int]] = []

    class Extension:
        @staticmethod
        def measure_bandwidth(nbytes: int, threads: int) -> float:
            calls.append((nbytes, threads))
            return 10.0

        @staticmethod
        def measure_peak(kind: str, threads: int, isa: str) -> float:
            return {"f32": 100.0, "i8": 400.0}[kind]

    monkeypatch.setattr(machine, "cpu_extension", Extension)
    machines = [measure_machine("avx2", 2, ["i8", "f32"], working_set) for _ in range(2)]
    assert calls == [(read, 2)] * 2  # measured anew each time: the machine may be busy the first time
    assert machines[0] == Machine("avx2", 2, 1e10, {"f32": 1e11, "i8": 4e11})


def test_the_best_of_two_measurements() -> None:
    busy, idle = Machine("avx2", 2, 1e9, {"f32": 3e9, "i8": 5e9}), Machine("avx2", 2, 2e9, {"f32": 2e9, "i8": 9e9})
    assert busy.at_best(idle) == idle.at_best(busy) == Machine("avx2", 2, 2e9, {"f32": 3e9, "i8": 9e9})
