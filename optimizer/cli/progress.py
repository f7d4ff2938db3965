"""What commands show while they work, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginewright.optimizer.progress import Progress, ProgressEvent


@contextmanager
def stage_bars(*, hidden: bool = False, counts: bool = False, remaining: bool = False) -> Iterator[Progress]:
    """Gives what is told of events: each stage has a bar, and all of them go when the work is done.

    Nothing is shown where stderr is no terminal: a bar that can't move would leave an empty line in a log.

    Args:
        hidden: show nothing anyway.
        counts: with how much is done of how much.
        remaining: with the time that it may still take.
    """
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    detail = "{task.completed}/{task.total} {task.fields[detail]}" if counts else "{task.fields[detail]}"
    columns = [
        bars.TextColumn("{task.description:<12}", markup=False),
        bars.BarColumn(),
        bars.TextColumn(detail, markup=False),
        bars.TimeElapsedColumn(),
        *([bars.TimeRemainingColumn()] if remaining else []),
    ]
    shown = bars.Progress(*columns, console=console, disable=hidden or not console.is_terminal, transient=True)
    tasks: dict[str, bars.TaskID] = {}

    def show(event: ProgressEvent) -> None:
        if event.stage not in tasks:
            tasks[event.stage] = shown.add_task(event.stage, detail="")
        shown.update(tasks[event.stage], completed=event.done, total=event.total or None, detail=event.detail)

    with shown:
        yield show
