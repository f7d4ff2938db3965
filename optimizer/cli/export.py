"""``optimize export``: a model in, a bundle out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginewright.runtime.shared.kv_formats import CACHES
from enginewright.runtime.shared.targets import OWN

from .console import command_line, drop_stdout, print_error, print_json, print_styled, reported
from .options import AsJson
from .progress import stage_bars
from .report import print_summary

if TYPE_CHECKING:
    from enginewright.optimizer.export.report import ExportReport
    from enginewright.optimizer.report.bundle_report import BundleReport
    from enginewright.runtime.bundle.reader import Bundle

EPILOG = (
    "Examples:\n\n"
    "  optimize export SmolLM2-135M-Instruct -o smollm2.bundle\n\n"
    "  optimize export org/model-GGUF:Q8_0 -o model.bundle\n\n"
    "  optimize export model.gguf --recipe int8 --target cpu --force\n\n"
    "  optimize export model.gguf --target onnx --target tensorrt-rtx --gpu 8.6,8.9\n\n"
    "  optimize export model.gguf --name Llama-1B --no-cache\n\n"
    "  optimize export gemma-3-4b-it --part text --recipe int8\n\n"
    "  optimize export model.gguf -o model.bundle --json --quiet > report.json"
)

RENAMED = {"--context-length": "--context"}

_QUESTION, _BEGINNING = "What is the capital of Germany?", "The capital of Germany is"
"""The prompts of the suggested command: for models that answer, and for models that only continue a text."""


def default_output(source: str) -> Path:
    """Returns the default bundle, ``Llama-1B.bundle`` for ``models/Llama-1B``, ``Llama-1B.gguf`` and ``org/Llama-1B``.

    It is in the current folder, or next to the model's folder if the current folder is within that.
    """
    from enginewright.runtime.bundle.hub_id import parse_hub_id

    place = Path(source).resolve()
    if place.is_dir() and Path.cwd().is_relative_to(place):
        return Path(os.path.relpath(place.with_name(f"{place.name}.bundle")))
    if place.exists():
        name = place.name
    else:
        hub = parse_hub_id(source)
        name = source.rstrip("/").rsplit("/", 1)[-1] if hub is None else hub.title
    return Path(name.removesuffix(".gguf") + ".bundle")


@reported
def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Hugging Face folder, a GGUF file, or a model's id on the Hub."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The bundle to write; by default named after the model.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of a model on the Hub; default main.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="A built-in recipe (see `optimize recipes`) or a TOML file. Default: that of --recovered; otherwise "
            "gguf for a quantized GGUF file, f32 for others.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            "-t",
            help=f"Target to build for, instead of the recipe's; may be repeated. Targets: {', '.join(OWN)}.",
        ),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option("--context", min=1, help="The longest request in tokens, instead of the recipe's."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            help="A file of text or JSONL for recipes with calibration; default: text sampled from the model.",
        ),
    ] = None,
    recovered: Annotated[
        Path | None,
        typer.Option("--recovered", help="A folder of `optimize recover`, whose weights are exported."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", help="Maximum memory of the export, such as 4GiB."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", help="GPUs to build engines for, by name or compute capability, such as h100,8.9; may be repeated."
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            help=f"Format of keys and values, instead of the recipe's: {', '.join(CACHES)}, or auto:BYTES per token.",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", metavar="N,...", help="Numbers of ranks that the bundle must support, such as 2,4."),
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(
            "--partition",
            metavar="NAME=N,...",
            help="Partition that the bundle must support, such as tensor=2,pipeline=2; may be repeated.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The model's name in the bundle; by default that of its file or folder."),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--part", metavar="text", help="Export only the text decoder of a model that also takes images or sounds."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="FOLDER[=WEIGHT]",
            help="Merge a PEFT adapter into the weights, such as my-adapter=0.5; may be repeated.",
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Reuse the bundle of an equal export, and cache new bundles (see `optimize cache`).",
        ),
    ] = True,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the bundle if it exists.")] = False,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Before the summary, print what `optimize report` prints.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).")] = False,
) -> None:
    """Compiles MODEL into a bundle that `optimize generate` and the runtime run.

    Needs the extra: pip install 'enginewright\\[export]'.
    """
    if verbose and (quiet or as_json):
        raise typer.BadParameter("--verbose is for the text that --quiet and --json leave out")
    import enginewright
    from enginewright.runtime.shared.errors import PartialExportError

    partial: PartialExportError | None = None
    with stage_bars(hidden=quiet) as show:
        try:
            report = enginewright.export(
                model,
                output or default_output(model),
                revision=revision,
                recipe=recipe,
                targets=target or None,
                context_length=context_length,
                calibration=calibration,
                recovered=recovered,
                max_memory=max_memory,
                gpus=gpu or None,
                kv_cache=kv_cache,
                partitions=[*(ranks or "").replace(",", " ").split(), *(partition or [])] or None,
                name=name,
                part=part,
                lora=lora or None,
                overwrite=force,
                cache=cache,
                progress=show,
            )
        except PartialExportError as e:
            partial, report = e, e.report
    try:
        if as_json:
            print_json(report.to_json())
        elif not quiet:
            _print_summary(report, verbose=verbose, named=recipe is not None or recovered is not None)
        sys.stdout.flush()
    except BrokenPipeError:  # the bundle is there and whole: an export that leaves one ends with 0
        drop_stdout()
    if partial is not None:
        print_error(partial)
        raise typer.Exit(partial.exit_code)


def _print_summary(report: ExportReport, *, verbose: bool, named: bool) -> None:
    """Prints the summary of an export: the bundle, its size, quality and speed, the cost, and the next command to run.

    ``named``: True if an option names the recipe; otherwise it follows from the file.
    """
    from enginewright.optimizer.export.check_arguments import AS_QUANTIZED, KEEPS_BLOCKS
    from enginewright.optimizer.report import numbers
    from enginewright.optimizer.report.bundle_report import open_report
    from enginewright.optimizer.report.lines import already_quantized_lines
    from enginewright.optimizer.report.page import roofline_view

    opened = open_report(Path(report.path))
    if verbose:
        print_summary(opened)
        typer.echo()
    limit = "" if report.memory is None else f" of {numbers.format_bytes(report.memory.limit)} allowed"
    recipe = AS_QUANTIZED if report.recipe == KEEPS_BLOCKS and not named else report.recipe
    speeds = [s for roofline in opened.rooflines for s in roofline_view(roofline).shapes]
    rows = {
        "bundle": f"{report.path}: {opened.bundle.model.name}, recipe {recipe}, for {', '.join(report.targets)}",
        "size": f"{opened.size_line()}; requests of up to {report.context_length:,} tokens",
        "source": "; ".join(already_quantized_lines(opened.saved.document)) if opened.saved.document else "",
        "quality": opened.quality_line() or "not compared with the source: no target of the bundle runs here",
        "speed": "; ".join(
            f"{s.shape.name}: {numbers.rate(s.tokens_per_second)} tokens/s" for s in speeds if s.tokens_per_second
        ),
        "took": f"{numbers.duration(report.seconds)}, {numbers.format_bytes(report.peak_rss_bytes)} of memory{limit}",
        "kept": "" if report.kept_since is None else f"since {report.kept_since}, by an earlier export of the same",
        "next": _next(opened),
    }
    for label, line in rows.items():
        if line:
            typer.echo(f"{label:<9}{line}")
    for warning in _warnings(report):
        print_styled(f"warning: {warning}", fg="yellow")


def _next(opened: BundleReport) -> str:
    """Returns a command to try next, which works with this bundle on this machine."""
    bundle = opened.bundle
    unbuilt = [name for name, target in bundle.targets.items() if target.state != "ready"]
    if len(unbuilt) == len(bundle.targets):
        return command_line("build", str(bundle.path), "--target", unbuilt[0], *_trust(bundle))
    if opened.saved.document is None or not opened.saved.document.verification:
        return command_line("doctor", str(bundle.path))
    if "tokenizer/tokenizer.json" not in bundle.files:
        return command_line("bench", str(bundle.path), *_trust(bundle))
    if bundle.model.pooling is not None:
        embeds = bundle.model.pooling.task == "embed"
        words = ("embed", str(bundle.path), "texts.txt", "-o", "vectors.npy") if embeds else ("serve", str(bundle.path))
        return command_line(*words, *_trust(bundle))
    chat = "tokenizer/chat_template.jinja" in bundle.files
    return command_line("generate", str(bundle.path), _QUESTION if chat else _BEGINNING, *_trust(bundle))


def _trust(bundle: Bundle) -> tuple[str, ...]:
    """Returns the options that allow the bundle's own code to run, if every target has code.

    The user has just exported the bundle, and so knows its origin.
    """
    from enginewright.runtime.executors.open import carried_code

    return ("--trust", "code") if all(carried_code(name) is not None for name in bundle.targets) else ()


def _warnings(report: ExportReport) -> list[str]:
    from enginewright.optimizer.report.numbers import format_bytes

    warnings = [] if report.calibration is None else list(report.calibration.coverage.warnings)
    if report.memory is not None and not report.memory.kept:
        most = format_bytes(report.memory.limit)
        warnings.append(f"{format_bytes(report.peak_rss_bytes)} of memory is more than the {most} allowed")
    if report.template_appends is False:
        warnings.append(
            "the chat template changes earlier turns of a conversation, so each turn computes more of it anew than the "
            "turn itself (docs/use/chat-templates.md)"
        )
    return warnings
