from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from enginewright.optimizer.plan.options import PlanOptions
from enginewright.optimizer.plan.planner import plan
from enginewright.optimizer.plan.plot import panels, svg, write_svg
from enginewright.optimizer.plan.result import PlanResult
from enginewright.runtime.shared.errors import BundleError


@pytest.fixture(scope="module")
def found(tiny_bundle: Path) -> PlanResult:
    return plan(tiny_bundle, PlanOptions(devices=("h100", "l4"), tpot=0.02, batches=(1, 8)))


def test_two_charts_a_device_with_the_goal(found: PlanResult) -> None:
    drawn = panels(found)
    assert [p.title for p in drawn] == [
        "H100, time per token (predicted)",
        "H100, time to the first token (predicted)",
        "L4, time per token (predicted)",
        "L4, time to the first token (predicted)",
    ]
    for panel, goals in zip(drawn, (2, 0, 2, 0), strict=True):
        (series,) = panel.series
        assert series.label == "f32" and len(series.points) == 2 and len(series.limits) == goals
        assert len({y for _, y in series.limits}) <= 1  # a goal is the same for every batch
        for x, y in (*series.points, *series.limits):
            assert panel.left <= x <= panel.right and panel.top <= y <= panel.bottom


def test_the_picture(found: PlanResult, tiny_bundle: Path, tmp_path: Path) -> None:
    write_svg(found, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == svg(found)
    root = ElementTree.fromstring(svg(found))
    name = "{http://www.w3.org/2000/svg}"
    titles = [e.text or "" for e in root.iter(f"{name}title")]
    assert len(titles) == 8 and titles[0].startswith("f32, 1: ")
    assert "dashed: the goal" in svg(found)
    without = svg(plan(tiny_bundle, PlanOptions(devices=("h100",), batches=(1, 8))))
    ElementTree.fromstring(without)
    assert "dashed" not in without.partition("</style>")[2]
    with pytest.raises(BundleError):
        write_svg(found, tmp_path / "absent" / "a.svg")
