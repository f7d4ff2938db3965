"""``optimize trace``: what a bundle does when, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, reported
from .options import AsJson, BundlePath, Threads

if TYPE_CHECKING:
    from enginewright.optimizer.progress import ProgressEvent

NAME = "trace"
EPILOG = (
    "Examples:\n\n"
    "  optimize trace smollm2.bundle\n\n"
    "  optimize trace smollm2.bundle -o batch.json --prompt-tokens 32 --decode 4 --batch 8"
)


@reported
def command(
    bundle: BundlePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace to write.")] = Path("trace.json"),
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each request's prompt.")] = 64,
    decode: Annotated[int, typer.Option(help="Decode steps that follow it.")] = 8,
    batch: Annotated[int, typer.Option(help="Requests.")] = 1,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Runs a prompt and some decode steps, and writes how long each step of the program took.

    https://ui.perfetto.dev opens the file, and so does chrome://tracing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from enginewright.optimizer.report.numbers import duration
    from enginewright.optimizer.report.perfetto import UI, trace
    from enginewright.runtime.bundle.reader import Bundle

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("tracing")

        def show(event: ProgressEvent) -> None:
            progress.update(task, description=f"tracing {event.detail}", completed=event.done, total=event.total)

        found = trace(
            Bundle.open(bundle), prompt=prompt_tokens, decode=decode, batch=batch, threads=threads, progress=show
        )
    found.write(output)
    if as_json:
        print_json({"path": str(output), "steps": found.steps, "slices": found.slices, "seconds": found.seconds})
    else:
        print(f"{output}: {found.steps} steps in {duration(found.seconds)}, {found.slices:,} slices; open it at {UI}")
