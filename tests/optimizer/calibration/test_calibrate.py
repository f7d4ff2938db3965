"""Exports that are calibrated: where the tokens come from, and what the report says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginewright.optimizer.calibration import calibrate
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection, CalibrationSection
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import ProgressEvent, silent


def gptq(tokens: int = 512) -> Recipe:
    """The built-in recipe for a random model, which is far more sensitive than one that has learned something."""
    section = CalibrationSection(tokens=tokens, sequence_length=64)
    return load_recipe("int4-gptq").model_copy(update={"calibration": section, "budget": BudgetSection(max_kl=3.0)})


def test_an_export_with_a_text(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river rose over its banks. " * 40, encoding="utf-8")
    events: list[ProgressEvent] = []
    report = export(
        tiny_folder, tmp_path / "b", recipe=gptq(), calibration=text, max_memory="32GiB", progress=events.append
    )
    assert report.calibration is not None
    assert report.calibration.origin == "text.txt"
    coverage = report.calibration.coverage
    assert (coverage.sequences, coverage.tokens) == (8, 512)
    assert len(coverage.ranges) == 8
    assert all(r.largest > 0 for r in coverage.ranges)
    assert any("fewer than 2,048" in w for w in coverage.warnings)
    assert {"calibration", "layers"} <= {event.stage for event in events}
    written = json.loads((tmp_path / "b" / "report" / "report.json").read_text())
    assert written["calibration"]["origin"] == "text.txt"
    assert written["memory"]["limit"] == 32 << 30
    assert written["memory"]["kept"]
    assert not (tmp_path / "b" / "scratch").exists()
    with LLM(tmp_path / "b") as llm:
        assert llm.generate("a")


def test_an_export_that_samples_is_the_same_each_time(tiny_folder: Path, tmp_path: Path) -> None:
    first, second = (export(tiny_folder, tmp_path / n, recipe=gptq(256)) for n in ("a", "b"))
    assert first.calibration is not None
    assert first.calibration.origin == "sampled from the model, seed 0"
    assert first.calibration == second.calibration
    manifests = [json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("a", "b")]
    files = [[f for f in m["files"] if not str(f).startswith("report/")] for m in manifests]
    assert files[0] == files[1]


def test_a_bad_text_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"\0" * 100)
    with pytest.raises(RequestError, match=r"text\.txt is binary"):
        export(tiny_folder, tmp_path / "b", calibration=text)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_a_sampled_sequence_is_no_longer_than_the_context(tiny_folder: Path) -> None:
    info = ModelInfo("tiny", "LlamaForCausalLM", vocab_size=259, context_length=40, bos_token_id=1)
    section = CalibrationSection(tokens=128, sequence_length=64)
    calibration = calibrate(tiny_folder, info, section, file=None, tokenizer=None, progress=silent)
    assert [len(s) for s in calibration.sequences] == [40] * 4
