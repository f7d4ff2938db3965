"""The table of all engines: what is exported and measured is what the targets have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import pytest

from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.runtime.executors.open import TARGETS


def test_rows_are_of_targets_that_run_here_and_recipes_load(tmp_path: Path) -> None:
    assert {target for _, _, target, _ in engines.ROWS} == set(engines.TARGETS) <= set(TARGETS)
    for text in (engines.RECIPE, engines.RECIPE + engines.OURS):
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        assert load_recipe(str(path)).weights.default.storage == "f32"


def test_the_best_round_counts_and_the_page_has_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def one(*_: Any) -> dict[str, float]:
        n = next(calls) + 1.0
        return {**dict.fromkeys(engines.FIGURES, 200 + n), "start": 1 / n, "peak": 2**20 * n}

    monkeypatch.setattr(engines, "of_target", one)
    monkeypatch.setattr(engines, "eager", one)

    class Options:
        rounds = 2

    rows = engines.measured(Options())  # type: ignore[arg-type]
    assert list(rows) == [*(row[0] for row in engines.ROWS), engines.EAGER]
    assert rows["cpu"]["prefill"] == 200 + 18 and rows["cpu"]["peak"] == 2**20  # last of the second round, first of all
    export = {"seconds": 61.2, "peak_bytes": 2**30, "bytes": 2**31}
    figures = {"rows": rows, "packages": {"tvm": 2**21}, "exports": {"all": export}}
    text = engines.page(figures | {"machine": {"processor": "one"}, "rounds": 2, "threads": 2})
    assert "| cpu | 218 | 218 | 218 | 218 | 0.06 | 1 |" in text
    assert "| all | 61 | 1,024 | 2,048 |" in text and "tvm 2 MiB" in text
