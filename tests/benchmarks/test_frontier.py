"""The frontier's points: those on it and those beaten, the page, the chart, and weights off a grid."""

from __future__ import annotations

from typing import Any

import frontier as module
import numpy as np
import pytest


def point(name: str, ours: bool, bits: float, kl: float) -> dict[str, Any]:
    return {"name": name, "ours": ours, "bits": bits, "kl": {"package": kl, "python": kl / 2}, "speeds": [90.0, 100.0]}


WHERE = {"date": "2026-01-01", "machine": {"processor": "one", "threads": 2, "instruction_sets": ["avx2", "avx512f"]}}
MODEL: dict[str, Any] = {
    "model": "a.gguf",
    **WHERE,
    "points": [
        point("q4_k", True, 4.6, 0.05),
        point("worse", True, 4.7, 0.06),
        point("int8", True, 8.5, 0.002),
        point("Q2_K", False, 3.0, 0.9),
        point("Q4_K_M", False, 4.8, 0.1),
        point("Q8_0", False, 8.5, 0.001),
    ],
}
OTHER = {"model": "b.gguf", **WHERE, "points": [point("q4_k", True, 4.6, 0.05), point("Q4_K_M", False, 4.8, 0.1)]}
RESULT: dict[str, Any] = {
    "weights": "moved",
    "calibrated_on": "a book",
    "calibration_tokens": 64,
    "tokens": 512,
    "models": [MODEL, OTHER],
}


def test_a_point_on_the_frontier_has_none_below_it_with_fewer_bits() -> None:
    ours = [p for p in MODEL["points"] if p["ours"]]
    assert [p["name"] for p in module.frontier(ours, lambda p: p["bits"])] == ["q4_k", "int8"]


def test_each_of_their_types_meets_the_best_of_ours_that_is_no_larger() -> None:
    assert module.beaten(MODEL) == [
        ("Q2_K", None, None),
        ("Q4_K_M", "q4_k", pytest.approx(0.5)),
        ("Q8_0", "int8", pytest.approx(2.0)),
    ]


def test_the_page_says_where_theirs_is_below() -> None:
    page = module.page(RESULT)
    assert "| `Q4_K_M` | q4_k | 0.50 |" in page and "| `Q8_0` | int8 | 2.00 |" in page
    assert "Theirs is below ours at the size of Q8_0." in page
    assert "Nothing of ours is as small as Q2_K" in page
    assert "| ours | q4_k | 4.60 | 0.05 | 0.025 | 95 |" in page
    assert "one with AVX-512, 2 threads; 2026-01-01." in page
    assert "## a.gguf" in page and "## b.gguf" in page and page.count("Theirs is nowhere below ours.") == 1
    drawing = module.drawing(RESULT)
    assert drawing.count("<circle") == 2 * (len(MODEL["points"]) + 2) and drawing.rstrip().endswith("</svg>")
    unmeasured = {"model": "c.gguf", "points": [p | {"speeds": []} for p in MODEL["points"]]}
    assert module.drawing(RESULT | {"models": [unmeasured]}).count("<circle") == len(MODEL["points"]), "by bits alone"
    on_grid = module.page(RESULT | {"weights": "as in the file"})
    assert "nothing is compared" in on_grid and "below" not in on_grid and "ours over theirs" not in on_grid


@pytest.mark.parametrize("rows", [2, 5])
def test_weights_are_moved_by_half_a_step_at_most(rows: int) -> None:
    values = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    moved = module.moved("blk.0.attn_q.weight", values, None)
    blocks = values.reshape(-1, 32)
    steps = (blocks.max(1) - blocks.min(1)) / 15
    off = np.abs(moved - values).reshape(-1, 32).max(1)
    assert (off <= 0.5001 * steps).all() and (off > 0.3 * steps).all()
    assert np.array_equal(moved, module.moved("blk.0.attn_q.weight", values, None)), "the same each time"


def test_a_command_is_told_without_files() -> None:
    words = ["a/b.gguf", "c.gguf", "--moved", "--calibration", "d.txt", "--types", "Q4_K_M", "Q6_K", "--json", "e.json"]
    assert module.given(words) == ["--moved", "--types", "Q4_K_M", "Q6_K"]


def test_pages_are_a_text_to_calibrate_on() -> None:
    assert len(module.pages()) > 50_000
