"""``optimize diff``: compares two bundles byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, reported
from .options import AsJson
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.diff_bundles import BundleDiff, FileDifference

EXIT_DIFFERENT = 14
"""The exit code if the bundles differ."""
EPILOG = (
    "Examples:\n\n"
    "  optimize diff smollm2.bundle again.bundle\n\n"
    "  optimize diff smollm2.bundle again.bundle --json\n\n"
    "  optimize diff smollm2.bundle again.bundle --quiet && echo equal"
)


@reported
def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A bundle.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other bundle.")],
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code is the result.")] = False,
) -> None:
    """Compares two bundles byte by byte, apart from report/, and names the files, fields and weights that differ.

    Exits with 0 if they are equal, with 14 if they differ.
    """
    from enginewright.optimizer.diff_bundles import diff_bundles

    with stage_bars(hidden=quiet) as show:
        diff = diff_bundles(a, b, progress=show)
    if as_json:
        print_json(diff.to_json())
    elif not quiet:
        _print(diff)
    if not diff.equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _print(found: BundleDiff) -> None:
    from enginewright.runtime.shared.memory import format_bytes

    if found.equal:
        typer.echo(f"equal: {found.files} files, {format_bytes(found.bytes)}; report/ was not compared")
        return
    typer.echo(f"different: {len(found.differences)} of {found.files} files; report/ was not compared")
    for file in found.differences:
        typer.echo(f"{file.path}: {_how(file)}")
        for detail in file.details:
            typer.echo(f"  {detail}")


def _how(file: FileDifference) -> str:
    if file.bytes_a is None or file.bytes_b is None:
        return "only in A" if file.bytes_b is None else "only in B"
    if file.bytes_a != file.bytes_b:
        return f"A {file.bytes_a:,} bytes, B {file.bytes_b:,}"
    return f"{file.bytes_a:,} bytes, not the same"
