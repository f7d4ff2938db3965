"""The progress of long commands on stderr: a bar in a terminal, lines of text anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from enginewright.runtime.shared.progress import Progress, ProgressEvent

SECONDS_BETWEEN_LINES = 5.0
"""The time between two lines of a log, while something changes."""

SECONDS_TO_REPEAT = 60.0
"""The seconds after which an unchanged line is printed again in a log, so that the work doesn't look stuck."""


@contextmanager
def stage_bars(*, hidden: bool = False, counts: bool = False, remaining: bool = False) -> Iterator[Progress]:
    """Yields the function that a long command calls with its events.

    In a terminal one bar shows the present stage, and disappears at the end. If stderr is a file or a pipe, a line with
    the stage is printed every few seconds while it changes and once a minute otherwise; work of less than a few seconds
    prints nothing.

    Args:
        hidden: True shows nothing.
        counts: True adds the numbers of done and of all items.
        remaining: True adds the estimated time until the stage ends.
    """
    if hidden:
        yield lambda event: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        with _bar(console, counts=counts, remaining=remaining) as show:
            yield show
    else:
        with _lines(remaining=remaining) as show:
            yield show


@contextmanager
def _bar(console: Console, *, counts: bool, remaining: bool) -> Iterator[Progress]:
    from rich import progress as bars

    detail = "{task.completed}/{task.total} {task.fields[detail]}" if counts else "{task.fields[detail]}"
    columns = [
        bars.TextColumn("{task.description:<12}", markup=False),
        bars.BarColumn(),
        bars.TextColumn(detail, markup=False),
        bars.TimeElapsedColumn(),
        *([bars.TimeRemainingColumn()] if remaining else []),
    ]
    shown = bars.Progress(*columns, console=console, transient=True)
    task = shown.add_task("start", total=None, detail="")
    stage = ""

    def show(event: ProgressEvent) -> None:
        nonlocal stage, task
        if event.stage != stage:  # a task of its own, so that the remaining time is the stage's
            shown.remove_task(task)
            stage, task = event.stage, shown.add_task(event.stage, detail="")
        shown.update(task, completed=event.done, total=event.total or None, detail=event.detail)

    with shown:
        yield show


@contextmanager
def _lines(*, remaining: bool) -> Iterator[Progress]:
    """Prints the time so far, the stage and its last report, in a line whenever they have changed."""
    start = time.monotonic()
    latest, stage, began = "starting", "", start
    done = threading.Event()

    def show(event: ProgressEvent) -> None:
        nonlocal latest, stage, began
        now = time.monotonic()
        if event.stage != stage:
            stage, began = event.stage, now
        count = f" {event.done}/{event.total}" if event.total > 1 else ""
        left = f", {_left(event, now - began)} left" if remaining and 0 < event.done < event.total else ""
        latest = f"{event.stage}{count}{left} {event.detail}".rstrip()

    def write() -> None:
        written, at = "", start
        while not done.wait(SECONDS_BETWEEN_LINES):
            now, line = time.monotonic(), latest
            if line != written or now - at >= SECONDS_TO_REPEAT:
                written, at = line, now
                print(f"[{now - start:4.0f} s] {line}", file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, name="progress", daemon=True)
    writer.start()
    try:
        yield show
    finally:
        done.set()
        writer.join()


def _left(event: ProgressEvent, seconds: float) -> str:
    """Returns the estimated time until a stage ends, from its speed so far."""
    left = round(seconds / event.done * (event.total - event.done))
    return f"{left} s" if left < 120 else f"{left // 60} min"
