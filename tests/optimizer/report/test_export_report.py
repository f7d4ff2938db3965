from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginewright.optimizer.report import export_report
from enginewright.optimizer.report.export_report import report_files, storage_and_speed
from enginewright.optimizer.report.roofline import Roofline, predict
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.progress import ProgressEvent, silent


def test_a_bundle_is_measured(tiny_bundle: Path) -> None:
    events: list[ProgressEvent] = []
    storage, (roofline,) = storage_and_speed(tiny_bundle, ["cpu"], 3.0, events.append)
    assert sum(part.nbytes for part in storage) == sum(t.bytes for t in Bundle.open(tiny_bundle).index.tensors.values())
    assert roofline.measured == "export"
    assert all(shape.runs > 0 for shape in roofline.shapes)
    assert {event.stage for event in events} == {"roofline"}


@pytest.mark.parametrize("memory_budget", [0, 100 << 20])
def test_where_there_is_no_room_it_is_predicted(memory_budget: int, tiny_bundle: Path) -> None:
    _, rooflines = storage_and_speed(tiny_bundle, ["cpu"], 3.0, silent, memory_budget)
    assert rooflines == [predict(Bundle.open(tiny_bundle))]


def test_an_export_does_not_fail_for_want_of_memory_to_measure(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> Roofline:
        raise CapacityError("no memory for the KV caches")

    monkeypatch.setattr(export_report, "measure", refuse)
    _, (roofline,) = storage_and_speed(tiny_bundle, ["cpu"], 3.0, silent)
    assert roofline.measured is None


def test_the_files(tiny_bundle: Path) -> None:
    report = {"seconds": 3.0, "passes": [{"name": "<b>fuse</b>", "matched": 2}]}
    files = report_files(tiny_bundle, report, [])
    assert set(files) == {"report/report.json", "report/diffs.json", "report/report.html"}
    written = json.loads(files["report/report.json"])
    assert all(0 < size["live_bytes"] <= size["arena_bytes"] for size in written.pop("arena"))
    assert written == report
    assert json.loads(files["report/diffs.json"]) == []
    assert "&lt;b&gt;fuse&lt;/b&gt;" in files["report/report.html"].replace("<wbr>", "")
