"""The endurance run at a small size: all that it asks for holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hostile_clients
import official_clients
import pytest
import serve_endurance


def test_all_three_parts(tiny_bundle: Path, tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    small = [
        "--parts",
        "load",
        "kills",
        "day",
        "--clients",
        "4",
        "--seconds",
        "2",
        "--kills",
        "1",
        "--rate",
        "0.005",
        "--json",
        str(result),
    ]
    assert serve_endurance.main([str(tiny_bundle), *small]) == 0
    result_json = json.loads(result.read_text())
    assert result_json["load"]["result"]["finished"] > 0 and result_json["kills"]["requests"] == 20
    assert result_json["day"]["requests"] > 100 and result_json["day"]["ended_after_hours"] > 20


def test_vectors_next_to_chats(tiny_bundle: Path, pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    models = [part for kind in ("embed", "rerank") for part in (f"--{kind}", str(pooled_bundles[kind]))]
    small = ["--parts", "texts", "--clients", "4", "--seconds", "2", "--json", str(tmp_path / "found")]
    assert serve_endurance.main([str(tiny_bundle), *models, *small]) == 0
    figures = json.loads((tmp_path / "found").read_text())["texts"]
    assert all(figures[name]["end_to_end"]["p99"] > 0 for name in ("embed", "chat", "rerank"))
    lost = figures | {"deaths": 1, "embed": figures["embed"] | {"errors": {"closed": [1, ""]}, "unfinished": 1}}
    assert len(serve_endurance.problems({"texts": lost})) == 3


def test_hostile_clients(tiny_bundle: Path, tmp_path: Path) -> None:
    """Each client is there, and honest answers are right; times are left to a quiet machine."""
    figures = serve_endurance.hostile(tiny_bundle, tmp_path, 3.0)
    # On a busy machine a key of well-behaved clients may have more requests at a time than it is allowed.
    assert figures["hostile"]["wrong"] == []
    assert [one for one in figures["well_behaved"]["wrong"] if not one.startswith("well-behaved: 429 ")] == []
    assert figures["hostile"]["honest"]["requests"] > 0 < figures["well_behaved"]["honest"]["requests"]
    assert figures["deaths"] == 0 == figures["exit"] and figures["all_blocks_free"]
    kinds = {name.partition(" ")[0] for name in figures["hostile"]["others"]["statuses"]}
    assert kinds == {kind.__name__ for kind in hostile_clients.KINDS}


def test_what_does_not_hold_next_to_hostile_clients_is_told() -> None:
    def phase(p99: float, most: float) -> dict[str, object]:
        return {"wrong": [], "honest": {"p99": p99}, "megabytes": {"most": most}}

    well = {"hostile": phase(1.9, 599.0), "well_behaved": phase(1.0, 300.0), "memory": 600.0}
    ends = {"all_blocks_free": True, "deaths": 0, "exit": 0}
    assert serve_endurance.problems({"hostile": well | ends}) == []
    slow = {"hostile": phase(2.1, 601.0), "well_behaved": phase(1.0, 300.0), "memory": 600.0}
    assert len(serve_endurance.problems({"hostile": slow | ends | {"deaths": 1}})) == 3


def test_what_does_not_hold_is_told() -> None:
    load = {"result": {"errors": {"HTTP 500": 1}}, "all_blocks_free": False}
    kills = {"statuses": {"200": 19}, "requests": 20, "then": 200}
    assert len(serve_endurance.problems({"load": load, "kills": kills, "exit": 0})) == 3


def test_official_clients_compare_each_answer(tiny_bundle: Path, tmp_path: Path) -> None:
    conversations = official_clients.questions(tiny_bundle, 8)
    assert {question.kind for turns in conversations for question in turns} == set(official_clients.KINDS)
    altered = [[replace(turns[0], answer=(*turns[0].answer, 3))] for turns in conversations]
    server = serve_endurance.Server.scheduled(tiny_bundle, tmp_path)
    try:
        model = server.ask("GET", "/v1/models")[1]["data"][0]["id"]
        tally = official_clients.run(server.url, model, conversations, 8, 0.0)
        assert tally.wrong == [] and tally.answers.total() + tally.left == 8
        differs = official_clients.run(server.url, model, altered, 8, 0.0)
        assert len(differs.wrong) == differs.answers.total() > 0
        assert server.idle()
    finally:
        assert server.stop() == 0


def test_answers_that_differ_are_told() -> None:
    figures = {"wrong": ["greedy: differs"], "all_blocks_free": True, "deaths": 1}
    assert len(serve_endurance.problems({"answers": figures})) == 2


@pytest.mark.matrix
def test_a_random_hybrid(tmp_path: Path) -> None:
    small = ["--parts", "answers", "--clients", "8", "--seconds", "2", "--rate", "0", "--json", str(tmp_path / "found")]
    assert serve_endurance.main(["--random", "granitemoehybrid", *small]) == 0
    figures = json.loads((tmp_path / "found").read_text())["answers"]
    assert figures["tokens"] > 0 and figures["cached"] > 0
