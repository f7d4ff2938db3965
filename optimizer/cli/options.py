"""Options that several commands share."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def known_target(value: str | None) -> str | None:
    """Returns the target. Raises typer.BadParameter if no target has this name; a bundle isn't checked."""
    if value is not None:
        from enginewright.runtime.executors.open import TARGETS

        if value not in TARGETS:
            raise typer.BadParameter(f"there is no target {value!r}; choose from {', '.join(TARGETS)}")
    return value


def known_targets(values: list[str] | None) -> list[str] | None:
    """Returns the targets unchanged. Raises typer.BadParameter if one doesn't exist."""
    for value in values or ():
        known_target(value)
    return values


@dataclass(frozen=True)
class Flags:
    """Marks a command's parameter, ``Annotated[Mapping[str, Any], Flags(...)]``, that represents several flags.

    Attributes:
        parameters: one for each flag, None by default. The command gets a mapping of the flags that were passed.
    """

    parameters: Sequence[Parameter]

    def __call__(self, **values: Any) -> dict[str, Any]:
        """Returns the values of the flags that were passed."""
        return {name: value for name, value in values.items() if value not in (None, [])}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command with parameters that are dataclasses or ``Flags``: each field or flag becomes an option."""
    options: list[Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[Parameter]]] = {}
    for one in _parameters(command):
        if (group := _group(one.annotation)) is None:
            options.append(one)
        else:
            groups[one.name] = group
            options += group[1]

    @wraps(command)
    def run(**values: Any) -> None:
        objects = {
            name: make(**{member.name: values.pop(member.name) for member in members})
            for name, (make, members) in groups.items()
        }
        command(**values, **objects)

    run.__signature__ = Signature(options)  # type: ignore[attr-defined]  # what inspect and typer look at
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _group(annotation: Any) -> tuple[Callable[..., Any], list[Parameter]] | None:
    """Returns the constructor of a parameter's object, and the options of its fields; None for a single option."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation, _parameters(annotation)
    mark = getattr(annotation, "__metadata__", (None,))[0]
    return (mark, list(mark.parameters)) if isinstance(mark, Flags) else None


def _parameters(of: Callable[..., object]) -> list[Parameter]:
    hints = get_type_hints(of, include_extras=True)
    parameters = signature(of).parameters.values()
    return [one.replace(annotation=hints[one.name], kind=Parameter.KEYWORD_ONLY) for one in parameters]


BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle: a folder that `optimize export` wrote.")]
ModelPath = Annotated[
    str,
    typer.Argument(
        metavar="BUNDLE|MODEL",
        help="A bundle, or a model that is exported to a cached bundle first: a GGUF file, a Hugging Face folder or "
        "an id on the Hub.",
    ),
]
ModelRecipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        help="The recipe to export a model with; default: gguf for a quantized GGUF file, otherwise int8.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
TextOnly = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the text, not the speed.")]
NoProgress = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors, no progress.")]

Threads = Annotated[int, typer.Option(min=0, max=1024, help="Number of threads; 0 means one for each core.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of processes that run the model together, each with --threads threads."
    ),
]
Cut = Annotated[
    str | None,
    typer.Option(
        "--partition", metavar="tensor=N,...", help="Division of the model among ranks; --ranks 2 means tensor=2."
    ),
]
Memory = Annotated[
    str | None, typer.Option(help="Memory for the KV cache, such as 512MiB; default: a quarter of the free memory.")
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        callback=known_target,
        help="The bundle's target to run, such as cpu or onnx; default: the first that runs on this machine.",
    ),
]
Trust = Annotated[
    str | None,
    typer.Option(
        metavar="code|sha256:HASH",
        help="Allow bundles to run code, as the targets tvm, stablehlo, cuda and TensorRT do. The value code allows "
        "any bundle; a hash allows the bundle that `optimize inspect` shows with this hash.",
    ),
]
Provider = Annotated[
    str | None,
    typer.Option(
        help="Library that runs the target: cpu, cuda, tensorrt-rtx, directml or openvino for onnx; cpu, iree or a "
        "PJRT plugin for stablehlo."
    ),
]


def check_early(*models: str | Path | None, recipe: str | None = None) -> None:
    """Checks models and a recipe before torch is imported. Bundles are accepted too.

    Raises the errors of reading them.
    """
    from enginewright.optimizer.capture.find_source import check_named
    from enginewright.optimizer.recipes.recipe import load_recipe
    from enginewright.runtime.bundle import MANIFEST_PATH

    for model in models:
        if model is not None and not (Path(model) / MANIFEST_PATH).is_file():
            check_named(model)
    if recipe is not None and not (os.path.exists(recipe) and not os.path.isfile(recipe)):  # a pipe is read once
        load_recipe(recipe)


def scheduling_given(text: str | None) -> str | dict[str, Any] | None:
    """Returns LLM's ``scheduling`` from an option: a name, or the contents of a TOML file. Raises BadParameter
    otherwise.
    """
    from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
    from enginewright.runtime.scheduler.options import NAMES

    if text is None or text in NAMES:
        return text
    file = Path(text)
    if file.suffix != ".toml":
        raise typer.BadParameter(f"--scheduling: {text!r} is neither {', '.join(NAMES)} nor a .toml file")
    try:
        return tomllib.loads(read_regular(file, most=MOST_JSON_BYTES, piped=True).decode())
    except (OSError, ValueError) as e:
        raise typer.BadParameter(f"--scheduling: {file}: {getattr(e, 'strerror', None) or e}") from e


