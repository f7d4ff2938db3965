"""``optimize buckets``: chooses the sizes of steps with the least padding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import print_json, reported
from .options import AsJson

EPILOG = (
    "Examples:\n\n"
    "  optimize buckets --histogram lengths.csv --most 8\n\n"
    "  optimize buckets --trace requests.jsonl --most 12 --context 8192 --json\n\n"
    "  optimize buckets --default chat --most 8 --max-batch 16"
)
RENAMED = {"--context-length": "--context", "--batches": "--batch-sizes", "-n": "--most"}


@reported
def command(
    histogram: Annotated[
        Path | None, typer.Option("--histogram", help="Lengths of prompts: JSON, CSV, or one per line.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="JSONL of requests, with prompt_tokens and completion_tokens in each line."),
    ] = None,
    default: Annotated[
        str | None, typer.Option("--default", metavar="NAME", help="A built-in distribution: chat, documents or code.")
    ] = None,
    batches: Annotated[
        Path | None, typer.Option("--batch-sizes", help="Batch sizes of decode steps, in the format of --histogram.")
    ] = None,
    max_batch: Annotated[
        int,
        typer.Option(
            "--max-batch", help="Without --batch-sizes, all sizes from 1 to this number are equally frequent."
        ),
    ] = 64,
    most: Annotated[
        int, typer.Option("--most", help="Maximum number of buckets, for prompts and decode steps together.")
    ] = 8,
    multiple: Annotated[int, typer.Option("--multiple", help="Round sizes of prompts up to multiples of this.")] = 8,
    chunk: Annotated[
        int | None, typer.Option("--chunk", help="Split longer prompts into chunks of this number of tokens.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option("--context", help="The model's context in tokens; longer prompts are an error.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Chooses step sizes (buckets) with the least padding, and shows the padding of other choices.

    The last lines of the output are a section for a recipe.
    """
    from enginewright.optimizer.buckets.choose import BucketSource, choose
    from enginewright.optimizer.buckets.report import recipe_lines, text_lines

    sources = sum(one is not None for one in (histogram, trace, default))
    if sources != 1:
        raise typer.BadParameter(f"give one of --histogram, --trace and --default, not {sources or 'none'} of them")
    source = BucketSource(
        histogram=None if histogram is None else str(histogram),
        trace=None if trace is None else str(trace),
        default=default,
        batches=None if batches is None else str(batches),
        max_batch=max_batch,
        most=most,
        multiple=multiple,
        chunk=chunk,
    )
    chosen = choose(source, context_length)
    if as_json:
        print_json({"tokens": chosen.tokens, "batch": chosen.batch} | chosen.report.to_json())
        return
    for line in text_lines(chosen.report):
        print(line)
    print()
    for line in recipe_lines(chosen.tokens, chosen.batch):
        print(line)
