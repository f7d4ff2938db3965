"""``optimize recover``: trains a model that a recipe changed, to reduce its loss of quality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import command_line, print_json, reported
from .options import AsJson, check_early, grouped
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.recover import RecoveryReport

EPILOG = (
    "Examples:\n\n"
    "  optimize recover SmolLM2-135M-Instruct -r int4 -o smollm2.recovered --text notes.txt\n\n"
    "  optimize recover SmolLM2-135M-Instruct -r int4 -o smollm2.recovered --text notes.txt --resume\n\n"
    "  optimize export SmolLM2-135M-Instruct --recovered smollm2.recovered -o smollm2.bundle"
)


@dataclass(frozen=True)
class Training:
    """Options of the training, by the names of RecoverOptions."""

    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the optimizer.")] = 300
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens per step.")] = 2048
    sequence_length: Annotated[int, typer.Option("--sequence-length", min=8, help="Maximum tokens of a sequence.")] = (
        256
    )
    learning_rate: Annotated[float, typer.Option("--lr", help="The highest learning rate.")] = 1e-4
    temperature: Annotated[
        float, typer.Option("--temperature", help="Divisor of both models' logits before they are compared.")
    ] = 1.0
    hidden: Annotated[
        float, typer.Option("--hidden", help="Weight of hidden states' errors in the loss; 0 is off.")
    ] = 0.0
    accumulate: Annotated[
        int, typer.Option("--accumulate", min=1, help="Parts of a step, run one after the other to save memory.")
    ] = 1
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", min=1, help="Steps from one checkpoint to the next.")
    ] = 100
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of sampling, and of the order of sequences.")] = 0
    sampled_tokens: Annotated[
        int, typer.Option("--sampled-tokens", min=256, help="Number of tokens to sample without --text.")
    ] = 65536


@reported
@grouped
def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The source: a Hugging Face folder, a GGUF file or a Hub id.")
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder for the weights, checkpoints and the plot.")],
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="The recipe that changes the model: a built-in one or a TOML file.")
    ],
    text: Annotated[
        Path | None,
        typer.Option("--text", help="A file of text or JSONL to train on; default: text sampled from the model."),
    ] = None,
    training: Training,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="A file of text or JSONL for recipes with calibration.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Number of threads; 0 lets torch choose.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the recovery if it exists.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).")] = False,
) -> None:
    """Trains a smaller model, which a recipe makes from MODEL, to give MODEL's predictions.

    `optimize export --recovered` exports the result. Ctrl-C writes a checkpoint. Needs the extra: pip install
    'enginewright\\[export]'.
    """
    import enginewright
    from enginewright.runtime.shared.progress import loading

    check_early(model, recipe=recipe)
    with stage_bars(hidden=quiet or as_json, remaining=True) as show:
        loading(show)
        report = enginewright.recover(
            model,
            output,
            recipe=recipe,
            text=text,
            options=enginewright.RecoverOptions(**vars(training), threads=threads),
            calibration=calibration,
            resume=resume,
            overwrite=force,
            progress=show,
        )
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        _print(report, model)


def _print(report: RecoveryReport, model: str) -> None:
    first, last = report.measured[0], report.measured[-1]
    print(f"{report.steps:,} steps on {report.tokens:,} tokens ({report.origin}), recipe {report.recipe}")
    print(f"on {report.held_out_tokens:,} held-out tokens (the source's perplexity is {last.source_perplexity:.5g}):")
    print(f"  {'':<8}{'KL':>10}{'perplexity':>12}")
    for name, one in (("before", first), ("after", last)):
        print(f"  {name:<8}{one.kl:>10.4g}{one.perplexity:>12.5g}")
    print(
        f"\n{report.path}: {report.parameters:,} weights, in {report.seconds:.1f} s "
        f"({report.tokens_per_second:,.0f} tokens/s)\n"
        f"next: {command_line('export', model, '--recovered', str(report.path))}"
    )
