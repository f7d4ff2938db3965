"""The comparison of plans with benchmarks: its arithmetic, and that the page has what was committed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import plan_error
import pytest
from plan_error import Cell, compare, median_error, table

REPOSITORY = Path(__file__).resolve().parents[2]
(RESULT,) = (REPOSITORY / "benchmarks" / "results").glob("plan-*.json")


def test_rounds_are_compared_by_their_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [("decode", 4, 64), ("prompt", 1, 128)]
    predictions, measurements = iter([1.0, 9.0, 2.0]), iter([2.0, 3.0, 4.0])
    monkeypatch.setattr(plan_error, "predict", lambda *args: dict.fromkeys(sizes, next(predictions)))
    monkeypatch.setattr(plan_error, "run", lambda *args: dict.fromkeys(sizes, next(measurements)))
    bundle = SimpleNamespace(manifest=SimpleNamespace(recipe={"name": "int8"}))
    cells, seconds = compare([bundle], 3)  # type: ignore[list-item]
    assert seconds >= 0
    assert cells == [
        Cell("int8", "decode", 4, 64, [1.0, 9.0, 2.0], [2.0, 3.0, 4.0]),
        Cell("int8", "prompt", 1, 128, [1.0, 9.0, 2.0], [2.0, 3.0, 4.0]),
    ]
    assert cells[0].error == pytest.approx(2 / 3 - 1)
    assert median_error(cells, "decode") == pytest.approx(1 / 3)
    assert table(cells)[2] == "| `int8` | 4 requests at 64 tokens | 2000.00 ms | 3000.00 ms | −33.3 % |"


def test_the_page_has_what_was_measured() -> None:
    facts = json.loads(RESULT.read_text())
    cells = [Cell(**{k: v for k, v in cell.items() if k != "error"}) for cell in facts["cells"]]
    page = (REPOSITORY / "benchmarks" / "notes" / "cpu.md").read_text(encoding="utf-8")
    inside = page.partition("<!-- table: benchmarks/plan_error.py -->")[2].partition("<!-- end of table -->")[0]
    assert "\n".join(table(cells)) in inside
    for what in ("decode", "prompt"):
        assert facts["median_error"][what] == pytest.approx(median_error(cells, what), abs=1e-4)
        assert f"{facts['median_error'][what]:.1%}".replace("%", " %") in inside
    assert {(c.recipe, c.batch, c.tokens) for c in cells if c.what == "decode"} == {
        (recipe, batch, context) for recipe in ("f32", "int8") for batch in (1, 4, 16) for context in (64, 512, 2048)
    }


def test_no_context_or_prompt_of_the_grid_is_timed() -> None:
    from enginewright.plugins.cpu.compile.plan import Grid

    grid = Grid.within(8192)
    decodes = [s for s in grid.sizes if set(s.lengths) == {1}]
    first, last = 1, 1 + plan_error.WARM_UP + plan_error.STEPS
    for context in plan_error.CONTEXTS:
        assert not {c for sizes in decodes for c in sizes.contexts} & set(range(context + first, context + last))
    assert not {n for sizes in grid.sizes for n in sizes.lengths} & set(plan_error.PROMPTS)
    assert {len(sizes.lengths) for sizes in decodes} & set(plan_error.BATCHES) == {1}
