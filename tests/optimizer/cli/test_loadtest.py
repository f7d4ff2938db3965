from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from enginewright.optimizer.cli.app import app
from tests.optimizer.loadtest.conftest import FakeServer, document, fake, stream

__all__ = ["fake"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["loadtest", *arguments])


def test_a_table_a_chart_and_a_line_a_request(fake: FakeServer, tmp_path: Path) -> None:
    plot, records = tmp_path / "load.svg", tmp_path / "load.jsonl"
    goals = ("--ttft", "60s", "--tpot", "60s", "--end-to-end", "2s")
    files = ("--plot", str(plot), "--records", str(records))
    result = run(fake.url, "--clients", "2", "--requests", "6", *goals, *files)
    assert result.exit_code == 0, result.output
    for words in ("fake at http://127.0.0.1:", "2 clients, seed 0", "6 finished", "within ttft 60 s", "first token"):
        assert words in result.stdout
    assert plot.read_text().lstrip().startswith("<svg")
    assert len(records.read_text().splitlines()) == 6


def test_json_of_classes_and_of_what_was_asked(fake: FakeServer, tmp_path: Path) -> None:
    (classes := tmp_path / "classes.toml").write_text('[a]\nprompt = 3\n[b]\nshare = 2\n[b.body]\nuser = "b"\n')
    (key := tmp_path / "key").write_text("abc\n")
    arguments = ("--rate", "200", "--arrivals", "bursts", "--burst", "2x1s/4s", "--seed", "4", "--param", "top_p=0.5")
    keyed = ("--api-key", f"@{key}", "--classes", str(classes), "--api", "completions", "--model", "mine")
    result = run(fake.url, "--requests", "30", *arguments, *keyed, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    result_json = json.loads(result.stdout)
    assert result_json["format_version"] == 1 and result_json["model"] == "mine" and result_json["api"] == "completions"
    assert (result_json["finished"], result_json["failed"], result_json["goodput"]) == (30, 0, None)
    assert result_json["classes"]["a"]["finished"] + result_json["classes"]["b"]["finished"] == 30
    assert result_json["workload"]["burst"] == {"factor": 2.0, "on": 1.0, "every": 4.0}
    assert all("Authorization: Bearer abc" in head for head in fake.heads)
    assert "abc" not in result.stdout
    assert {body.get("user") for body in fake.bodies[1:]} == {None, "b"}
    assert {body["top_p"] for body in fake.bodies[1:]} == {0.5}


def test_failed_requests_are_told_and_no_error_of_the_command(fake: FakeServer) -> None:
    fake.behave = lambda number, body: document(503, {"error": {"message": "busy"}}) if number > 2 else stream(2)
    result = run(fake.url, "--clients", "1", "--requests", "5")
    assert result.exit_code == 0, result.output
    assert "2 finished, 3 failed" in result.stdout and "3 http 503: busy" in result.stdout


def test_embeddings_of_a_bundle(pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    records = tmp_path / "load.jsonl"
    arguments = ("--embed", "--texts", "1-4", "--prompt", "2-6", "--requests", "8", "--records", str(records))
    result = run(str(pooled_bundles["embed"]), *arguments, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert (data["api"], data["finished"], data["failed"], data["tokens"]) == ("embeddings", 8, 0, 0)
    assert data["texts"] == sum(row["texts"] for row in rows) > 8
    assert data["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows) > data["texts"]
    assert data["ttft"] is None and data["end_to_end"]["count"] == 8
    shown = run(str(pooled_bundles["embed"]), "--embed", "--requests", "2", "--prompt", "3")
    assert "8 finished" not in shown.stdout and "texts" in shown.stdout


def test_a_server_without_embeddings_is_told(fake: FakeServer) -> None:
    fake.behave = lambda number, body: stream(2)
    result = run(fake.url, "--embed", "--requests", "2")
    assert result.exit_code == 1, result.output
    assert "not embeddings" in result.output and "leave --embed out" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("http://127.0.0.1:9", "--api", "embeddings"), 2, "--api: 'embeddings' isn't one of chat, completions"),
        (("http://127.0.0.1:9", "--arrivals", "daily"), 2, "--arrivals: 'daily' isn't one of"),
        (("http://127.0.0.1:9", "--clients", "2", "--rate", "3"), 2, "--rate: clients of a closed loop have none"),
        (("http://127.0.0.1:9", "--leave", "2"), 2, "--leave: 2.0 is out of range"),
        (("http://127.0.0.1:9", "--prompt", "many"), 2, "--prompt: 'many' isn't a length"),
        (("http://127.0.0.1:9", "--ttft", "soon"), 2, "--ttft: 'soon' isn't a time"),
        (("http://127.0.0.1:9", "--api-key", "@/nowhere"), 2, "--api-key: /nowhere"),
        (("http://127.0.0.1:9", "--api-key", "a\nb"), 2, "--api-key: it is empty, or has characters"),
        (("http://127.0.0.1:9", "--plot", "/nowhere/load.svg"), 7, "there is no such folder"),
        (("http://example.org", "--clients", "2"), 8, "Pass --remote if you have it"),
        (("nowhere.bundle",), 8, "'nowhere.bundle' isn't a server's address"),
    ],
)
def test_a_mistake_is_named(arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert said in " ".join(result.output.replace("│", " ").split())
