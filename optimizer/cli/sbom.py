"""``optimize sbom``: a bundle's bill of materials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .console import print_json, reported
from .options import BundlePath, NoProgress
from .progress import stage_bars

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
            "--source",
            "-s",
            metavar="MODEL",
            help="The model's folder, GGUF file or Hub id, to add its files' hashes and licence.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print errors as JSON too; the bill is always JSON.")] = False,
    quiet: NoProgress = False,
) -> None:
    """Writes a bill of materials (CycloneDX 1.6, ML-BOM): model, source, recipe, toolchain, and all files with SHA-256.

    Equal bundles give equal bills. A bill has a time only if SOURCE_DATE_EPOCH is set.
    """
    from enginewright.optimizer.sbom import bill_of_materials, moment, source_facts, write_bill
    from enginewright.runtime.bundle.reader import Bundle

    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    timestamp = None if epoch is None else moment(epoch)
    with stage_bars(hidden=quiet) as show:
        opened = Bundle.open(bundle)
        facts = None if source is None else source_facts(opened, source, show)
        bill = bill_of_materials(opened, source=facts, timestamp=timestamp, progress=show)
    if output is None:
        print_json(bill)
    else:
        write_bill(bill, output)
