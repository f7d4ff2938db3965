"""What is made of the outcomes of others' tests, and that each one which isn't applicable has its reason."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import conformance
import pytest

RESULTS = sorted((conformance.REPOSITORY / "benchmarks" / "results").glob("conformance-*.json"))
REPORT = """<testsuites><testsuite>
<testcase classname="tests.api_resources.chat.test_completions.TestCompletions" name="test_create[strict]"/>
<testcase classname="unit.test_basic" name="test_odd"><skipped message="no IPv6"/></testcase>
<testcase classname="a" name="test_delete"><failure message="405">doesn't take DELETE</failure></testcase>
<testcase classname="a" name="test_delete_other"><failure message="500">no</failure></testcase>
<testcase classname="a" name="test_setup"><error message="refused">at setup</error></testcase>
</testsuite></testsuites>"""


def test_outcomes_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, reasons = tmp_path / "report.xml", tmp_path / "reasons.toml"
    report.write_text(REPORT)
    reasons.write_text("[[of]]\ntest = '_delete'\nfails = '405.*DELETE'\nreason = 'nothing is deleted'\n")
    monkeypatch.setattr(conformance, "REASONS", reasons)
    found = conformance.judged("of", conformance.cases(report))
    assert [row["outcome"] for row in found] == ["passed", "skipped", "not applicable", "failed", "failed"]
    assert found[0]["name"] == "chat.test_completions.TestCompletions::test_create[strict]"
    assert found[2]["reason"] == "nothing is deleted" and "500" in found[3]["reason"]


def test_rules_are_whole() -> None:
    rules = tomllib.loads(conformance.REASONS.read_text())
    for name, of in rules.items():
        for rule in of:
            assert {*rule} == {"test", "reason"} | ({"fails"} if name != "llama-not-run" else set()), rule
            assert rule["reason"]
            re.compile(rule["test"])
            re.compile(rule.get("fails", ""))


def test_flags_of_another_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Any] = []
    monkeypatch.setenv("CONFORMANCE_BUNDLE", "a.bundle")
    monkeypatch.setenv("CONFORMANCE_THREADS", "2")
    monkeypatch.setattr(os, "execv", lambda program, given: told.extend(given))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    flags = "--port 81 --temp 0.8 --host 127.0.0.1,::1 --ctx-size 512 --parallel 2 --alias b,c --api-key s --no-slots"
    conformance.main(["--as-llama-server", *flags.split()])
    said = " ".join(told)
    for part in ("--model b=a.bundle", "--port 81", "--host 127.0.0.1 ", "--context 256", "--max-requests 2"):
        assert part in said
    (keys,) = tmp_path.glob("*.toml")
    assert str(keys) in said and "sha256:" in keys.read_text()


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_no_outcome_without_a_reason(file: Path) -> None:
    for name, suite in json.loads(file.read_text()).items():
        for row in suite["tests"] if isinstance(suite, dict) and "tests" in suite else ():
            assert row["outcome"] in ("passed", "skipped", "not applicable"), (name, row)
            assert row["outcome"] == "passed" or row["reason"], (name, row)
