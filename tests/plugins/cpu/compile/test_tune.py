from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from enginewright.plugins.cpu.compile import tune as module
from enginewright.plugins.cpu.compile.row_seconds import row_seconds
from enginewright.plugins.cpu.compile.tune import CANDIDATES, Contender, fewer_threads, tune
from enginewright.plugins.cpu.serve.tuning import load_tuning
from enginewright.plugins.native.executable import TUNABLES
from enginewright.plugins.steps.timed_steps import Case, cases_of, compare, mean, worth
from enginewright.runtime.bundle.reader import Bundle, tuning_path
from enginewright.runtime.shared.contracts import DRAFT_ROWS
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import ProgressEvent


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    return Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "own.bundle"))


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, dict[str, Any]]]:
    """The calls that measure steps of several rows; they take no time here."""
    calls: list[tuple[float, dict[str, Any]]] = []

    def measured(bundle: Bundle, contexts: Sequence[int], seconds: float, **given: Any) -> dict[int, tuple[float, ...]]:
        calls.append((seconds, given))
        return dict.fromkeys(contexts, (1.0,) * 16)

    monkeypatch.setattr(module, "row_seconds", measured)
    return calls


def pretend(monkeypatch: pytest.MonkeyPatch, gain: float, name: str = "task_rows", value: int = 48) -> None:
    """Makes one choice so much faster than all others."""

    def speed(c: Contender) -> float:
        return gain if c.choices.get(name) == value else 1.0

    def compared(one: Contender, other: Contender, cases: Sequence[Case], rounds: int) -> dict[str, float]:
        return {case.name: speed(other) / speed(one) for case in cases}

    monkeypatch.setattr(module, "compare", compared)


class Clock:
    """Stands for the module ``time`` and for contenders whose opening and steps take fixed times."""

    def __init__(self, opening: float, step: float) -> None:
        self.now, self.opening, self.step = 100.0, opening, step
        self.opened = 0

    def perf_counter(self) -> float:
        return self.now

    def contender(self, bundle: Bundle, cases: Sequence[Case], threads: int, choices: Mapping[str, int]) -> Any:
        clock = self
        clock.now += clock.opening
        clock.opened += 1

        class Timed:
            isa, repeats = "avx2", [1] * len(cases)

            def __init__(self) -> None:
                self.threads, self.choices = threads, dict(choices)

            def time(self, case: int) -> float:
                clock.now += clock.step
                return clock.step / (1.2 if self.choices.get("task_rows") == 48 else 1.0)

        return Timed()


