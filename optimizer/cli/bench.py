"""``optimize bench``: measures a bundle's speed on this machine, compared with the machine's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import print_found, reported
from .exported import exported
from .options import (
    AsJson,
    Cut,
    Memory,
    ModelPath,
    ModelRecipe,
    NoProgress,
    Ranks,
    Target,
    Threads,
    Trust,
    numbers,
)
from .progress import stage_bars

EPILOG = (
    "Examples:\n\n"
    "  optimize bench smollm2.bundle\n\n"
    "  optimize bench model.gguf --recipe int8\n\n"
    "  optimize bench smollm2.bundle --prompt 512 --batch 1,8 --context 128,1024 --profile\n\n"
    "  optimize bench smollm2.bundle --speculate lookup\n\n"
    "  optimize bench smollm2.bundle --plot speed.svg --json > speed.json"
)
RENAMED = {"--prompts": "--prompt", "--batches": "--batch", "--contexts": "--context"}


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parses numbers between commas; "none" gives (), and None (no option) gives None."""
    if text is None:
        return None
    return () if text.strip().lower() == "none" else numbers(option, text)


@reported
def command(
    model: ModelPath,
    recipe: ModelRecipe = None,
    target: Target = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="N,...", help='Prompt lengths in tokens; default 128,512,2048; "none" skips prompts.'
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            "--batch", metavar="N,...", help='Requests in decode steps; default 1,4,8,16; "none" skips decode steps.'
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option("--context", metavar="N,...", help="Context lengths in tokens; default 128,1024."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of timed decode steps of each size.")] = 16,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Repetitions of all sizes; default 3, or 1 on targets that can't time decode steps without prompts."
        ),
    ] = None,
    threads: Threads = 0,
    ranks: Ranks = None,
    partition: Cut = None,
    memory: Memory = None,
    trust: Trust = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also time the program's operations.")] = False,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="lookup|BUNDLE",
            help="Also decode texts with speculation (by lookup, or by a faster bundle) and without.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the speeds into this SVG file.")] = None,
    as_json: AsJson = False,
    quiet: NoProgress = False,
) -> None:
    """Measures the speed of prompts and decode steps, the memory, and the machine's limits in the same run.

    Takes less than a minute on a small model; other work on the machine changes the figures.
    """

    from enginewright.optimizer.bench.measure import bench
    from enginewright.optimizer.bench.options import BenchOptions
    from enginewright.optimizer.bench.plot import check_folder, write_svg
    from enginewright.optimizer.bench.text import print_result
    from enginewright.runtime.bundle.reader import Bundle
    from enginewright.runtime.engine.info import partition_of
    from enginewright.runtime.shared.memory import parse_size

    sizes = _sizes("--prompt", prompts), _sizes("--batch", batches), _sizes("--context", contexts)
    if sizes[0] == () and () in sizes[1:]:
        raise typer.BadParameter("there is nothing to measure: no prompts, and no batches with contexts")
    options = BenchOptions(
        target=target,
        prompts=sizes[0],
        batches=sizes[1],
        contexts=sizes[2],
        steps=steps,
        rounds=rounds,
        threads=threads,
        partition=partition_of(ranks, partition),
        memory=None if memory is None else parse_size(memory),
        profile=profile,
        speculate=speculate,
    )
    if plot is not None:
        check_folder(plot)
    bundle = exported(model, recipe=recipe, quiet=quiet)
    with stage_bars(hidden=quiet) as show:
        result = bench(Bundle.open(bundle, trust), options, show)
    if plot is not None:
        write_svg(result, plot)
    print_found(result, print_result, as_json=as_json, plot=plot)
