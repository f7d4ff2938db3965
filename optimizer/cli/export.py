"""``optimize export``: a model in, a bundle out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, reported
from .options import AsJson
from .progress import stage_bars
from .report import print_summary

if TYPE_CHECKING:
    from enginewright.optimizer.export_report import ExportReport

NAME = "export"
EPILOG = (
    "Examples:\n\n"
    "  optimize export SmolLM2-135M-Instruct -o smollm2.bundle\n\n"
    "  optimize export model.gguf --recipe int8 --target cpu --force\n\n"
    "  optimize export model.gguf --target onnx --target tensorrt-rtx --gpu 8.6,8.9\n\n"
    "  optimize export model.gguf -o model.bundle --json --quiet > report.json"
)


def default_output(source: str) -> Path:
    """``models/Llama-1B`` and ``Llama-1B.gguf`` become ``Llama-1B.bundle`` in the current folder."""
    name = Path(source).resolve().name if Path(source).exists() else source.rstrip("/").rsplit("/", 1)[-1]
    return Path(name.removesuffix(".gguf") + ".bundle")


@reported
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a GGUF file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The bundle to write; by default named after the model.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="A built-in recipe (see `optimize recipes`) or a TOML file. Default: f32, or what was recovered for.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", help="What to build for, instead of what the recipe says; may be repeated."),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option("--context-length", min=1, help="The longest request in tokens, instead of what the recipe says."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            help="Text, or JSONL, that calibrated recipes look at; without it they sample from the model.",
        ),
    ] = None,
    recovered: Annotated[
        Path | None,
        typer.Option("--recovered", help="A folder of `optimize recover`, whose weights are exported."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", help="Most memory that the export may take, such as 4GiB."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", help="Compute capabilities that engines are built for, such as 8.9,12.0; may be repeated."
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            help="What keys and values are stored in, instead of what the recipe says: f32, bf16, int8, fp8.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the bundle if it exists.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).")] = False,
) -> None:
    """Compiles MODEL into a bundle that `optimize generate` and the runtime run.

    Needs the extra: pip install 'enginewright\\[export]'.
    """
    import enginewright

    with stage_bars(hidden=quiet) as show:
        report = enginewright.export(
            model,
            output or default_output(model),
            recipe=recipe,
            targets=target or None,
            context_length=context_length,
            calibration=calibration,
            recovered=recovered,
            max_memory=max_memory,
            gpus=gpu or None,
            kv_cache=kv_cache,
            overwrite=force,
            progress=show,
        )
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        _print_report(report)


def _print_report(report: ExportReport) -> None:
    from enginewright.optimizer.report.bundle_report import open_report
    from enginewright.runtime.kv_cache.cache_groups import format_bytes

    print_summary(open_report(Path(report.path)))
    print(
        f"\n{report.path}: for requests of up to {report.context_length:,} tokens; "
        f"{format_bytes(report.bundle_bytes)}, in {report.seconds:.1f} s, "
        f"{format_bytes(report.peak_rss_bytes)} of memory at most{_of_limit(report)}"
    )


def _of_limit(report: ExportReport) -> str:
    from enginewright.runtime.kv_cache.cache_groups import format_bytes

    if report.memory is None:
        return ""
    allowed = format_bytes(report.memory.limit)
    return f" of {allowed} allowed" if report.memory.kept else f"\nwarning: that is more than the {allowed} allowed"
