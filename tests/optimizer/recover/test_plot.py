"""The page of a recovery's loss: one file, its figures, a point for each step within the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from enginewright.optimizer.recover.options import Measured, RecoveryReport
from enginewright.optimizer.recover.plot import loss_page


def report(losses: list[float], kls: list[float], recipe: str = "int4") -> RecoveryReport:
    every = max(1, len(losses) // max(len(kls) - 1, 1))
    measured = [Measured(i * every, kl, 20 + kl, 20.0) for i, kl in enumerate(kls)]
    return RecoveryReport("x.recovered", recipe, "a text", len(losses), 10, 5000, 250, losses, measured, 1.0, 2.0, 3)


def points(page: str, kind: str) -> list[tuple[float, float]]:
    (svg,) = re.findall(r"<svg.*?</svg>", page, re.S)
    (line,) = (e for e in ET.fromstring(svg) if e.get("class") == kind)
    return [(float(p.split(",")[0]), float(p.split(",")[1])) for p in str(line.get("points")).split()]


@pytest.mark.parametrize(("losses", "kls"), [([1.0, 0.5, 0.2, 0.1], [1.2, 0.3]), ([2.0] * 40, [2.0, 1.0, 0.5])])
def test_every_step_has_its_place(losses: list[float], kls: list[float]) -> None:
    page = loss_page(report(losses, kls))
    training, held = points(page, "training"), points(page, "held")
    assert (len(training), len(held)) == (len(losses), len(kls))
    assert all(0 <= x <= 900 and 0 <= y <= 400 for x, y in training + held)
    assert [x for x, _ in training] == sorted(x for x, _ in training)
    assert all(a[1] < b[1] for a, b in pairwise(held))  # less is lower in the picture
    assert f"went from {kls[0]:.4g} to {kls[-1]:.4g} nats" in page
    assert page.count("<tr><td>") == len(kls)


def test_a_loss_of_nothing_is_drawn_at_the_end_of_the_axis() -> None:
    (_, one), (_, nothing) = points(loss_page(report([1.0, 0.0], [1.0, 0.0])), "training")
    assert one < nothing <= 380


def test_nothing_is_fetched_and_names_are_no_markup() -> None:
    page = loss_page(report([1.0], [1.0, 0.5], recipe="<b>mine</b>"))
    assert "&lt;b&gt;mine&lt;/b&gt;" in page and "<b>mine" not in page
    assert not re.search(r"https?://|src=|<script", page)
