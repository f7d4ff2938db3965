"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def known_target(value: str | None) -> str | None:
    """Raises typer.BadParameter for a target that doesn't exist; whether a bundle has it is seen later."""
    if value is not None:
        from enginewright.runtime.executors.open import TARGETS

        if value not in TARGETS:
            raise typer.BadParameter(f"there is no target {value!r}; choose from {', '.join(TARGETS)}")
    return value


def known_targets(values: list[str] | None) -> list[str] | None:
    """The same of several."""
    for value in values or ():
        known_target(value)
    return values


BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that `optimize export` wrote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
NoProgress = Annotated[bool, typer.Option("--quiet", "-q", help="No progress: only what is found, and errors.")]

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Most new tokens; default 256.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; higher is more random.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the K likeliest tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that make up this share; 1 is off.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one; 0 is off.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Make tokens that were seen already less likely; 1 is off, 1.1 is mild.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")]
Threads = Annotated[int, typer.Option(min=0, max=1024, help="Threads; 0 takes one for each core.")]
Memory = Annotated[
    str | None, typer.Option(help="Memory for the KV cache, such as 512MiB; by default a quarter of what is free.")
]
PrefixFolder = Annotated[
    Path | None,
    typer.Option(help="Keep what is computed of conversations in this folder, for later runs; by default nowhere."),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        callback=known_target,
        help="What to run of the bundle: cpu, onnx, tensorrt-rtx, tensorrt, cuda, tvm, stablehlo; default: the first.",
    ),
]
Provider = Annotated[
    str | None,
    typer.Option(
        help="What runs target onnx: cpu, cuda, tensorrt-rtx, directml or openvino; stablehlo: cpu or a PJRT plugin."
    ),
]
Context = Annotated[int | None, typer.Option(help="Most tokens of a request and its answer; by default the model's.")]
System = Annotated[str | None, typer.Option(help="A system message, said before the first prompt.")]


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Numbers between commas. Raises BadParameter for what isn't that."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as e:
        raise typer.BadParameter(
            f"{option}: {text!r} is not a list of numbers with commas between them, such as 1,4,16"
        ) from e


@dataclass(frozen=True)
class Sampling:
    """What was said about sampling; None is left to the defaults of SamplingParams."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: list[str] | None

    def given(self) -> dict[str, Any]:
        """Keyword arguments for SamplingParams: only what was said."""
        return {name: value for name, value in vars(self).items() if value is not None and value != []}
