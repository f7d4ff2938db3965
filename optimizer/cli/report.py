"""``optimize report``: shows an export's changes, the sizes of weights, and the bundle's speed on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .auto import print_auto
from .console import comparison_lines, print_json, reported, stdout_console
from .options import AsJson, BundlePath, NoProgress, Threads
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.report.bundle_report import BundleReport

EPILOG = (
    "Examples:\n\n"
    "  optimize report smollm2.bundle\n\n"
    "  optimize report smollm2.bundle --measure --output report.html\n\n"
    "  optimize report smollm2.bundle --json > report.json"
)


@reported
def command(
    bundle: BundlePath,
    measure: Annotated[bool, typer.Option("--measure", help="Time the bundle's steps now, for about 15 s.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the report to this HTML file, which needs no other files."),
    ] = None,
    threads: Threads = 0,
    as_json: AsJson = False,
    quiet: NoProgress = False,
) -> None:
    """Shows the passes, quality, bytes and speed of an export, without changing the bundle.

    Every export writes this report into its bundle, as report/report.html.
    """
    from enginewright.optimizer.report.bundle_report import open_report

    if threads and not measure:
        raise typer.BadParameter("--threads is for --measure")
    with stage_bars(hidden=quiet) as show:
        report = open_report(bundle, again=measure, threads=threads, progress=show)
    if output is not None:
        report.write_page(output)
    if as_json:
        print_json(report.to_json())
    else:
        print_summary(report)
        if output is not None:
            print(f"{'written':<12}{output}")


def print_summary(report: BundleReport) -> None:
    """Prints the bundle's quality, its passes, and one or more lines for each other part of the report."""
    from rich.table import Table

    from enginewright.optimizer.report.bundle_report import (
        calibration_lines,
        measured_lines,
        quantized_lines,
    )
    from enginewright.optimizer.report.lines import (
        already_quantized_lines,
        candidate_lines,
        engine_lines,
        kv_formats_lines,
        kv_heads_lines,
        pruned_lines,
    )

    console = stdout_console()
    if (quality := report.quality_line()) is not None:
        console.print(quality, markup=False, soft_wrap=True)
        console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("pass")
    for heading in ("changed", "rejected", "seconds", "KL", "logits off"):
        table.add_column(heading, justify="right")
    for entry, rejected in report.passes:
        m = entry.measurement
        measured = ("", "") if m is None or m.unchanged else (f"{m.kl_mean:.1e}", f"{m.max_logit_error:.1e}")
        seconds = f"{entry.seconds:.2f}" if entry.seconds is not None else ""
        name = f"{entry.target}: {entry.name}" if entry.target else entry.name
        table.add_row(name, str(entry.matched), str(rejected or ""), seconds, *measured)
    console.print(table)

    if (document := report.saved.document) is not None and document.auto is not None:
        print_auto(console, document.auto)

    def row(label: str, lines: list[str]) -> None:
        for i, line in enumerate(lines):
            console.print(f"{'' if i else label:<12}{line}", markup=False, soft_wrap=True)

    console.print()
    row("size", [report.size_line()])
    if document is not None:
        compared = [line.strip() for v in document.verification for line in comparison_lines(asdict(v)).splitlines()]
        row("quality", compared)
        row("passes", measured_lines(document))
        row("weights", [*already_quantized_lines(document), *quantized_lines(document)])
        row("calibrated", calibration_lines(document))
        row("candidates", candidate_lines(document))
        row("KV cache", [*kv_heads_lines(document), *kv_formats_lines(document)])
        row("pruned", pruned_lines(document))
        row("engines", engine_lines(document))
    row("buckets", report.bucket_lines())
    row("memory", report.memory_lines())
    row("speed", report.speed_lines())
    row("export", [report.time_line() or "this bundle has no report of it: passes have counts alone"])
    if report.page_path is not None:
        row("page", [str(report.page_path)])
