from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from enginewright.optimizer.report import bundle_report
from enginewright.optimizer.report.bundle_report import (
    calibration_lines,
    measured_lines,
    open_report,
    quantized_lines,
)
from enginewright.optimizer.report.document import ReportDocument
from enginewright.optimizer.shared.export_records import PassSummary
from enginewright.passes.framework.records import Metric, Rejection
from enginewright.passes.quantization import held_out
from enginewright.passes.quantization.apply_gptq import ApplyGptq
from enginewright.runtime.bundle.reader import Bundle


def test_what_the_lines_say(int8_bundle: Bundle, document: ReportDocument) -> None:
    report = open_report(int8_bundle.path)
    assert report.page_path == int8_bundle.path / "report/report.html"
    assert "i8" in report.size_line() and "bits a parameter" in report.size_line()
    assert [line.partition(":")[0] for line in report.speed_lines()][:2] == ["decode, 1 request", "decode, 8 requests"]
    time = report.time_line()
    assert time is not None and "capture" in time and "of memory at most" in time
    names = [entry.name for entry, _ in report.passes]
    assert "quantize_linears" in names and "normalize_complex" not in names
    assert quantized_lines(document) == ["100,000,000 quantized: 1 saturated, 2 groups of small ones became zero"]
    assert document.quantization is not None
    changed = document.model_copy(update={"quantization": replace(document.quantization, kept=5000)})
    assert quantized_lines(changed)[0].startswith("100,000,000 quantized: 5,000 the source's own integers, 1 saturated")
    first, second = calibration_lines(document)
    assert "999 tokens in 8 sequences, 1.0% of the vocabulary" in first
    assert second.startswith("warning: too little")
    assert "measured 2 times on 300 tokens" in measured_lines(document)[0]
    empty = ReportDocument()
    assert quantized_lines(empty) == calibration_lines(empty) == measured_lines(empty) == []


def test_the_arena_beside_what_is_alive_at_once(int8_bundle: Bundle) -> None:
    report = open_report(int8_bundle.path)
    program = int8_bundle.program("cpu")
    decode, prompt = report.to_json()["arena"]
    assert (decode["tokens"], prompt["tokens"]) == (1, min(512, int8_bundle.model.context_length))
    for size in (decode, prompt):
        assert size["arena_bytes"] == program.arena_bytes.evaluate(size["tokens"], 1, 1)
        assert 0 < size["live_bytes"] <= size["arena_bytes"]
    first, second = report.memory_lines()
    assert first.startswith("decode, 1 request: ") and second.startswith(f"prompt of {prompt['tokens']}: ")
    assert "for values, of which" in first and first.endswith("are alive at once")


@pytest.mark.parametrize("name", ["apply_gptq", "choose_integers"])  # what reports of version 0.1 say
def test_gptq_beside_the_nearest_integers(name: str, document: ReportDocument) -> None:
    """Both errors on held-out tokens, and how many weights kept the nearest; as the pass itself calls its metrics."""
    assert (
        held_out.HELD_OUT_ERROR,
        held_out.HELD_OUT_NEAREST,
        ApplyGptq.name,
    ) == (bundle_report.HELD_OUT_ERROR, bundle_report.HELD_OUT_NEAREST, bundle_report.APPLY_GPTQ)
    errors = {"a": (0.01, 0.03), "b": (0.02, 0.02)}
    figures = tuple(
        Metric(where=where, name=name, value=value)
        for where, values in errors.items()
        for name, value in zip((held_out.HELD_OUT_ERROR, held_out.HELD_OUT_NEAREST), values, strict=True)
    )
    reason = "rounded to the nearest, which is better on held-out tokens (a relative error of 0.02, with GPTQ 0.03)"
    rejected = (Rejection(node="b", where="b", reason=reason),)
    entry = PassSummary(name=name, matched=2, rejected=rejected, figures=figures)
    _, line, _ = calibration_lines(document.model_copy(update={"passes": (entry,)}))
    assert line.endswith(
        "on held-out tokens: 0.0150 and 0.0250 on average; 1 of 2 linears have nearest ones, which are better there"
    )


def test_a_prompt_shorter_than_those_of_bench_says_so(int8_bundle: Bundle, tmp_path: Path) -> None:
    path = Path(shutil.copytree(int8_bundle.path, tmp_path / "int8.bundle"))
    saved = json.loads((path / "report/report.json").read_text())
    prompt = saved["rooflines"][0]["shapes"][2]
    for tokens in (prompt["tokens"], 256):  # on a slow machine
        prompt |= {"name": f"prompt of {tokens}", "tokens": tokens, "seconds": 0.25}
        (path / "report/report.json").write_text(json.dumps(saved))
        line = open_report(path).speed_lines()[2]
        longest = min(512, int8_bundle.model.context_length)
        assert line.startswith(f"prompt of {tokens}: ")
        assert line.endswith("takes too long for an export") == (tokens < longest), line


def test_a_bundle_alone(int8_bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "a.bundle"
    shutil.copytree(int8_bundle.path, path, ignore=shutil.ignore_patterns("report"))
    report = open_report(path)
    assert report.page_path is None
    assert report.time_line() is None
    assert all("multiply-adds" in line for line in report.speed_lines())
    assert set(report.to_json()) == {"storage", "rooflines", "arena"}
    report.write_page(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == report.page()


def test_measured_again(int8_bundle: Bundle) -> None:
    (roofline,) = open_report(int8_bundle.path, again=True, threads=1).rooflines
    assert roofline.measured == "report"
    assert all(shape.seconds for shape in roofline.shapes)
