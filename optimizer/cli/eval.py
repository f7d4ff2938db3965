"""``optimize eval``: how well a bundle predicts, alone or against another model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginewright.runtime.shared.errors import counted

from .console import print_json, reported
from .exported import exported
from .options import AsJson, ModelPath, ModelRecipe, Running, grouped
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.evaluate import ChoiceReport, EvaluationReport

NAME = "eval"
EPILOG = (
    "Examples:\n\n"
    "  optimize eval smollm2.bundle\n\n"
    "  optimize eval model.gguf --recipe int4-awq --against model.gguf\n\n"
    "  optimize eval smollm2-int8.bundle --against SmolLM2-135M-Instruct\n\n"
    "  optimize eval smollm2.bundle --target onnx --against smollm2.bundle\n\n"
    "  optimize eval smollm2.bundle --full\n\n"
    "  optimize eval smollm2.bundle --text book.txt --window 1024 --stride 512\n\n"
    "  optimize eval smollm2.bundle --choices questions.jsonl --json --quiet > figures.json"
)
WINDOWS = 3
"""The windows that are read unless --full is given: seconds on a small model, some 800 scored tokens."""


@reported
@grouped
def command(
    model: ModelPath,
    *,
    recipe: ModelRecipe = None,
    text: Annotated[
        str, typer.Option(metavar="FILE", help="The text to predict, in UTF-8; built-in is one of some 5,000 words.")
    ] = "built-in",
    against: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Compare with a bundle, a Hugging Face folder, a GGUF file or a Hub id."),
    ] = None,
    choices: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Questions to answer, as JSONL; built-in are 40 of them."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Most tokens that are predicted together; by default 512, or the context.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from a window's start to the next; by default half of the window.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help=f"Read all of the text; by default {WINDOWS} windows, spread over it.")
    ] = False,
    running: Running,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the figures.")] = False,
) -> None:
    """Perplexity of a text; KL and agreement with another model; accuracy on multiple-choice questions.

    Comparing with a source model needs the extra: pip install 'enginewright\\[export]'.
    """
    from enginewright.optimizer.evaluate import evaluate

    bundle = exported(model, recipe=recipe, quiet=quiet)
    with stage_bars(hidden=quiet, counts=True, remaining=True) as show:
        report = evaluate(
            bundle,
            text=text,
            against=against,
            choices=choices,
            window=window,
            stride=stride,
            windows=None if full else WINDOWS,
            **vars(running),
            progress=show,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)


def _print_report(report: EvaluationReport) -> None:
    text, other = report.text, report.comparison
    _row("model", f"{report.model} ({report.bundle})")
    _row("text", f"{text.source}: {text.tokens:,} tokens, {text.scored:,} of them scored")
    part = "" if text.windows == text.windows_in_text else f"; the text has {text.windows_in_text:,}: --full reads all"
    _row("windows", f"{text.windows:,} of {text.window:,} tokens, {text.stride:,} apart{part}")
    where = "" if text.windows == text.windows_in_text else "; of these windows alone, and exports read others"
    _row("perplexity", f"{text.perplexity:.4f} ({text.nll:.6f} nats a token){where}")
    if report.choices is not None:
        _row("choices", _accuracy(report.choices))
    if other is not None:
        typer.echo()
        _row("against", other.against)
        _row("perplexity", f"{other.perplexity:.4f} ({other.nll:.6f} nats a token)")
        if other.choices is not None:
            _row("choices", _accuracy(other.choices))
        _row("KL", f"{other.kl_mean:.3e} nats a token on average, {other.kl_max:.3e} at most")
        _row("top-1", f"{other.top1_agreement:.2%} the same")
        _row("logits", f"{other.max_logit_difference:.3e} apart at most")


def _accuracy(choices: ChoiceReport) -> str:
    questions = counted(choices.questions, "question")
    return f"{choices.source}: {questions}, acc {choices.acc:.1%}, acc_norm {choices.acc_norm:.1%}"


def _row(label: str, text: str) -> None:
    typer.echo(f"{label:<12}{text}")