@pytest.mark.parametrize(
    ("opening", "step", "seconds", "tried"),
    [(0.3, 0.25, 1.0, 0), (0.3, 0.25, 40.0, 2), (0.01, 0.001, 1.0, 12), (0.3, 0.25, 600.0, 12)],
)
def test_the_time_is_kept_to(
    opening: float, step: float, seconds: float, tried: int, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limits the choices that are tried; without time for any, nothing is written."""
    clock = Clock(opening, step)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "Contender", clock.contender)
    result = tune(bundle, seconds=seconds, threads=1)
    opening_seconds = opening + step * len(
        cases_of(bundle.model.context_length)
    )  # opened and timed once, whatever the time
    assert result.seconds <= max(seconds, opening_seconds) + 1e-9
    assert result.seconds == pytest.approx(clock.now - 100)
    assert (len(result.tried), result.candidates) == (tried, 12)
    assert result.written == tuning_path(bundle).exists() == (tried > 0)
    assert ({t.name for t in result.tried if t.kept} == {"task_rows"}) == (tried > 4)


def test_what_the_last_comparison_does_not_confirm_is_not_called_kept(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(one: Contender, other: Contender, cases: Sequence[Case], rounds: int) -> dict[str, float]:
        first = other.choices == {"task_rows": 48} and rounds == 3
        return {case.name: 1.2 if first else 1.0 for case in cases}

    monkeypatch.setattr(module, "compare", compared)
    monkeypatch.setattr(module, "_FEWEST", 3)
    monkeypatch.setattr(module, "_MOST", 3)
    result = tune(bundle, seconds=60, threads=1)
    assert [t.value for t in result.tried if t.faster] == [48]
    assert [t for t in result.tried if t.kept] == [] and result.file.choices == {}


def test_a_faster_choice_is_kept_and_found_again(
    bundle: Bundle, rows: list[tuple[float, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 1.2)
    events: list[ProgressEvent] = []
    result = tune(bundle, seconds=60, threads=1, progress=events.append)
    assert result.written and result.path == tuning_path(bundle)
    assert result.file.choices == {"task_rows": 48}
    assert result.gain == pytest.approx(1.2)
    ((seconds, options),) = rows
    assert 12 <= seconds < 60 and options["choices"] == {"task_rows": 48}
    assert set(result.file.row_seconds) == {64, 512}  # as long as the context
    assert [(t.name, t.value) for t in result.tried if t.kept] == [("task_rows", 48)]
    assert [(t.name, t.value) for t in result.tried] == [(n, v) for n, vs in CANDIDATES.items() for v in vs]
    assert load_tuning(bundle, result.file.isa) == (result.file, "own.bundle.tune.json is used")
    assert events[-1].done == events[-1].total == len(result.tried) + 2
    assert [e.done for e in events] == list(range(len(events)))
    assert json.loads(json.dumps(result.to_json()))["file"]["choices"] == {"task_rows": 48}


@pytest.mark.parametrize("gain", [1.0, 1.02, 0.5])
def test_where_nothing_is_faster_the_file_says_so(gain: float, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gain)
    result = tune(bundle, seconds=60, threads=1)
    assert result.file.choices == {} and result.file.threads == 0 and result.file.gains == {}
    assert json.loads(tuning_path(bundle).read_text())["choices"] == {}


def test_a_dry_run_writes_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1.2)
    result = tune(bundle, seconds=60, threads=1, write=False)
    assert result.file.choices == {"task_rows": 48} and not result.written
    assert [p.name for p in bundle.path.parent.iterdir()] == ["own.bundle"]


def test_measured_for_real(bundle: Bundle) -> None:
    cases = cases_of(bundle.model.context_length)
    assert [case.name for case in cases] == [
        "decode, 1 request at 128",
        "decode, 8 requests at 128",
        "prompt of 128",
        "decode, 1 request at 512",
    ]
    one, other = (Contender(bundle, cases, 1, choices) for choices in ({}, {"task_rows": 16}))
    gains = compare(one, other, cases, 2)
    assert set(gains) == {case.name for case in cases}
    assert all(gain > 0 for gain in gains.values())


def test_a_short_context() -> None:
    assert [case.name for case in cases_of(100)][-1] == "prompt of 100"


def test_what_is_worth_keeping() -> None:
    assert worth([1.04, 1.04]) and worth([1.1, 0.98])
    assert not worth([1.02, 1.02])
    assert not worth([1.5, 0.9])  # one of them loses
    assert mean([2.0, 0.5]) == pytest.approx(1)
    assert (fewer_threads(1), fewer_threads(2), fewer_threads(8)) == ([], [1], [4])


def test_the_candidates_are_tunables() -> None:
    assert set(CANDIDATES) == set(TUNABLES)
    assert all(0 < value <= TUNABLES[name] for name, values in CANDIDATES.items() for value in values)


@pytest.mark.parametrize("seconds", [0, -1, 1e9, float("nan")])
def test_seconds_out_of_range(seconds: float, bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="seconds"):
        tune(bundle, seconds=seconds)
    with pytest.raises(RequestError, match="records: target cpu keeps none"):
        tune(bundle, records=bundle.path / "records.json")


def test_steps_of_several_rows_are_measured(bundle: Bundle) -> None:
    rows_measured = row_seconds(bundle, (20, 40), 30, others=1, threads=1)
    assert set(rows_measured) == {20, 40}
    assert all(len(of) == DRAFT_ROWS and min(of) > 0 for of in rows_measured.values())
    assert row_seconds(bundle, (20,), 1e-6, threads=1) == {}  # no time
