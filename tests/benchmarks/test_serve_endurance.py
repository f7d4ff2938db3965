"""The endurance run at a small size: all that it asks for holds."""

from __future__ import annotations

import json
from pathlib import Path

import serve_endurance


def test_all_three_parts(tiny_bundle: Path, tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    small = ["--clients", "4", "--seconds", "2", "--kills", "1", "--rate", "0.005", "--json", str(result)]
    assert serve_endurance.main([str(tiny_bundle), *small]) == 0
    found = json.loads(result.read_text())
    assert found["load"]["result"]["finished"] > 0 and found["kills"]["requests"] == 20
    assert found["day"]["requests"] > 100 and found["day"]["ended_after_hours"] > 20


def test_what_does_not_hold_is_told() -> None:
    load = {"result": {"errors": {"HTTP 500": 1}}, "all_blocks_free": False}
    kills = {"statuses": {"200": 19}, "requests": 20, "then": 200}
    assert len(serve_endurance.problems({"load": load, "kills": kills, "exit": 0})) == 3
