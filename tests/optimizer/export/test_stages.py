"""The stages of an export: their seconds add up; what they do is tested by whole exports, in test_export.py."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from enginewright.optimizer.export import stages as export_stages
from enginewright.optimizer.export.stages import Clock
from enginewright.plugins.shared.errors import CapacityError
from tests.passes.small_programs import decoder


def test_each_stage_takes_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(export_stages, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock()
    for name, end, elsewhere in (("capture", 102.0, 0.0), ("measure", 103.0, 0.0), ("passes", 110.0, 4.0)):
        now[0] = end
        clock.end(name, elsewhere)
    # Of the passes' seven seconds four went into measuring them.
    assert clock.seconds == {"measure": 1.0 + 4.0, "capture": 2.0, "passes": 3.0}
    assert sum(clock.seconds.values()) == clock.elapsed == 10.0


def test_the_disk_has_room_for_all_targets_and_shared_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = decoder()
    sizes = {name: 4 * math.prod(program.weights[name].shape) for name in program.weights}
    tables = {str(node.args[1].target) for node in program.nodes_of(torch.ops.ew.embedding.default)}  # type: ignore[union-attr]
    linears = {str(node.args[1].target) for node in program.nodes_of(torch.ops.ew.linear.default)}  # type: ignore[union-attr]
    norms = set(sizes) - tables - linears
    assert tables and linears and norms
    again = sum(sizes[name] for name in linears)
    free = 0
    monkeypatch.setattr(export_stages.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    for count in (1, 2, 3):
        free = sum(sizes.values()) + (count - 1) * again
        export_stages._check_disk([program] * count, tmp_path / "b")
        free -= 1
        with pytest.raises(CapacityError, match=f"the weights need {free + 1:,} bytes, and {free:,} are free"):
            export_stages._check_disk([program] * count, tmp_path / "b")
