"""A terminal gets one bar, which is gone when the work is done; a log gets a line when something has changed."""

from __future__ import annotations

import io
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from enginewright.optimizer.cli import progress
from enginewright.optimizer.cli.progress import stage_bars
from enginewright.runtime.shared.progress import ProgressEvent
from tests.waiting import wait_until

FOLDER = "model[1]/[bold]"
"""Characters that a terminal's markup would swallow."""


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Ticks:
    """Stands in place of the event that ends a log: the writer looks so many times, then never again."""

    def __init__(self, stop_after: int) -> None:
        self.left, self.over, self.ended = stop_after, threading.Event(), threading.Event()

    def wait(self, seconds: float) -> bool:
        if self.left == 0:
            self.over.set()
            return self.ended.wait()
        self.left -= 1
        return False

    def set(self) -> None:
        self.ended.set()


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True, hidden: bool = False, counts: bool = False) -> str:
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with stage_bars(hidden=hidden, counts=counts) as show:
        for done in (1, 7):
            show(ProgressEvent("passes", done, 7, FOLDER))
        show(ProgressEvent("emit", 1, 3, "the last"))
    return stream.getvalue()


def test_stages_are_named_with_their_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch)
    assert "emit" in text
    assert "the last" in text
    assert "1/3" not in text
    assert "1/3 the last" in shown(monkeypatch, counts=True)


def test_details_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with stage_bars() as show:
        show(ProgressEvent("passes", 1, 7, FOLDER))
    assert FOLDER in stream.getvalue()


@pytest.mark.parametrize(
    ("done", "total", "seconds", "left"),
    [(1, 3, 10.0, ", 20 s left"), (1, 35, 10.0, ", 5 min left"), (0, 3, 10.0, ""), (3, 3, 10.0, "")],
)
def test_a_log_says_how_long_a_stage_may_still_take(
    done: int, total: int, seconds: float, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.001)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with stage_bars(remaining=True) as show:
        show(ProgressEvent("text", 0, total))
        clock.now += seconds
        show(ProgressEvent("text", done, total, "detail"))
        wait_until(lambda: f"text {done}/{total}{left} detail" in stream.getvalue(), stream.getvalue)


def test_one_bar_is_on_the_screen_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with stage_bars() as show:
        for stage in ("capture", "passes", "emit"):
            show(ProgressEvent(stage, 0, 1))
            wait_until(lambda stage=stage: stage in stream.getvalue(), stream.getvalue)
    frames = stream.getvalue().split("\r")
    assert any("passes" in frame for frame in frames)
    assert all(sum(name in frame for name in ("capture", "passes", "emit")) <= 1 for frame in frames)
    assert stream.getvalue().count("\n") == 1  # at the end: a second bar would be on a line of its own


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_shown_where_it_is_hidden(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.001)
    assert shown(monkeypatch, terminal=terminal, hidden=True) == ""


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_log_gets_lines_during_a_stage_that_says_nothing(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    stream = Stream(terminal=term == "dumb")  # a dumb terminal can't draw a bar
    monkeypatch.setattr(sys, "stderr", stream)

    def wait_for(text: str) -> None:
        wait_until(lambda: text in stream.getvalue(), stream.getvalue)

    with stage_bars() as show:
        wait_for(" s] starting\n")
        show(ProgressEvent("capture", 0, 1, FOLDER))
        wait_for(f"s] capture {FOLDER}\n")
        show(ProgressEvent("passes", 3, 22, "fuse_qkv"))
        wait_for("s] passes 3/22 fuse_qkv\n")
    ended = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == ended
    assert not [t for t in threading.enumerate() if t.name == "progress"]


@pytest.mark.parametrize(("repeat", "expected"), [(1e9, 1), (0.0, 5)])
def test_a_log_hears_once_of_what_doesn_t_change(repeat: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or again after a minute."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.001)
    monkeypatch.setattr(progress, "SECONDS_TO_REPEAT", repeat)
    ticks = Ticks(stop_after=5)
    monkeypatch.setattr(progress, "threading", SimpleNamespace(Event=lambda: ticks, Thread=threading.Thread))
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with stage_bars():
        ticks.over.wait()
    assert stream.getvalue().count("] starting\n") == expected


def test_short_work_writes_nothing_to_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False) == ""


def test_a_ctrl_c_ends_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(terminal=False))
    with pytest.raises(KeyboardInterrupt), stage_bars():
        raise KeyboardInterrupt
    assert not [t for t in threading.enumerate() if t.name == "progress"]


def test_every_long_command_shares_the_mechanism() -> None:
    """A progress bar of a command's own says nothing in a log."""
    folder = Path(progress.__file__).parent
    commands = [
        file.name
        for file in folder.glob("*.py")
        if "rich.progress" in file.read_text() or "rich import progress" in file.read_text()
    ]
    assert commands == ["progress.py"]
    long = (
        "bench",
        "bisect",
        "build",
        "diff",
        "eval",
        "export",
        "recover",
        "report",
        "sbom",
        "trace",
        "tune",
        "verify",
    )
    assert all("with stage_bars(" in (folder / f"{name}.py").read_text() for name in long)
