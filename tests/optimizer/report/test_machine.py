from __future__ import annotations

import pytest

from enginewright.optimizer.report.machine import measure_machine
from enginewright.plugins.cpu.executable import isas


@pytest.mark.parametrize("isa", [isas()[0], isas()[-1]])
def test_the_limits_of_this_machine(isa: str) -> None:
    found = measure_machine(isa, 1, {"f32", "bf16", "i8"})
    assert (found.isa, found.threads) == (isa, 1)
    assert 1e8 < found.bandwidth < 1e13
    assert set(found.peaks) == {"f32", "bf16", "i8"}
    assert all(1e6 < peak < 1e14 for peak in found.peaks.values())
