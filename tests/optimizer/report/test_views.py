from __future__ import annotations

import pytest

from enginewright.optimizer.report.diffs import ProgramDiff
from enginewright.optimizer.report.views import COLUMN_HEIGHT, figure_views, pass_views, storage_view
from enginewright.optimizer.shared.export_records import PassSummary
from enginewright.optimizer.shared.storage import StoredBytes
from enginewright.passes.framework.records import Metric, Rejection


def test_passes_have_their_own_diffs_and_reasons_by_how_often_they_hold() -> None:
    rejected = [Rejection(node=f"n{i}", where=f"m.{i}", reason="rare" if i == 7 else "often") for i in range(20)]
    entries = [PassSummary(name="a", matched=1), PassSummary(name="a", matched=0, rejected=tuple(rejected))]
    diff = ProgramDiff(0, "a", 1, 1, ())
    first, second = pass_views(entries, [diff])
    assert (first.number, first.diff, first.acted, first.reasons) == (1, diff, True, ())
    assert (second.number, second.diff, second.acted) == (2, None, True)
    assert [(r.text, r.count) for r in second.reasons] == [("often", 19), ("rare", 1)]
    assert second.reasons[1].places == ("m.7 (n7)",)
    assert len(second.reasons[0].places) == 12
    assert not pass_views([PassSummary(name="idle", matched=0)], [])[0].acted


@pytest.mark.parametrize("layers", [2, 30])
def test_figures_as_a_map_of_layers(layers: int) -> None:
    figures = [
        Metric(where=f"m.layers.{i}.{kind}", name="error", value=scale * (i + 1))
        for i in range(layers)
        for kind, scale in (("q", 1.0), ("down", 2.0))
        if (i, kind) != (1, "q")
    ]
    outside = Metric(where="lm_head", name="error", value=0.5)
    entry = PassSummary(name="gptq", matched=1, figures=(*figures, outside))
    (view,) = figure_views([PassSummary(name="other", matched=1), entry])
    assert (view.source, view.name, view.layers) == ("gptq", "error", tuple(range(layers)))
    assert [kind for kind, _ in view.rows] == ["down", "q"]
    assert dict(view.rows)["q"][1] is None
    worst = dict(view.rows)["down"][layers - 1]
    assert worst is not None
    assert (worst.value, worst.shade, view.high) == (2.0 * layers, 1.0, 2.0 * layers)
    assert view.elsewhere == (outside,)
    assert view.worst[0].where == f"m.layers.{layers - 1}.down"
    assert len(view.worst) <= 10


def test_bytes_by_kind_type_and_layer() -> None:
    parts = [StoredBytes(None, "lm_head", "f32", 600)]
    parts += [StoredBytes(i, "mlp", "i8", 100 * (i + 1)) for i in range(3)]
    parts += [StoredBytes(i, f"kind {k}", "f16", 1) for i in range(3) for k in range(20)]
    view = storage_view(parts)
    assert view is not None
    assert view.total == 600 + 600 + 60
    for drawn in view.maps:
        assert sum(tile.nbytes for tile in drawn.tiles) == view.total
        assert sum(tile.share for tile in drawn.tiles) == pytest.approx(1)
        assert [tile.kind for tile in drawn.tiles[:2]] == ["lm_head", "mlp"]
        assert drawn.tiles[-1].kind == "13 more"
        assert all(x + w <= drawn.size.width + 0.1 for x, _, w, _ in (tile.box for tile in drawn.tiles))
    assert view.dtypes == (("f32", 600), ("i8", 600), ("f16", 60))
    assert [layer for layer, _ in view.columns] == [0, 1, 2]
    heights = [sum(piece.height for piece in pieces) for _, pieces in view.columns]
    assert heights[2] == pytest.approx(COLUMN_HEIGHT, abs=0.1)
    assert heights[0] == pytest.approx(COLUMN_HEIGHT * 120 / 320, abs=0.1)
    assert len(view.rows) == 22
    assert storage_view([]) is None
