"""Bars are shown on a terminal alone, with what is told as it is, and are gone when the work is done."""

from __future__ import annotations

import io
import sys

import pytest

from enginewright.optimizer.cli.progress import stage_bars
from enginewright.optimizer.progress import ProgressEvent

FOLDER = "model[1]/[bold]"
"""What a terminal's markup would swallow."""


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True, hidden: bool = False, counts: bool = False) -> str:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with stage_bars(hidden=hidden, counts=counts) as show:
        for done in (1, 7):
            show(ProgressEvent("passes", done, 7, FOLDER))
    return stream.getvalue()


def test_stages_are_named_with_their_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch)
    assert "passes" in text
    assert FOLDER in text
    assert "7/7" not in text
    assert f"7/7 {FOLDER}" in shown(monkeypatch, counts=True)


@pytest.mark.parametrize(("terminal", "hidden"), [(False, False), (True, True)])
def test_nothing_is_shown(terminal: bool, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=terminal, hidden=hidden) == ""
