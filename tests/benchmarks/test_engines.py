"""The table of all engines: what it exports and measures is what there is, and a run goes on where it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engines
import pytest

from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.runtime.executors.open import TARGETS


def test_rows_are_of_targets_that_run_here_and_recipes_load(tmp_path: Path) -> None:
    assert {target for _, targets in engines.EXPORTS.values() for target in targets} == set(TARGETS) - {
        "torch-tensorrt"
    }
    assert {row.bundle for row in engines.ROWS} == set(engines.EXPORTS) - {*engines.NOT_MEASURED, "all"}
    for more, _ in engines.EXPORTS.values():
        path = tmp_path / "recipe.toml"
        path.write_text(engines.RECIPE + more)
        assert load_recipe(str(path)).weights.default.storage == "f32"


def test_a_run_goes_on_and_the_page_has_every_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(1, 100))
    measured: list[str] = []

    def one(*_: Any) -> dict[str, float]:
        n = float(next(calls))
        return {**dict.fromkeys(engines.FIGURES, 200 + n), "start": 1 / n, "peak": 2**20 * n}

    def export(options: Any, name: str) -> dict[str, float]:
        measured.append(name)
        return {"seconds": 61.2, "peak": 2**30, "bytes": 2**31, "weights": 2**29}

    monkeypatch.setattr(engines, "of_target", one)
    monkeypatch.setattr(engines, "of_torch", one)
    monkeypatch.setattr(engines, "exported", export)
    monkeypatch.setattr(engines, "compiled_ahead", lambda options: export(options, engines.AHEAD))
    figures, text = tmp_path / "figures.json", tmp_path / "page.md"
    arguments = ["model.gguf", str(tmp_path), "--json", str(figures), "--page", str(text), "--threads", "2"]
    engines.main([*arguments, "--minutes", "1e-9"])
    assert "next is ('cpu', -1): run it again" in capsys.readouterr().err and not measured
    names = [*(row.name for row in engines.ROWS), engines.AHEAD, engines.EAGER]
    figures.write_text(json.dumps({"exports": {}, "measured": [{"cpu": {**one(), "peak": 2**20}}]}))
    engines.main(arguments)
    assert measured == [*engines.EXPORTS, engines.AHEAD]
    results = json.loads(figures.read_text())
    assert [set(of_round) for of_round in results["measured"]] == [set(names), set(names)]
    assert list(results["rows"]) == names
    last = 2 * len(names)  # of the second round, which begins with the second row
    assert results["rows"]["cpu"] == pytest.approx(
        {**dict.fromkeys(engines.FIGURES, 200 + last), "start": 1 / last, "peak": 2**20}
    )
    written = text.read_text()
    assert f"| cpu | {200 + last} | {200 + last} | {200 + last} | {200 + last} | {1 / last:.2f} | 1 |" in written
    assert "| all | 61 | 1,024 | 2,048 | 512 |  |" in written
    assert "| cuda | needs a GPU: [an H100's figures](" in written
    engines.main(arguments)  # nothing is left to measure
    assert json.loads(figures.read_text()) == results
