"""``optimize tune``: choices of the targets cpu and tvm that suit this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, reported
from .options import AsJson, BundlePath, Threads, Trust
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.tune.tune import TuneResult

NAME = "tune"
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
    seconds: Annotated[float, typer.Option(help="How long to measure, at most; short times try fewer choices.")] = 40.0,
    threads: Threads = 0,
    trust: Trust = None,
    target: Annotated[str, typer.Option("--target", "-t", help="What to tune: cpu or tvm.")] = "cpu",
    records: Annotated[
        Path | None, typer.Option(help="Of tvm: compile with these records of an earlier run, and measure nothing.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and write nothing.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no table.")] = False,
) -> None:
    """Measures how work is best cut into tasks on this machine, and keeps it in BUNDLE.tune.json.

    The cpu target takes it up from there. Of the target tvm, products are timed with other schedules, and its library
    in the bundle is compiled again with what is faster. No result changes by a bit.
    """
    if target not in ("cpu", "tvm"):
        raise typer.BadParameter(f"{target!r} is not one of cpu, tvm", param_hint="--target")
    if target == "tvm":
        _tune_tvm(bundle, trust, seconds, threads, records, write=not dry_run, as_json=as_json, quiet=quiet)
        return
    if records is not None:
        raise typer.BadParameter("only the target tvm has records", param_hint="--records")
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


def _tune_tvm(
    path: Path,
    trust: str | None,
    seconds: float,
    threads: int,
    records: Path | None,
    *,
    write: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from enginewright.optimizer.tune.tune_tvm import tune_tvm
    from enginewright.runtime.bundle.reader import Bundle

    with stage_bars(hidden=quiet) as show:
        found = tune_tvm(
            Bundle.open(path, trust), seconds=seconds, threads=threads, records=records, write=write, progress=show
        )
    if as_json:
        print_json(found.to_json())
        return
    width = max((len(t.product) for t in found.tried), default=0)
    for tried in () if quiet else found.tried:
        faster = "  faster" if tried.faster else ""
        print(f"{tried.product:<{width}}  {tried.name:<10}{tried.value:>6}{tried.gain:>8.3f}x{faster}")
    for name, gain in () if quiet else found.gains.items():
        print(f"{name:<28}{gain:>8.3f}x")
    if not found.records:
        print("nothing is faster here than the schedules that it has")
    for name, schedule in found.records.items():
        print(f"{name}: " + ", ".join(f"{field} {value}" for field, value in schedule.model_dump().items()))
    if (untried := found.candidates - len(found.tried)) > 0:
        print(
            f"{seconds:g} seconds were too short for {untried} of {found.candidates} choices: pass a larger --seconds"
        )
    print(f"{found.path} for x86-64-{found.level}" if found.path else f"{path} was not changed")


def _print_tried(found: TuneResult) -> None:
    """Three tables: each choice beside the best so far, what is chosen beside the executor's own by kind of step, and
    what steps of several rows of a request take."""
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
    if found.file.row_seconds:
        shown = 1, 2, 4, 8, 16
        print(f"{'milliseconds, rows':<28}" + "".join(f"{rows:>8}" for rows in shown))
    for context, seconds in found.file.row_seconds.items():
        print(f"{f'1 request at {context:,}':<28}" + "".join(f"{1e3 * seconds[rows - 1]:>8.2f}" for rows in shown))
    if found.file.row_seconds:
        print()
