"""``optimize tune``: choices of the cpu target that suit this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, reported
from .options import AsJson, BundlePath, Threads
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.tune.tune import TuneResult

NAME = "tune"
EPILOG = (
    "Examples:\n\n"
    "  optimize tune smollm2.bundle\n\n"
    "  optimize tune smollm2.bundle --seconds 120\n\n"
    "  optimize tune smollm2.bundle --dry-run --json"
)


@reported
def command(
    bundle: BundlePath,
    seconds: Annotated[float, typer.Option(help="How long to measure, at most; short times try fewer choices.")] = 40.0,
    threads: Threads = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and write nothing.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no table.")] = False,
) -> None:
    """Measures how work is best cut into tasks on this machine, and keeps it in BUNDLE.tune.json.

    The cpu target takes it up from there. No result changes by a bit; the bundle itself is not touched.
    """
    from enginewright.optimizer.tune.tune import tune
    from enginewright.runtime.bundle.reader import Bundle

    with stage_bars(hidden=quiet) as show:
        found = tune(Bundle.open(bundle), seconds=seconds, threads=threads, write=not dry_run, progress=show)
    if as_json:
        print_json(found.to_json())
        return
    if not quiet:
        _print_tried(found)
    chosen = dict(found.file.choices) | ({"threads": found.file.threads} if found.file.threads else {})
    if chosen:
        print("chosen: " + ", ".join(f"{name} {value:,}" for name, value in chosen.items()))
    elif found.tried:
        print("nothing is faster here than the executor's own choices")
    if (untried := found.candidates - len(found.tried)) > 0:
        print(
            f"{seconds:g} seconds were too short for {untried} of {found.candidates} choices: pass a larger --seconds"
        )
    print(f"{found.path}{'' if found.written else ' was not written'}")


def _print_tried(found: TuneResult) -> None:
    """Two tables: each choice beside the best so far, and what is chosen beside the executor's own by kind of step."""
    if found.tried:
        print(f"{'choice':<18}{'value':>10}{'speed':>9}")
    for tried in found.tried:
        verdict = "kept" if tried.kept else "faster, and not so in the last comparison" if tried.faster else ""
        print(f"{tried.name:<18}{tried.value:>10,}{tried.gain:>8.3f}x  {verdict}".rstrip())
    if found.tried:
        print()
    if found.file.choices or found.file.threads:
        print(f"{'step':<28}{'speed':>9}")
        for name, gain in found.gains.items():
            print(f"{name:<28}{gain:>8.3f}x")
        print()
