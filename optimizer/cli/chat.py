"""``optimize chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import typer

from enginewright.plugins.shared.errors import RequestError

from .console import print_error, print_json, print_styled, reported
from .options import (
    AsJson,
    BundlePath,
    Context,
    MaxTokens,
    Memory,
    MinP,
    Param,
    PrefixFolder,
    Provider,
    RepetitionPenalty,
    Sampling,
    SchedulingGiven,
    Seed,
    Speculate,
    Stop,
    System,
    Target,
    Temperature,
    Threads,
    TopK,
    TopP,
    scheduling_given,
)
from .streaming import StreamPrinter, result_row
from .template_options import Set, Tools, template_options

if TYPE_CHECKING:
    from enginewright.runtime.llm import LLM
    from enginewright.runtime.requests.sampling import SamplingParams

NAME = "chat"
EPILOG = (
    "Examples:\n\n"
    "  optimize chat smollm2.bundle\n\n"
    '  optimize chat smollm2.bundle --system "Answer briefly." --temperature 0.7\n\n'
    "  echo Hello | optimize chat smollm2.bundle --max-tokens 32 --scheduling classes.toml"
)
HELP = """\
  /help          shows this
  /reset         forgets the conversation
  /system TEXT   sets the system message and begins anew; without TEXT, shows it
  /exit          ends (so does Ctrl-D)
Ctrl-C stops an answer."""


@reported
def command(
    bundle: BundlePath,
    system: System = None,
    tools: Tools = None,
    variables: Set = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    param: Param = None,
    target: Target = None,
    provider: Provider = None,
    context: Context = None,
    threads: Threads = 0,
    memory: Memory = None,
    prefix_folder: PrefixFolder = None,
    scheduling: SchedulingGiven = None,
    speculate: Speculate = "auto",
    as_json: AsJson = False,
) -> None:
    """A conversation in the terminal. From a pipe each line is a turn, and only the answers are printed."""
    from enginewright.runtime.text.template_process import template_process

    template_process.start()  # beside the imports and the opening of the model
    from enginewright import LLM, SamplingParams

    sampling = Sampling(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, param)
    params_given = sampling.given()
    params = SamplingParams(**params_given)
    for name in ("n", "best_of", "num_beams"):
        if name in params_given:
            raise typer.BadParameter(f"--param {name}: a turn of a conversation has one answer, as it comes")
    options = template_options(tools, variables)
    interactive = sys.stdin.isatty()
    if interactive and as_json:
        raise typer.BadParameter("--json is for a conversation from a pipe, which has an end")
    if interactive:
        import readline  # noqa: F401  editing and history, for input()
    placed = {"target": target, "provider": provider, "context": context, "threads": threads, "memory": memory}
    served: dict[str, Any] = placed | {"prefix_folder": prefix_folder, "scheduling": scheduling_given(scheduling)}
    served["speculate"] = None if speculate == "off" else speculate
    with LLM(bundle, **served) as llm:
        if not llm.has_chat_template:
            raise RequestError(f"{bundle}: this model has no chat template", hint="Use `optimize generate` instead.")
        if interactive:
            print(f"{llm.model.name}. /help shows what can be typed.", file=sys.stderr)
        if not as_json:
            _converse(lambda messages: _answer(llm, messages, params, options, interactive), system, interactive)
            return
        rows: list[dict[str, Any]] = []

        def collect(messages: list[dict[str, Any]]) -> str:
            (result,) = llm.chat(messages, params, **options)
            if result.error is not None:
                raise result.error
            rows.append({"prompt": messages[-1]["content"]} | result_row(result))
            return result.text

        start = time.perf_counter()
        _converse(collect, system, interactive)
    print_json({"results": rows, "seconds": time.perf_counter() - start})


def _converse(answer: Callable[[list[dict[str, Any]]], str], system: str | None, interactive: bool) -> None:
    """``answer``: what the model says to a conversation."""
    turns: list[dict[str, Any]] = []
    for line in _lines(interactive):
        word, _, rest = line.partition(" ")
        if word == "/exit":
            return
        if word == "/help":
            print(HELP, file=sys.stderr)
        elif word == "/reset":
            turns.clear()
        elif word == "/system":
            if rest.strip():
                system = rest.strip()
                turns.clear()
            print(f"system: {system or 'none'}", file=sys.stderr)
        elif word.startswith("/"):
            print(f"there is no {word}; /help shows what there is", file=sys.stderr)
        else:
            turns.append({"role": "user", "content": line})
            before = [{"role": "system", "content": system}] if system is not None else []
            try:
                said = answer([*before, *turns])
            except RequestError as e:
                if not interactive:
                    raise
                print_error(e)
                turns.pop()
                if turns:
                    print_styled("  /reset forgets the conversation so far.", dim=True)
            else:
                turns.append({"role": "assistant", "content": said})


def _answer(
    llm: LLM,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    options: dict[str, Any],
    interactive: bool,
) -> str:
    """What the model says, printed as it comes. Ctrl-C in a terminal ends the answer, not the conversation."""
    printer = StreamPrinter()
    with closing(llm.stream_chat(messages, params, **options)) as pieces:
        try:
            printer.print(pieces)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(" (stopped)")
    if interactive:
        print_styled(printer.speed(), dim=True)
    return printer.text


def _lines(interactive: bool) -> Iterator[str]:
    """Lines that are not blank, typed behind a prompt or from a pipe."""
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        if not interactive and not line:
            return
        if line.strip():
            yield line.strip()
