"""``optimize build``: builds a target on a machine with the needed hardware and software."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .check_engine import show_check
from .console import print_json, reported
from .options import AsJson, Trust, known_target
from .progress import stage_bars

EPILOG = (
    "Examples:\n\n"
    "  optimize build smollm2.bundle --target tensorrt --trust code\n\n"
    "  optimize build smollm2.bundle --target tensorrt --trust code --again --json > built.json\n\n"
    "  optimize build --target tensorrt --check --json > report.json"
)


@reported
def command(
    bundle: Annotated[
        Path | None,
        typer.Argument(metavar="[BUNDLE]", help="A bundle; --check needs none."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", callback=known_target, help="The target to build; default: the first that needs a build."
        ),
    ] = None,
    trust: Trust = None,
    again: Annotated[
        bool, typer.Option("--again", help="Build a ready target again, for example for another GPU.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="After the build, run the target, compare its tokens with the cpu target's, and print a report to "
            "send us. Without BUNDLE, a tiny model is exported and built.",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).")] = False,
) -> None:
    """Finishes a target that must be built on the machine with the GPU. Writes only into the target's folder."""
    if check:
        if again and bundle is not None:
            raise typer.BadParameter("--again builds, and --check then finds nothing to build; use one after the other")
        show_check(target, bundle, trust=trust, build=True, as_json=as_json, quiet=quiet)
        return
    if bundle is None:
        raise typer.BadParameter("BUNDLE is missing; only --check works without one")
    from enginewright.optimizer.build_target import build_target
    from enginewright.runtime.shared.memory import format_bytes

    with stage_bars(hidden=quiet, counts=True) as show:
        report = build_target(bundle, target, trust=trust, again=again, progress=show)
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        what = "built" if report.built else "ready before, and left as it is (--again builds it again)"
        typer.echo(
            f"{report.path}: target {report.target}: {what}, for {report.gpu}, by {report.library} {report.version}"
        )
        for name, size in report.engines.items():
            scratch = (
                f", {format_bytes(report.scratch[name])} of memory while it runs" if name in report.scratch else ""
            )
            typer.echo(f"  {name}  {format_bytes(size)}{scratch}")
        for name in report.copies:
            typer.echo(f"  {name}: {report.library} put copies of the caches into it, which take that memory and time")
