"""The benchmark of speculation, on a tiny bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import speculation


def test_every_task_is_measured_and_compared(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "TASKS", {"chat": "Hello", "copy": "One, one, one, one"})
    path = tmp_path / "found.json"
    assert (
        speculation.main([str(tiny_bundle), "--rounds", "1", "--tokens", "6", "--threads", "1", "--json", str(path)])
        == 0
    )
    (found,) = json.loads(path.read_text()).values()
    assert len(found["tasks"]) == 8
    assert all(of["ratio"] > 0 and of["accepted"] <= of["drafted"] for of in found["tasks"].values())