@dataclass(frozen=True)
class Running:
    """Options that choose the part of a bundle to run, and the machine's resources for it."""

    target: Target = None
    provider: Provider = None
    trust: Trust = None
    context: Annotated[
        int | None, typer.Option(help="Maximum tokens of a prompt plus its answer; default: the model's limit.")
    ] = None
    threads: Threads = 0
    ranks: Ranks = None
    partition: Cut = None
    memory: Memory = None


@dataclass(frozen=True)
class Serving(Running):
    """Options of the engine that runs requests."""

    states_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for cached states of recurrent layers, such as 1GiB; default: enough for one per request.",
        ),
    ] = None
    prefix_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Main memory for cached blocks that are evicted from the GPU's memory, such as 16GiB; default: none.",
        ),
    ] = None
    prefix_folder: Annotated[
        Path | None,
        typer.Option(help="Folder for cached prefixes of prompts, which later runs reuse; default: none."),
    ] = None
    offload_folder: Annotated[
        Path | None,
        typer.Option(help="Folder for keys and values that don't fit into --memory, for models with adaptive context."),
    ] = None
    offload_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum size of --offload-folder, such as 20GiB.")
    ] = "8GiB"
    scheduling: Annotated[
        str | None,
        typer.Option(
            "--scheduling",
            metavar="NAME|FILE",
            help="The order of requests: fcfs (default), priority, fair, offline, or a .toml file with options.",
        ),
    ] = None
    speculate: Annotated[
        str,
        typer.Option(
            metavar="auto|off|lookup|BUNDLE",
            help="Guess tokens and check several in one step, without changing answers. With lookup, guesses are "
            "copied from earlier text; with BUNDLE, a faster model also guesses. On the cpu target, auto is lookup.",
        ),
    ] = "auto"

    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run the ranks on the machines of a Ray cluster: HOST:PORT, or auto."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns keyword arguments for LLM. Raises BadParameter."""
        speculate = None if self.speculate == "off" else self.speculate
        return vars(self) | {"scheduling": scheduling_given(self.scheduling), "speculate": speculate}


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Parses numbers between commas. Raises BadParameter for other text."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as e:
        raise typer.BadParameter(
            f"{option}: {text!r} is not a list of numbers with commas between them, such as 1,4,16"
        ) from e


@dataclass(frozen=True)
class Sampling:
    """Options of sampling; None leaves a setting to the defaults of SamplingParams."""

    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", help="Maximum new tokens; default 256.")] = (
        None
    )
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; higher values are more random.")] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from the K likeliest tokens; 0 is off.")] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens that together have this probability; 1 is off."),
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest token's probability; 0 is off.")
    ] = None
    top_n_sigma: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens more than this number of standard deviations below the largest logit; 0 is off."
        ),
    ] = None
    xtc_probability: Annotated[
        float | None, typer.Option(help="Probability of dropping all but one of the likeliest tokens (XTC); 0 is off.")
    ] = None
    xtc_threshold: Annotated[
        float | None, typer.Option(help="Minimum probability of a token that XTC may drop; default 0.1.")
    ] = None
    dry_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Make repeated sequences less likely (DRY); 0 is off, 0.8 is usual. --param sets DRY's other fields."
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Make tokens that have occurred less likely; 1 is off, 1.1 is mild.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of sampling; the same seed gives the same tokens.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None
    schema: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="The answer is JSON that follows this JSON schema.")
    ] = None
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this regular expression.")] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is this text, or that of another --choice; may be repeated.")
    ] = None
    grammar: Annotated[Path | None, typer.Option(help="A file with a Lark grammar that the answer follows.")] = None
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Any other field of SamplingParams, such as n=3 or num_beams=4; may be repeated.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns keyword arguments for SamplingParams of the passed options. Raises BadParameter for an unknown
        --param.
        """
        values = {name: value for name, value in vars(self).items() if value is not None and value != []}
        form = {"json" if name == "schema" else name: values.pop(name) for name in _FORMS if name in values}
        if len(form) > 1:
            raise typer.BadParameter(f"only one of {', '.join(f'--{name}' for name in _FORMS)} may be given")
        for name, value in form.items():
            values["structured_outputs"] = {name: _text_of(name, value)}
        for text in values.pop("param", []):
            name, value = named_value("--param", text, "frequency_penalty=0.5")
            _check_param(name, values)
            values[name] = {int(token): bias for token, bias in value.items()} if name == "logit_bias" else value
        return values


_FORMS = ("schema", "regex", "choice", "grammar")


def _text_of(name: str, value: Any) -> Any:
    """Returns the value of an output-form option: a schema or the text of its file, or the text of a grammar's file.

    Raises typer.BadParameter if the file can't be read.
    """
    if name == "grammar" or (name == "json" and not value.lstrip().startswith(("{", "true", "false"))):
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            option = "--grammar" if name == "grammar" else "--schema"
            raise typer.BadParameter(f"{option} {value}: {getattr(e, 'strerror', None) or e}") from e
    return value


def _check_param(name: str, said: Mapping[str, Any]) -> None:
    from enginewright import SamplingParams

    known = [field.name for field in fields(SamplingParams)]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise typer.BadParameter(
            f"--param {name}: SamplingParams has no such field" + (f"; did you mean {near[0]}?" if near else "")
        )
    if name in said:
        raise typer.BadParameter(f"--param {name}: it was said already")


def named_value(option: str, text: str, example: str) -> tuple[str, Any]:
    """Parses ``text`` of the form NAME=VALUE, and returns the name and the value: parsed if it is JSON (true, 3, [1,
    2]), else text.

    Raises BadParameter, naming ``option`` and an ``example`` of the form, if the name is missing.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise typer.BadParameter(f"{option} {text}: not of the form NAME=VALUE, such as {example}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
