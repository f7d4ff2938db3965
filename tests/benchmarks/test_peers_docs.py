from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from peers import docs
from peers.chart import chart
from peers.summary import summarize
from peers.tables import engine_table, goal_table, whole
from peers.workload import Report

from tests.benchmarks.peers_results import measured

BEGIN, END = docs.marks("AVX2")
OTHERS = "\n".join(docs.marks("AVX-512"))


@pytest.fixture
def result() -> dict[str, Any]:
    ours = measured(
        "enginewright",
        {"prefill": 2000, "decode_1": 30.25, "decode_far": 15, "start": 0.5, "kl": 0.01},
        peak=200_000_000,
    )
    theirs = measured("llama.cpp", {"prefill": 1000, "decode_1": 60.5, "start": 1.5}, peak=400_000_000)
    roof = Report(
        "",
        figures={
            "bandwidth": 40,
            "bandwidth_of_weights": 45,
            "peak": 1000,
            "matmul": 600,
            "matmul_share_of_prefill": 0.7,
        },
        bytes={"read": 10**9, "decode_far": 2 * 10**9},
    )
    summary = summarize([ours, theirs], {("smollm2", "int8"): [roof]}, {"smollm2.int8.decode_1": "memory is slow"})
    machine = {"processor": "A CPU", "instruction_sets": ["avx2"], "caches": {"L3": "32768K"}, "memory_gib": 8}
    return {
        "machine": machine | {"system": "Linux"},
        "measured": {"date": "2026-01-01", "commit": "abc", "rounds": 3, "seconds": 600, "whole": True},
        "workload": {"threads": 2},
        "missing": [{"engine": "openvino", "model": "smollm2", "format": "int8", "reason": "no wheel"}],
        **summary,
    }


def test_tables_have_figures_ratios_and_what_is_missing(result: dict[str, Any]) -> None:
    table = result["models"]["smollm2"]["formats"]["int8"]
    head, _, ours, theirs = engine_table(table)
    assert "decode, 8" not in head  # nobody has it
    assert [cell.strip() for cell in ours.split("|")][2:-1] == ["2,000", "30.2", "15.0", "0.50", "200", "0.0100"]
    cells = [cell.strip() for cell in theirs.split("|")][2:-1]
    assert cells == ["1,000 (2.00x)", "60.5 (0.50x)", "", "1.50 (3.00x)", "400 (2.00x)", ""]
    text = "\n".join(whole(result))
    assert "- OpenVINO GenAI, smollm2, int8: no wheel" in text
    assert "67% of the 45.0 GB/s" in text and "60% of 1,000 G" in text
    assert "Behind 16,384 tokens a step moves weights and cache at 75% of the 40.0 GB/s" in text
    assert "3 rounds in 10 minutes." in text
    result["measured"]["whole"] = False
    assert "3 rounds in 10 minutes, stopped in the last: " in "\n".join(whole(result))


def test_goals_say_whether_they_are_met_and_why_not(result: dict[str, Any]) -> None:
    lines = goal_table(result["goals"], {"smollm2": "SmolLM2"})
    decode = next(line for line in lines if "decode, 1 request" in line and "1.50x" in line)
    assert decode.split(" | ")[3:] == ["1.50x", "0.50x", "llama.cpp", "no (KL not compared)", "memory is slow |"]
    assert any("prefill 512" in line and "| yes (KL not compared) |" in line for line in lines)
    assert any("decode, 16" in line and "not measured" in line for line in lines)
    assert any("at most 1.10x" in line for line in lines)


def test_the_chart_has_a_bar_for_each_ratio(result: dict[str, Any]) -> None:
    root = ElementTree.fromstring(chart(result))
    bars = [e for e in root.iter() if e.tag.endswith("rect")]
    assert len(bars) == len(result["models"]["smollm2"]["formats"]["int8"]["best"]) == 4
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[0] == pytest.approx(4 * widths[1], abs=0.2)  # 2.00x and 0.50x
    assert len({bar.attrib["fill"] for bar in bars}) == 2


def test_documents_change_between_their_marks_alone(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "benchmarks/notes").mkdir(parents=True)
    for name in ("benchmarks/notes/benchmark.md", "README.md"):
        (tmp_path / name).write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n{OTHERS}")
    for _ in range(2):
        docs.update(result, "benchmarks/results/r.json", tmp_path)
        for name, link in (("benchmarks/notes/benchmark.md", "(../../benchmarks/"), ("README.md", "(benchmarks/")):
            text = (tmp_path / name).read_text()
            assert text.startswith("before\n") and text.endswith(f"after\n{OTHERS}") and "old" not in text
            assert text.count("| --- |") >= 1 and link in text
    assert (tmp_path / "benchmarks/notes/benchmark-avx2.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("text", ["nothing", f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}", OTHERS])
def test_a_document_without_a_place_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md has no lines"):
        docs.put(path, "AVX2", ["x"])
    assert path.read_text() == text
