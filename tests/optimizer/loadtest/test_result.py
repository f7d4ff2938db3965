from __future__ import annotations

import io
import json
import re
from array import array
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from enginewright.optimizer.loadtest.options import Goals, LoadOptions, RequestClass
from enginewright.optimizer.loadtest.plot import panels, svg, write_svg
from enginewright.optimizer.loadtest.result import LoadResult, Spread, met, result_of
from enginewright.optimizer.loadtest.run import Record, Run
from enginewright.optimizer.loadtest.text import print_load
from enginewright.optimizer.loadtest.workload import Workload


def record(due: float, ttft: float, tpot: float, tokens: int = 11, **given: Any) -> Record:
    first = due + ttft
    last = first + tpot * (tokens - 1)
    gaps = array("f", [tpot] * (tokens - 1))
    fields: dict[str, Any] = {"sent": due, "first": first, "last": last, "end": last, "tokens": tokens, "gaps": gaps}
    return Record(**({"conversation": 0, "turn": 0, "of_class": "", "due": due} | fields | given))


GOALS = Goals(ttft=0.5, tpot=0.05)
RECORDS = (
    record(0.0, 0.1, 0.02, prompt_tokens=10, cached_tokens=4),
    record(1.0, 0.6, 0.02, prompt_tokens=20, cached_tokens=0),  # late
    record(2.0, 0.2, 0.08),  # slow
    record(3.0, 0.3, 0.04),
    record(4.0, 0.1, 0.01, left=True),
    Record(0, 0, "", 5.0, 5.02, end=5.1, error="http 500", message="boom"),
)


def result(records: tuple[Record, ...] = RECORDS, goals: Goals = GOALS, **given: Any) -> LoadResult:
    options = LoadOptions("http://127.0.0.1", rate=1.0, classes=(RequestClass(goals=goals),))
    run = {"model": "m", "records": records, "seconds": 10.0, "cpu_seconds": 0.5, "counted": True, "interrupted": False}
    return result_of(Run(**(run | given)), options, Workload(options))


def test_goodput_is_of_those_that_met_all_goals() -> None:
    assert [met(one, GOALS) for one in RECORDS] == [True, False, False, True, False, False]
    good = result().figures.goodput
    assert good is not None
    assert (good.asked, good.met, good.share, good.per_second) == (5, 2, 0.4, 0.2)
    assert result(goals=Goals()).figures.goodput is None
    one_token = record(0.0, 0.1, 0.0, tokens=1)
    assert one_token.tpot is None and met(one_token, GOALS)
    assert not met(RECORDS[0], Goals(end_to_end=0.2)) and met(RECORDS[0], Goals(end_to_end=0.4))


def test_figures_are_those_of_the_records() -> None:
    of = result().figures
    assert (of.finished, of.left, of.failed, of.tokens) == (4, 1, 1, 55)
    assert (of.tokens_per_second, of.requests_per_second) == (5.5, 0.4)
    assert (of.prompt_tokens, of.cached_tokens) == (30, 4)
    assert of.errors == {"http 500": (1, "boom")}
    assert of.ttft is not None and of.ttft.count == 5 and of.ttft.p50 == pytest.approx(0.2)
    assert of.tpot is not None and of.tpot.count == 4 and of.tpot.largest == pytest.approx(0.08)
    assert of.end_to_end is not None and of.end_to_end.count == 4
    assert of.gap is not None and of.gap.count == 50


def test_a_spread_is_of_what_is_there() -> None:
    assert Spread.of([None]) is None
    spread = Spread.of([3.0, None, 1.0, 2.0])
    assert spread is not None
    assert (spread.count, spread.mean, spread.p50, spread.largest) == (3, 2.0, 2.0, 3.0)


def test_the_load_tool_says_what_it_took() -> None:
    tool = result().to_json()["load_tool"]
    assert tool["cpu_microseconds_per_token"] == pytest.approx(0.5 / 55 * 1e6)
    assert tool["cpu_share"] == 0.05
    assert tool["sent_late"]["largest"] == pytest.approx(0.02)
    notes = result(cpu_seconds=9.0, counted=False, interrupted=True).notes()
    assert [any(word in note for note in notes) for word in ("90%", "pieces", "late", "interrupted")] == [True] * 4
    assert result(records=RECORDS[:4]).notes() == []


def test_the_json_is_whole(tmp_path: Path) -> None:
    document = json.loads(json.dumps(result().to_json()))
    assert document["goodput"]["goals"] == {"ttft": 0.5, "tpot": 0.05, "end_to_end": None}
    assert document["errors"] == {"http 500": {"count": 1, "example": "boom"}}
    assert document["workload"]["rate"] == 1.0
    result().write_records(tmp_path / "records.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and lines[0]["ttft"] == pytest.approx(0.1) and lines[5]["error"] == "http 500"


def printed(found: LoadResult) -> str:
    console = Console(file=io.StringIO(), width=140)
    print_load(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_a_terminal_shows() -> None:
    text = printed(result())
    assert re.search(r"requests +4 finished, 1 left, 1 failed; 0.4 a second", text)
    assert re.search(r"goodput +0.2 requests a second: 40.0% within ttft 500 ms, tpot 50 ms", text)
    assert re.search(r"error +1 http 500: boom", text)
    assert re.search(r"first token +260 ms +200 ms", text)
    assert "1 requests a second (poisson), seed 0" in text
    assert "requests      0 finished" in printed(result(records=()))


def test_the_chart_needs_nothing_else(tmp_path: Path) -> None:
    write_svg(result(), tmp_path / "load.svg")
    root = ElementTree.parse(tmp_path / "load.svg").getroot()
    text = svg(result())
    assert root.tag.endswith("svg") and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert [panel.title for panel in panels(result())] == [
        "Requests that took no longer than",
        "Tokens a second",
        "Time to the first token",
    ]
    times, _, _ = panels(result())
    assert [one.label for one in times.series] == ["first token", "time per token", "end to end"]
    assert [len(one.limits) for one in times.series] == [2, 2, 0]
    for panel in panels(result()):
        for x, y in (point for one in panel.series for point in one.points):
            assert panel.left <= x <= panel.right and panel.top <= y <= panel.bottom
    assert panels(result(records=())) == [] and panels(result(goals=Goals()))[0].series[0].limits == ()


def test_a_model_s_name_can_t_command_a_terminal_or_break_a_chart() -> None:
    text = result(model="\x1b[2Jm<&>")
    assert "\x1b" not in printed(text)
    ElementTree.fromstring(svg(text))


def test_the_chart_s_tokens_are_all_there() -> None:
    (line,) = panels(result())[1].series
    shown = [float(title.rpartition(": ")[2].replace(",", "")) for title in line.titles]
    assert sum(shown) * 10.0 / 40 == pytest.approx(55, rel=0.01)  # titles are rounded
