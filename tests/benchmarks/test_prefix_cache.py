"""The benchmark of the prefix cache, on a tiny bundle: first tokens are compared, and figures written."""

from __future__ import annotations

import json
from pathlib import Path

import prefix_cache
import pytest
from peers.engines import OURS


def test_every_way_to_a_first_token_is_timed(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = {"with": 1.0, "first_with": 0.5, "without": 2.0, "first_without": 1.5, "changed": 0.0, "turns": 8.0}
    monkeypatch.setattr(prefix_cache, "conversations", lambda options: {OURS: [talk], "other": [talk | {"changed": 3}]})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    sizes = ["--prompt", "100", "--shared", "70", "--rounds", "1", "--threads", "1", "--memory", "64MiB"]
    assert prefix_cache.main([str(tiny_bundle), *sizes, "--json", str(tmp_path / "found.json")]) == 0
    seconds = json.loads((tmp_path / "found.json").read_text())["seconds_to_first_token"]
    assert set(seconds) == {"cold", "hit", "disk", "rest"} and all(of[0] > 0 for of in seconds.values())
    assert "changed 3 of 8 answers" in capsys.readouterr().out
