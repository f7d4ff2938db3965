"""``optimize tune``: choices of a target that suit this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import print_json, reported
from .options import AsJson, BundlePath, Threads, Trust, known_target
from .progress import stage_bars

EPILOG = (
    "Examples:\n\n"
    "  optimize tune smollm2.bundle\n\n"
    "  optimize tune smollm2.bundle --seconds 120\n\n"
    "  optimize tune smollm2.bundle --dry-run --json\n\n"
    "  optimize tune smollm2.bundle --target tvm --trust code --seconds 300"
)


@reported
def command(
    bundle: BundlePath,
    seconds: Annotated[
        float, typer.Option(help="Maximum seconds of measurement; in less time, fewer settings are tried.")
    ] = 40.0,
    threads: Threads = 0,
    trust: Trust = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            callback=known_target,
            help="Target to tune: cpu or tvm; default: the first in the bundle.",
        ),
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="For tvm, compile with these records of an earlier run, without measuring.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but write nothing.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors, no progress.")] = False,
) -> None:
    """Searches for faster settings on this machine. Results stay the same, bit for bit.

    For the target cpu, the division of work into tasks is written to BUNDLE.tune.json. For the target tvm, a library
    with the fastest schedules of matrix products is added to the bundle.
    """
    from enginewright.optimizer.shared.target_parts import part_for
    from enginewright.plugins.steps.timed_steps import Tune
    from enginewright.runtime.bundle.reader import Bundle

    opened = Bundle.open(bundle, trust)
    run: Tune = part_for(opened, "compile.tune", target, "tuned")[1].tune
    with stage_bars(hidden=quiet) as show:
        result = run(opened, seconds=seconds, threads=threads, records=records, write=not dry_run, progress=show)
    if as_json:
        print_json(result.to_json())
        return
    for line in [] if quiet else result.table():
        print(line)
    for line in result.summary():
        print(line)
