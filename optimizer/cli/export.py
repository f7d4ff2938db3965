"""``optimize export``: a model in, a bundle out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, reported
from .options import AsJson
from .verification import figures

if TYPE_CHECKING:
    from enginewright.optimizer.export import ExportReport
    from enginewright.optimizer.progress import ProgressEvent

NAME = "export"
EPILOG = (
    "Examples:\n\n"
    "  optimize export SmolLM2-135M-Instruct -o smollm2.bundle\n\n"
    "  optimize export model.gguf --recipe int8 --target cpu --force\n\n"
    "  optimize export model.gguf -o model.bundle --json --quiet > report.json"
)


def default_output(source: str) -> Path:
    """``models/Llama-1B`` and ``Llama-1B.gguf`` become ``Llama-1B.bundle`` in the current folder."""
    name = Path(source).resolve().name if Path(source).exists() else source.rstrip("/").rsplit("/", 1)[-1]
    return Path(name.removesuffix(".gguf") + ".bundle")


@reported
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a GGUF file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The bundle to write; by default named after the model.")
    ] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="A built-in recipe (see `optimize recipes`) or a TOML file.")
    ] = "f32",
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", help="What to build for, instead of what the recipe says; may be repeated."),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option("--context-length", min=1, help="The longest request in tokens, instead of what the recipe says."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the bundle if it exists.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).")] = False,
) -> None:
    """Compiles MODEL into a bundle that `optimize generate` and the runtime run.

    Needs the extra: pip install 'enginewright\\[export]'.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    import enginewright

    columns = (TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.fields[detail]}"))
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal  # a bar that can't move would leave an empty line in a log
    progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=hidden, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(event: ProgressEvent) -> None:
        if event.stage not in tasks:
            tasks[event.stage] = progress.add_task(event.stage, detail="")
        progress.update(tasks[event.stage], completed=event.done, total=event.total or None, detail=event.detail)

    with progress:
        report = enginewright.export(
            model,
            output or default_output(model),
            recipe=recipe,
            targets=target or None,
            context_length=context_length,
            overwrite=force,
            progress=show,
        )
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        _print_report(report)


def _print_report(report: ExportReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from enginewright.runtime.kv_cache.cache_groups import format_bytes

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("pass")
    for heading in ("matched", "turned down", "seconds"):
        table.add_column(heading, justify="right")
    for summary in report.passes:
        table.add_row(summary.name, str(summary.matched), str(len(summary.rejected)), f"{summary.seconds:.2f}")
    console.print(table)
    if (q := report.quantization) is not None:
        console.print(
            f"\n{q.values:,} weights in 8 bits: {q.saturated:,} saturated, "
            f"{q.vanished:,} groups of small ones became zero",
            markup=False,
            soft_wrap=True,
        )
    console.print()
    for verification in report.verification:
        console.print(figures(asdict(verification)), markup=False, soft_wrap=True)
    console.print(
        f"\n{report.path}: for requests of up to {report.context_length:,} tokens; "
        f"{format_bytes(report.bundle_bytes)}, in {report.seconds:.1f} s, "
        f"{format_bytes(report.peak_rss_bytes)} of memory at most",
        markup=False,
        soft_wrap=True,
    )
