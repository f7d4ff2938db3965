"""``optimize bisect``: finds the first point at which two runs of a model differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginewright.runtime.shared.errors import MissingDependencyError, counted

from .console import print_json, reported
from .options import AsJson, check_early
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.bisect import BisectReport, FirstDivergence, StoredTensors

EXIT_DIFFERS = 13
"""The exit code if the two runs differ."""
MOST_TENSORS = 10
"""The most tensors that are shown in a terminal."""
EPILOG = (
    "Examples:\n\n"
    "  optimize bisect SmolLM2-135M-Instruct smollm2.bundle\n\n"
    "  optimize bisect SmolLM2-135M-Instruct --recipe int8\n\n"
    "  optimize bisect smollm2.bundle --isa-b portable"
)


def _known_isa(value: str | None) -> str | None:
    """Returns the name of an instruction set.

    Raises typer.BadParameter for one that this processor or build doesn't have.
    """
    if value is not None:
        from enginewright.plugins.native.executable import isas

        if value not in isas():
            raise typer.BadParameter(f"there are no kernels {value!r} here; choose from {', '.join(isas())}")
    return value


@reported
def command(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="The reference: a Hugging Face folder, a GGUF file, a Hub id or a bundle."),
    ],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="The model to examine, of the same kinds as A; by default A itself."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="Without B: the recipe whose passes are examined; default f32."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="The file that the bundle was calibrated with.")
    ] = None,
    recovered: Annotated[
        Path | None,
        typer.Option("--recovered", help="The folder of `optimize recover` with the bundle's weights."),
    ] = None,
    target_a: Annotated[str | None, typer.Option("--target-a", help="The target of bundle A.")] = None,
    target_b: Annotated[str | None, typer.Option("--target-b", help="The target of bundle B.")] = None,
    isa_a: Annotated[
        str | None,
        typer.Option("--isa-a", callback=_known_isa, help="Instruction set for A, such as avx2; default: the best."),
    ] = None,
    isa_b: Annotated[str | None, typer.Option("--isa-b", callback=_known_isa, help="Instruction set for B.")] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Compare on this text; may be repeated. Default: random tokens.")
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option("--tokens", help="Compare on token ids, such as 1,529,25; may be repeated.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Compare only these layers, such as 3,7-9. Default: all.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random tokens.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Allowed relative error; default: an estimate of rounding errors."),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors, no progress.")] = False,
) -> None:
    """Finds the first pass, layer, step and weight at which A and B differ, and shows the values there.

    Exits with 0 if they agree, with 13 if they differ. Needs the extra: pip install 'enginewright\\[export]'.
    """
    if tolerance is not None and not tolerance > 0:
        raise typer.BadParameter(f"{tolerance} is not above 0", param_hint="--tolerance")
    sequences = [_ids(one) for one in tokens or ()]
    numbers = None if layers is None else _layers(layers)
    from enginewright.runtime.shared.progress import loading

    check_early(a, b, recipe=recipe)
    with stage_bars(hidden=quiet) as show:
        loading(show)
        with MissingDependencyError.of_export("bisect: repeating an export"):
            from enginewright.optimizer.bisect import Given, Options, bisect

        report = bisect(
            Given(Path(a), target_a, isa_a),
            Given(Path(a if b is None else b), target_b, isa_b),
            Options(tolerance, recipe, calibration, sequences, text or (), seed, recovered, numbers),
            show,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.agrees:
        raise typer.Exit(EXIT_DIFFERS)


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as e:
        raise typer.BadParameter(f"{text!r} isn't a list of token ids", param_hint="--tokens") from e


def _layers(text: str) -> frozenset[int]:
    """Parses a list of layers: "3,7-9" gives 3, 7, 8 and 9."""
    numbers: set[int] = set()
    for word in text.replace(" ", "").split(","):
        first, dash, last = word.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or (dash and int(first) > int(last)):
            raise typer.BadParameter(f"{word!r} isn't a layer's number, nor a range such as 7-9", param_hint="--layers")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _print(report: BisectReport) -> None:
    lengths = report.sequences
    _row("A", report.a)
    _row("B", report.b)
    _row("compared", f"{report.values_compared} values on {sum(lengths)} tokens in {counted(len(lengths), 'sequence')}")
    if report.layers is not None:
        _row("layers", ", ".join(map(str, report.layers)))
    for note in report.notes:
        _row("note", note)
    if report.tensors is not None:
        _print_tensors(report.tensors)
    for i, smallest in enumerate(report.smallest_factors):
        least = f"{smallest.factor:.4g}" if smallest.factor > 1.001 else f"1 + {smallest.factor - 1:.2g}"
        _row("" if i else "sees", f"in {smallest.between}: factors of {least} and more; least at {smallest.value_name}")
    for i, left in enumerate(report.not_covered):
        _row("" if i else "not run", left)
    if report.agrees:
        at = f", at {report.largest_error_at}" if report.largest_error_at else ""
        _row("result", f"they agree: the largest relative error is {report.largest_error or 0:.2g}{at}")
        return
    if report.first_divergence is None:
        _row("result", "stored tensors differ; the values on these tokens agree")
    else:
        _print_divergence(report.first_divergence)


def _print_tensors(tensors: StoredTensors) -> None:
    same = "all the same" if not tensors.differing else f"{len(tensors.differing)} differ"
    _row("tensors", f"{tensors.compared} compared bit for bit, {tensors.bytes / 1e6:,.1f} MB: {same}")
    for difference in tensors.differing[:MOST_TENSORS]:
        _row("", str(difference))
    if (more := len(tensors.differing) - MOST_TENSORS) > 0:
        _row("", f"and {more} more; --json has all")
    if tensors.not_compared:
        _row("", f"{len(tensors.not_compared)} are the same file's or of other formats, and were not compared")


def _print_divergence(divergence: FirstDivergence) -> None:
    _row("result", f"they first differ in {divergence.stage}" if divergence.stage else "they differ")
    if divergence.stage:
        _row("between", f"{divergence.a} (A), and {divergence.b} (B)")
    if divergence.layer:
        _row("layer", divergence.layer)
    _row("at", divergence.value_name)
    for i, call in enumerate(divergence.calls):
        _row("" if i else "made by", call)
    for i, tensor in enumerate(divergence.tensors):
        _row("" if i else "with", tensor)
    place = divergence.largest
    _row(
        "error",
        f"{divergence.error:.3g} relative, where {divergence.tolerance:.2g} is allowed; B is {divergence.gain:.4f} * A",
    )
    _row("values", f"farthest apart at token {place.token}, column {place.column}: A {place.a:.6g}, B {place.b:.6g}")
    for i, reason in enumerate(divergence.reasons):
        _row("" if i else "why", reason)
    if divergence.others_count:
        more = divergence.others_count - len(divergence.others)
        others = ", ".join(divergence.others) + (f" and {more} more" if more else "")
        _row("besides", f"{others}: each by itself, from values that agree")


def _row(label: str, text: str) -> None:
    typer.echo(f"{label:<10}{text}")
