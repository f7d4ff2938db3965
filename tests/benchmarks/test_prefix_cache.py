"""The benchmark of the prefix cache, on a tiny bundle: first tokens are compared, and figures written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import prefix_cache
import pytest
from peers.engines import OURS
from peers.servers import Serving
from peers.turns import Turns, measure, shown


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


def test_turns_are_cut_at_odd_places_and_begin_as_those_before() -> None:
    turns = Turns(context=100, turns=5, new=64, vocabulary=200)
    drawn = turns.prompts()
    assert [part for part, _ in drawn] == ["alone"] * 2 + ["cold"] + ["turn"] * 5 + ["alone"] * 3
    assert all(len(prompt) == 64 for part, prompt in drawn if part == "alone")
    prompts = [prompt for part, prompt in drawn if part != "alone"]
    assert len(prompts[0]) == 100
    for before, after in pairwise(prompts):
        shared = len(after) - 64
        assert after[:shared] == before[:shared] and (len(before) - shared) % 2 == 1
    assert max(map(len, prompts)) < turns.longest


def test_turns_are_answered_by_a_server(tiny_bundle: Path) -> None:
    turns = Turns(context=60, turns=2, new=16, vocabulary=200)
    result = measure([OURS], Serving(tiny_bundle, Path(), 1, 1, turns.longest), turns)
    figures = result["servers"][OURS]
    assert {part: len(figures[part]) for part in ("alone", "cold", "turn")} == {"alone": 2, "cold": 1, "turn": 2}
    assert min(figures["alone"] + figures["cold"] + figures["turn"]) > 0
    # A turn finds all that it shares with the prompt before it.
    assert max(figures["again"]) <= 4
    assert result["snapshot_bytes"] == 0  # a model without states
    assert [line.split(":")[0] for line in shown(result, OURS)][:1] == [OURS]
