"""Runs the check of an engine for ``optimize build --check`` and ``optimize doctor --run``, and prints its report."""

from __future__ import annotations

from pathlib import Path

import typer

from .console import print_json
from .progress import stage_bars


def show_check(
    target: str | None,
    bundle: Path | None,
    *,
    trust: str | None,
    build: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Prints a line for each stage, then the report as JSON; with ``as_json`` the report alone.

    The other arguments are those of ``check_engine``. Raises its errors, and typer.Exit(11) if a stage failed.
    """
    from enginewright.optimizer.check_engine.check import check_engine
    from enginewright.runtime.shared.errors import VerificationError

    with stage_bars(hidden=quiet) as show:
        report = check_engine(target, bundle, trust=trust, build=build, progress=show)
    if not as_json and not quiet:
        for stage in report.stages:
            why = stage.get("error") or stage.get("reason") or ""
            typer.echo(f"{stage['stage']:<10}{stage['status']:<9}{stage.get('seconds', 0):8.1f} s  {why}".rstrip())
        typer.echo(f"\ntarget {report.target} {'passed' if report.passed else 'failed'}. The report, to send:")
    print_json(report.to_json())
    if not report.passed:
        raise typer.Exit(VerificationError.exit_code)
