"""``optimize verify``: whether a bundle is whole, and computes what its source does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import comparison_lines, print_json, reported
from .options import AsJson, BundlePath, Provider, Trust, known_targets
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.check_bundle import BundleCheck

NAME = "verify"
EPILOG = (
    "Examples:\n\n"
    "  optimize verify smollm2.bundle\n\n"
    "  optimize verify smollm2.bundle --source SmolLM2-135M-Instruct\n\n"
    "  optimize verify smollm2.bundle --source SmolLM2-135M-Instruct --target cpu --json --quiet"
)


@reported
def command(
    bundle: BundlePath,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", "-s", metavar="MODEL", help="Compare with the folder, GGUF file or Hub id it was made from."
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", callback=known_targets, help="Look at this target alone; may be repeated."),
    ] = None,
    provider: Provider = None,
    trust: Trust = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no text if all is well.")] = False,
) -> None:
    """Checks the hash of every file of a bundle, and its programs; with --source also what they compute.

    Code that the bundle carries for some targets isn't run: pass --trust code for that.
    Comparing with a source needs the extra: pip install 'enginewright\\[export]'.
    """
    from enginewright.optimizer.check_bundle import check_bundle

    with stage_bars(hidden=quiet) as show:
        found = check_bundle(
            bundle, source=source, targets=target or None, provider=provider, trust=trust, progress=show
        )
    if as_json:
        print_json(found.to_json())
    elif not quiet:
        _print_check(found)


def _print_check(found: BundleCheck) -> None:
    from enginewright.runtime.shared.memory import format_bytes

    typer.echo(f"{found.path}: {found.files} files, {format_bytes(found.bytes)}: all hashes are right")
    for one in found.targets:
        if one.why_not is not None:
            typer.echo(f"target {one.target}: not run here: {one.why_not}")
            continue
        typer.echo(f"target {one.target}: its program is sound ({_how(one.runs_with)})")
        if one.comparison is not None:
            typer.echo(comparison_lines(asdict(one.comparison)))
    if found.source is None:
        typer.echo("What it computes was not looked at: pass --source MODEL for that.")


def _how(runs_with: dict[str, str | int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in runs_with.items() if key != "target")
