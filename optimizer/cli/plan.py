"""``optimize plan``: predicts a model's memory and speed on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import print_found, reported
from .options import AsJson, NoProgress, Threads, numbers
from .progress import stage_bars

EPILOG = (
    "Examples:\n\n"
    "  optimize plan SmolLM2-135M-Instruct --gpu l4 --tpot 20ms --ttft 500ms\n\n"
    "  optimize plan smollm2.bundle --gpu h100 --gpu rtx4090 --context 8192 --batch 1,16,256\n\n"
    "  optimize plan smollm2.bundle --gpu cpu --json\n\n"
    "  optimize plan llama-70b/ --recipe int8 --gpu h100 --ranks 8 --link nvlink"
)


@reported
def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="BUNDLE|MODEL",
            help="A bundle, a model's folder (config.json is enough), a GGUF file, or a model's id on the Hub.",
        ),
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", help="A GPU, such as h100 or rtx4090, or cpu for this machine (default); may be repeated."
        ),
    ] = None,
    devices: Annotated[
        Path | None, typer.Option(help="A TOML file with your own GPUs, in the format of Enginewright's devices.toml.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            "-r",
            help="Name or file of a recipe for a model; may be repeated. Default: all built-in recipes.",
        ),
    ] = None,
    tpot: Annotated[str | None, typer.Option(metavar="TIME", help="Goal for the time per token, such as 20ms.")] = None,
    ttft: Annotated[str | None, typer.Option(metavar="TIME", help="Goal for the time to the first token.")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of simultaneous requests; default 1,4,16,64.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of each prompt plus its answer; default: 2048, or the context if shorter."),
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens of each prompt; default 512.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory that may be used, such as 16GiB; default: 90 % of a GPU's, or this machine's free memory."
        ),
    ] = None,
    bandwidth_share: Annotated[
        float | None,
        typer.Option(help="Assumed share of a GPU's stated bandwidth that is reached; default 0.75."),
    ] = None,
    compute_share: Annotated[
        float | None, typer.Option(help="Assumed share of a GPU's stated peak that is reached; default 0.6.")
    ] = None,
    threads: Threads = 0,
    ranks: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of ranks to plan for, in every partition.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME=N,...", help="Plan only this partition, such as tensor=4,pipeline=2.")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="The link between ranks, such as nvlink, pcie4, ethernet10 or 2.5gbit. nvlink,ndr is nvlink within "
            "machines and ndr between machines. Default: this machine's shared memory.",
        ),
    ] = None,
    per_machine: Annotated[
        int | None, typer.Option(help="Ranks per machine, if --link also names a link between machines; default 8.")
    ] = None,
    link_share: Annotated[
        float | None,
        typer.Option(help="Assumed share of a link's stated bandwidth that is reached; default 0.8."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw times by batch into this SVG file.")] = None,
    as_json: AsJson = False,
    quiet: NoProgress = False,
) -> None:
    """Predicts latencies, the largest batch that meets goals, and the memory that a model needs on a device.

    Predictions for GPUs use the makers' figures. For this machine, kernels are timed for some seconds.
    """
    from enginewright.optimizer.bench.plot import check_folder
    from enginewright.optimizer.plan.options import BATCHES, PlanOptions, parse_seconds
    from enginewright.optimizer.plan.planner import plan
    from enginewright.optimizer.plan.plot import write_svg
    from enginewright.optimizer.plan.ranks import plan_ranks
    from enginewright.optimizer.plan.ranks_text import print_rank_plans
    from enginewright.optimizer.plan.text import print_plan
    from enginewright.runtime.shared.errors import RequestError
    from enginewright.runtime.shared.memory import parse_size

    options = PlanOptions(
        devices=tuple(gpu or PlanOptions.devices),
        device_file=devices,
        recipes=tuple(recipe or ()),
        batches=BATCHES if batch is None else numbers("--batch", batch),
        context=context,
        prompt=prompt,
        tpot=None if tpot is None else parse_seconds(tpot, "tpot"),
        ttft=None if ttft is None else parse_seconds(ttft, "ttft"),
        memory=None if memory is None else parse_size(memory),
        bandwidth_share=bandwidth_share,
        compute_share=compute_share,
        threads=threads,
        ranks=() if ranks is None else numbers("--ranks", ranks),
        partition=partition,
        links=tuple(link or ()),
        per_machine=per_machine,
        link_share=link_share,
    )
    if options.ranks or partition is not None:
        if plot is not None:
            raise RequestError("plot: ranks aren't drawn", hint="Leave --plot out, or take --json.")
        with stage_bars(hidden=quiet) as show:
            cut = plan_ranks(source, options, show)
        print_found(cut, print_rank_plans, as_json=as_json, plot=None)
        return
    if link or per_machine is not None or link_share is not None:
        raise RequestError("link: there are no ranks that it would join", hint="Say how many: --ranks 8.")
    if plot is not None:
        check_folder(plot)
    with stage_bars(hidden=quiet) as show:
        result = plan(source, options, show)
    if plot is not None:
        write_svg(result, plot)
    print_found(result, print_plan, as_json=as_json, plot=plot)
