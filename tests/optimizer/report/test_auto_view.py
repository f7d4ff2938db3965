from __future__ import annotations

import pytest

from enginewright.optimizer.report.auto_view import auto_view
from enginewright.optimizer.report.charts import NARROW, WIDE
from enginewright.optimizer.search.report import AutoReport, FormatOption, ParetoPoint, UnitChoice


def entry(points: int, layers: int) -> AutoReport:
    curve = [ParetoPoint(bytes=1000 + 100 * i, predicted_kl=10.0 ** -(i + 1)) for i in range(points)]
    options = tuple(FormatOption(format=f, bytes=b, predicted_kl=k) for f, b, k in (("f32", 4, 0.0), ("int4", 1, 0.1)))
    units = [
        UnitChoice(where=f"m.layers.{i}.{kind}", format="int4" if i else "f32", options=options)
        for i in range(layers)
        for kind in ("mlp", "attn.q + m.layers.0.attn.k")
    ]
    return AutoReport(
        max_kl=0.02,
        max_bytes=None,
        tokens=512,
        together="one by one",
        chosen=ParetoPoint(bytes=1100, predicted_kl=0.01, measured_kl=0.015),
        curve=tuple(curve),
        single={"int4": ParetoPoint(bytes=900, predicted_kl=0.2), "f32": ParetoPoint(bytes=4000, predicted_kl=0.0)},
        units=(*units, UnitChoice(where="lm_head", format="int4", options=())),
        measured_kl={},
        tried=(),
        seconds=3.0,
    )


@pytest.mark.parametrize(("points", "layers"), [(1, 1), (6, 12)])
def test_the_search_as_it_is_shown(points: int, layers: int) -> None:
    view = auto_view(entry(points, layers))
    assert [chart.size for chart in view.charts] == [WIDE, NARROW]
    for chart in view.charts:
        assert len(chart.line.split()) == points
        places = [tuple(map(float, pair.split(","))) for pair in chart.line.split()]
        assert [x for x, _ in places] == sorted(x for x, _ in places)
        assert [m.label for m in chart.marks] == ["int4", "f32", "chosen"]
        assert all(0 <= m.x <= chart.size.width and 0 <= m.y <= chart.size.height for m in chart.marks)
        assert [m.chosen for m in chart.marks] == [False, False, True]
        assert "measured" in chart.marks[2].title
        assert "predicted" in chart.marks[0].title
        assert chart.budget is not None
    assert view.formats.layers == tuple(range(layers))
    assert dict(view.formats.formats) == {"f32": 2, "int4": 2 * layers - 1} if layers > 1 else True
    assert [kind for kind, _ in view.formats.rows] == ["mlp", "attn.q + attn.k"]
    assert view.formats.elsewhere == (("lm_head", "int4"),)
    assert [f.name for f in view.sensitivities] == ["KL if this alone is int4"]  # what costs nothing is left out


def test_without_a_curve_there_is_no_chart() -> None:
    assert auto_view(entry(0, 1)).charts == ()
