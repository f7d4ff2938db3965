"""Outcomes of other projects' tests become rows, and each one that isn't applicable has its reason."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import agents
import conformance
import conformance_tables
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

RESULTS = sorted((conformance.REPOSITORY / "benchmarks" / "results").glob("conformance-*.json"))
REPORT = """<testsuites><testsuite>
<testcase classname="tests.api_resources.chat.test_completions.TestCompletions" name="test_create[strict]"/>
<testcase classname="unit.test_basic" name="test_odd"><skipped message="no IPv6">/a/place:3</skipped></testcase>
<testcase classname="a" name="test_delete"><failure message="405">doesn't take DELETE</failure></testcase>
<testcase classname="a" name="test_delete_other"><failure message="500">no</failure></testcase>
<testcase classname="a" name="test_setup"><error message="refused">at setup</error></testcase>
</testsuite></testsuites>"""


def test_outcomes_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, reasons = tmp_path / "report.xml", tmp_path / "reasons.toml"
    report.write_text(REPORT)
    reasons.write_text("[[of]]\ntest = '_delete'\nfails = '405.*DELETE'\nreason = 'nothing is deleted'\n")
    monkeypatch.setattr(conformance, "REASONS", reasons)
    outcome = conformance.judged("of", conformance.cases(report))
    assert [row["outcome"] for row in outcome] == ["passed", "skipped", "not applicable", "failed", "failed"]
    assert outcome[1]["reason"] == "no IPv6"
    assert outcome[0]["name"] == "chat.test_completions.TestCompletions::test_create[strict]"
    assert outcome[2]["reason"] == "nothing is deleted" and "500" in outcome[3]["reason"]


def test_rules_are_whole() -> None:
    rules = tomllib.loads(conformance.REASONS.read_text())
    for name, of in rules.items():
        for rule in of:
            assert {*rule} == {"test", "reason"} | ({"fails"} if name != "llama-not-run" else set()), rule
            assert rule["reason"]
            re.compile(rule["test"])
            re.compile(rule.get("fails", ""))


def test_what_was_skipped_as_foreseen_is_not_applicable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = tmp_path / "reasons.toml"
    reasons.write_text("[[of]]\ntest = '_picture'\nfails = 'no pictures'\nreason = 'text alone'\n")
    monkeypatch.setattr(conformance, "REASONS", reasons)
    rows = [{"name": f"a_{what}", "outcome": "skipped", "reason": "no pictures"} for what in ("picture", "sound")]
    assert [row["outcome"] for row in conformance.judged("of", rows)] == ["not applicable", "skipped"]


def test_outcomes_of_scenarios() -> None:
    scenarios = [("a", "scenario", True, "pass"), ("a", "stream_equals_nonstream", False, "fail")]
    scenarios += [("b", "scenario", False, "skip"), ("b", "scenario", False, "error")]
    outcomes = [
        {"scenario_id": name, "check": check, "stream": stream, "status": status, "detail": "why", "warnings": []}
        for name, check, stream, status in scenarios
    ]
    assert conformance.probed({"outcomes": outcomes}) == [
        {"name": "a, streamed", "outcome": "passed"},
        {"name": "a, streamed as whole", "outcome": "failed", "reason": "why"},
        {"name": "b, whole", "outcome": "skipped", "reason": "why"},
        {"name": "b, whole", "outcome": "failed", "reason": "why"},
    ]


def prompt(last: str, *tools: str, answered: str = "") -> str:
    """The prompt that agents.TEMPLATE makes of a question."""
    messages = [{"role": "user", "content": last}]
    if answered:
        messages += [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": answered}]
    offered = [{"type": "function", "function": {"name": name}} for name in tools]
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(agents.TEMPLATE)
    return template.render(messages=messages, tools=offered, add_generation_prompt=True)


def called(said: str) -> list[dict[str, Any]]:
    return [json.loads(call) for call in re.findall("<tool_call>\n(.*)\n</tool_call>", said)]


def test_the_script_answers_by_the_last_message() -> None:
    paris, tokyo = ({"name": "get_weather", "arguments": {"city": city}} for city in ("Paris", "Tokyo"))
    weather = "Get the current weather in Paris and in Tokyo."
    assert called(agents.reply(prompt(weather, "other", "get_weather"), conformance.REPLIES)) == [paris, tokyo]
    assert agents.reply(prompt(weather, "get_weather", answered="18"), conformance.REPLIES) == agents.SENTENCE
    assert agents.reply(prompt("Good evening", "get_weather"), conformance.REPLIES) == agents.SENTENCE
    (joke,) = called(agents.reply(prompt("Tell me a joke about cats.", "JokeDict"), conformance.REPLIES))
    assert joke == {"name": "JokeDict", "arguments": conformance.JOKE}
    assert json.loads(agents.reply(prompt("Tell me a joke about cats."), conformance.REPLIES)) == conformance.JOKE


def test_flags_of_another_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command: list[Any] = []
    monkeypatch.setenv("CONFORMANCE_BUNDLE", "a.bundle")
    monkeypatch.setenv("CONFORMANCE_THREADS", "2")
    monkeypatch.setattr(os, "execv", lambda program, given: command.extend(given))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    flags = "--port 81 --temp 0.8 --host 127.0.0.1,::1 --ctx-size 512 --parallel 2 --alias b,c --api-key s --no-slots"
    conformance.main(["--as-llama-server", *flags.split()])
    line = " ".join(command)
    for part in ("--model b=a.bundle", "--port 81", "--host 127.0.0.1 ", "--context 256", "--max-requests 2"):
        assert part in line
    (keys,) = tmp_path.glob("*.toml")
    assert str(keys) in line and "sha256:" in keys.read_text()


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_no_outcome_without_a_reason(file: Path) -> None:
    for name, suite in json.loads(file.read_text()).items():
        for row in suite["tests"] if isinstance(suite, dict) and "tests" in suite else ():
            assert row["outcome"] in ("passed", "skipped", "not applicable"), (name, row)
            assert row["outcome"] == "passed" or row["reason"], (name, row)


CLIENTS = sorted((conformance.REPOSITORY / "benchmarks" / "results").glob("clients-*.json"))


def test_the_table_of_the_notes_is_that_of_the_last_run() -> None:
    page = conformance.NOTES.read_text(encoding="utf-8")
    table = conformance_tables.clients_table(json.loads(CLIENTS[-1].read_text(encoding="utf-8")))
    assert f"{conformance_tables.TABLE.begin}\n\n{table}\n\n<!-- end of table -->" in page


def test_the_table_of_clients_of_texts_is_that_of_the_last_run() -> None:
    results = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS]
    last = [one for one in results if "pooled" in one][-1]
    table = conformance_tables.table_of_texts(last)
    begin = conformance_tables.TABLE_OF_TEXTS.begin
    assert f"{begin}\n\n{table}\n\n<!-- end of table -->" in conformance.NOTES.read_text(encoding="utf-8")
    last["pooled"]["tests"][0]["outcome"] = "failed"
    with pytest.raises(SystemExit, match="no place in the table for"):
        conformance_tables.table_of_texts(last)


def test_each_client_has_a_section_and_its_scripts() -> None:
    page = conformance.PAGE.read_text(encoding="utf-8")
    for name, packages in conformance.SCRIPTS.items():
        first = conformance.first_script(page, name)
        assert "http://127.0.0.1:8000" in first and "smollm2" in first, name
        suffix = ".py" if "==" in packages[0] else ".mjs"
        if suffix == ".py":
            compile(first, name, "exec")
        assert conformance.script_of(name, suffix).is_file(), name
    for name in (*agents.AGENTS, *conformance_tables.NOT_RUN):
        assert f"\n## {name.partition(' --')[0]}\n" in page, name


def test_the_table_says_what_was_run() -> None:
    rows = [{"name": f"openai: {title}", "outcome": "passed"} for title in conformance.CASES.values()]
    rows[-1]["outcome"] = "failed"
    results = {
        "clients": {
            "packages": {"openai": ["openai==1.2.3"], "AI SDK": ["ai@6.0.1", "@ai-sdk/x@2.0.1"]},
            "tests": rows,
        },
        "agents": {
            "packages": {"codex": ["@openai/codex@0.1.2"]},
            "tests": [{"name": "codex: a task of five turns", "outcome": "passed"}],
        },
    }
    table = conformance_tables.clients_table(results).splitlines()
    assert table[2] == "| [openai](../../docs/use/clients.md#openai) | openai 1.2.3 | yes | yes | yes | no |"
    ai_sdk = "| [AI SDK](../../docs/use/clients.md#ai-sdk) | ai 6.0.1, @ai-sdk/x 2.0.1 |"
    assert table[3] == f"{ai_sdk} not run | not run | not run | not run |"
    assert table[7] == "| `codex` | @openai/codex 0.1.2 | yes |"
    assert table[8] == "| Open WebUI |  | not run |"
