"""``optimize sbom``: a bundle's bill of materials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, reported
from .options import BundlePath

if TYPE_CHECKING:
    from enginewright.optimizer.progress import ProgressEvent

NAME = "sbom"
EPILOG = (
    "Examples:\n\n"
    "  optimize sbom smollm2.bundle -o smollm2.cdx.json\n\n"
    "  optimize sbom smollm2.bundle --source SmolLM2-135M-Instruct -o smollm2.cdx.json\n\n"
    "  optimize sbom smollm2.bundle | jq .metadata.component.hashes"
)


@reported
def command(
    bundle: BundlePath,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", "-s", metavar="MODEL", help="Its folder or GGUF file: adds its files' hashes and its licence."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")] = None,
) -> None:
    """Writes a bill of materials (CycloneDX 1.6, ML-BOM): model, source, recipe, toolchain, and all files with SHA-256.

    The same bundle gives the same bill. It has a time only if SOURCE_DATE_EPOCH is set.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    from enginewright.optimizer.sbom import bill_of_materials, moment, source_facts, write_bill
    from enginewright.runtime.bundle.reader import Bundle

    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    timestamp = None if epoch is None else moment(epoch)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TextColumn("{task.fields[detail]}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(event: ProgressEvent) -> None:
            if event.stage not in tasks:
                tasks[event.stage] = bar.add_task(event.stage, detail="")
            bar.update(tasks[event.stage], completed=event.done, total=event.total, detail=event.detail)

        opened = Bundle.open(bundle)
        facts = None if source is None else source_facts(opened, source, tell)
        bill = bill_of_materials(opened, source=facts, timestamp=timestamp, progress=tell)
    if output is None:
        print_json(bill)
    else:
        write_bill(bill, output)
