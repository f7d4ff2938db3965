"""``optimize eval``: measures how well a bundle predicts, alone or compared with another model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginewright.runtime.shared.errors import RequestError, counted

from .console import print_json, reported
from .exported import exported
from .options import AsJson, ModelPath, ModelRecipe, Running, grouped
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.evaluate import ChoiceReport, EvaluationReport, TextsReport

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
WINDOWS, TEXTS = 3, 64
"""The windows, or the texts of a model that computes whole texts, that are read without --full.

They take seconds on a small model.
"""


@reported
@grouped
def command(
    model: ModelPath,
    *,
    recipe: ModelRecipe = None,
    text: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="A text to predict, in UTF-8, or texts to embed, one per line; default: 5,000 words."
        ),
    ] = "built-in",
    against: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Compare with a bundle, a Hugging Face folder, a GGUF file or a Hub id."),
    ] = None,
    choices: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='A JSONL file of questions, or "built-in" for 40 questions that come with Enginewright.',
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Maximum tokens that are predicted together; default: 512, or the context if shorter."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window's start to the next one's; default: half of --window.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help=f"Read the whole text; by default {WINDOWS} windows, or {TEXTS} lines.")
    ] = False,
    running: Running,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors, no progress.")] = False,
) -> None:
    """Measures perplexity, KL divergence from another model, and accuracy on multiple-choice questions.

    Embedding models, rerankers and classifiers are compared with another model on each line of --text.
    Comparing with a source model needs the extra: pip install 'enginewright\\[export]'.
    """
    from enginewright.optimizer.evaluate import evaluate
    from enginewright.runtime.bundle.reader import Bundle

    bundle = exported(model, recipe=recipe, quiet=quiet)
    if (pooling := Bundle.open(bundle, running.trust).model.pooling) is not None:
        not_for_it = {"choices": choices, "window": window, "stride": stride}
        compared = _texts(bundle, pooling.task, text, against, not_for_it, full=full, running=running, quiet=quiet)
        if as_json:
            print_json(compared.to_json())
        else:
            _print_texts(compared)
        return
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


def _texts(
    bundle: Path,
    task: str,
    text: str,
    against: Path | None,
    not_for_it: Mapping[str, object],
    *,
    full: bool,
    running: Running,
    quiet: bool,
) -> TextsReport:
    """Compares a bundle that computes whole texts with another model.

    ``not_for_it``: the options that only models which generate text have. Raises RequestError if one of these is
    passed, or if there is no model to compare with.
    """
    from enginewright.optimizer.evaluate import evaluate_texts
    from enginewright.optimizer.evaluate.models import OpenOptions

    for name, value in not_for_it.items():
        if value is not None:
            raise RequestError(
                f"{name}: it is for models that generate text, and {bundle} is for {task}", hint=f"Leave out --{name}."
            )
    if against is None:
        raise RequestError(
            f"against: {bundle} is a model for {task}, which has no perplexity; it is compared with another model",
            hint="Pass --against MODEL: its source, or another bundle of it.",
        )
    with stage_bars(hidden=quiet, counts=True, remaining=True) as show:
        return evaluate_texts(
            bundle,
            against,
            text=text,
            texts=None if full else TEXTS,
            options=OpenOptions(**vars(running)),
            progress=show,
        )


def _print_texts(report: TextsReport) -> None:
    from enginewright.optimizer.measure.text_metrics import shown_metrics

    part = "" if report.texts == report.texts_in_file else f" of {report.texts_in_file:,}; --full reads more"
    _row("model", f"{report.model} ({report.bundle}), {report.task}")
    _row("against", report.against)
    _row("text", f"{report.source}: {report.tokens:,} tokens in {counted(report.texts, 'text')}{part}")
    for label, value in shown_metrics(report.metrics):
        typer.echo(f"{label:<28}{value}")


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
