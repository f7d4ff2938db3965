"""``optimize trace``: records a bundle's activity over time, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import print_json, reported
from .options import AsJson, BundlePath, Cut, NoProgress, Ranks, Threads
from .progress import stage_bars

EPILOG = (
    "Examples:\n\n"
    "  optimize trace smollm2.bundle\n\n"
    "  optimize trace smollm2.bundle -o batch.json --prompt-tokens 32 --decode 4 --batch 8\n\n"
    "  optimize trace smollm2.bundle --ranks 2 --threads 1"
)


@reported
def command(
    bundle: BundlePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace to write.")] = Path("trace.json"),
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each request's prompt.")] = 64,
    decode: Annotated[int, typer.Option(help="Decode steps after the prompt.")] = 8,
    batch: Annotated[int, typer.Option(help="Number of requests.")] = 1,
    threads: Threads = 0,
    ranks: Ranks = None,
    partition: Cut = None,
    as_json: AsJson = False,
    quiet: NoProgress = False,
) -> None:
    """Runs a prompt and some decode steps, and writes the time of each operation into a file.

    Open the file in https://ui.perfetto.dev or chrome://tracing.
    """
    from enginewright.optimizer.report.numbers import duration
    from enginewright.optimizer.report.perfetto import UI, trace
    from enginewright.runtime.bundle.reader import Bundle
    from enginewright.runtime.engine.info import partition_of

    with stage_bars(hidden=quiet) as show:
        traced = trace(
            Bundle.open(bundle),
            prompt=prompt_tokens,
            decode=decode,
            batch=batch,
            threads=threads,
            partition=partition_of(ranks, partition),
            progress=show,
        )
    traced.write(output)
    if as_json:
        print_json({"path": str(output), "steps": traced.steps, "slices": traced.slices, "seconds": traced.seconds})
    else:
        print(
            f"{output}: {traced.steps} steps in {duration(traced.seconds)}, {traced.slices:,} slices; open it at {UI}"
        )
