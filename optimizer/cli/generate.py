"""``optimize generate``: a prompt in, text out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from enginewright.runtime.bundle.hub_id import is_model
from enginewright.runtime.shared.errors import EnginewrightError

from .console import print_json, reported
from .exported import exported
from .options import AsJson, ModelPath, ModelRecipe, Sampling, Serving, TextOnly, grouped
from .streaming import StreamPrinter, conversation, result_row
from .template_options import Template
from .terminal import shown

EPILOG = (
    "Examples:\n\n"
    '  optimize generate smollm2.bundle "Write one sentence about the ocean."\n\n'
    '  optimize generate model.gguf "Write one sentence about the ocean."\n\n'
    '  optimize generate smollm2.bundle "Tell me a story." --temperature 0.8 --seed 7\n\n'
    '  optimize generate smollm2.bundle "Is the sky blue?" --choice yes --choice no\n\n'
    '  optimize generate smollm2.bundle "Name a colour." "Name a fruit." --json\n\n'
    '  optimize generate smollm2.bundle "Name a colour." --target onnx --context 1024\n\n'
    '  optimize generate smollm2.bundle "Name a fruit." --param num_beams=4 --param n=2\n\n'
    '  optimize generate smollm2.bundle "Name a colour." "Name a fruit." --scheduling offline\n\n'
    '  optimize generate smollm2.bundle "Say this again: one, two, three, four." --speculate lookup\n\n'
    '  echo "Once upon a time" | optimize generate smollm2.bundle - --raw'
)


@reported
@grouped
def command(
    model: ModelPath,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")],
    *,
    sampling: Sampling,
    template: Template,
    recipe: ModelRecipe = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    serving: Serving,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics: cache, preemptions, buckets.")] = False,
    as_json: AsJson = False,
    quiet: TextOnly = False,
) -> None:
    """Answers a prompt, and prints the text as it is generated; several prompts run together."""
    from enginewright.runtime.text.template_process import template_process

    if not raw and not is_model(model):
        template_process.start()  # beside the imports and the opening of the bundle
    from enginewright import LLM, SamplingParams

    _check(model, prompts, template if raw else None)
    params = SamplingParams(**sampling.given())
    texts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]
    options = template.given()
    served = serving.given()
    bundle = exported(model, recipe=recipe, quiet=quiet)
    opened = time.perf_counter()
    with LLM(bundle, **served) as llm:
        # An empty prompt is an error of generate's; a template would hide it among its own tokens.
        needs_template = template.system is not None or options or "default" in llm.tokenizer.chat_templates
        chat = not raw and all(texts) and bool(needs_template)
        conversations = [conversation(text, template.system) for text in texts]
        several = params.n > 1 or params.best_of is not None or params.num_beams > 1
        if len(texts) == 1 and not as_json and not several:
            stream = llm.stream_chat(conversations[0], params, **options) if chat else llm.stream(texts[0], params)
            printer = StreamPrinter()
            printer.print(stream)
            if not quiet:
                print(printer.speed(), file=sys.stderr)
            if stats:
                _print_stats(llm.info())
            llm.check_weights(time.perf_counter() - opened)
            return
        start = time.perf_counter()
        results = llm.chat(conversations, params, **options) if chat else llm.generate(texts, params)
        seconds = time.perf_counter() - start
        info = llm.info()
        llm.check_weights(time.perf_counter() - opened)
    tokens = sum(len(answer.token_ids) for result in results for answer in result.outputs)
    errors = [result.error for result in results if result.error is not None]
    if as_json:
        rows = [{"prompt": prompt} | result_row(result) for prompt, result in zip(texts, results, strict=True)]
        answer = {"results": rows, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print_json(answer | ({"stats": info} if stats else {}))
        if errors:
            raise typer.Exit(EnginewrightError.exit_code)
        return
    for prompt, result in zip(texts, results, strict=True):
        print(f"> {shown(prompt, sys.stdout)}")
        for one in result.outputs:
            print(f"{f'[{one.index}] ' if several else ''}{shown(one.text, sys.stdout)}\n")
    if not quiet:
        print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s", file=sys.stderr)
    if stats:
        _print_stats(info)
    if errors:
        raise errors[0]


def _check(model: str, prompts: Sequence[str], unused: Template | None) -> None:
    """Raises an error for arguments that exclude each other.

    ``unused``: the options of a chat template, which --raw doesn't use; None without --raw.
    """
    if not os.path.exists(model) and os.path.exists(prompts[0]) and not is_model(model):  # these take any name
        raise typer.BadParameter(f"{model} doesn't exist, and {prompts[0]} does: the bundle comes first")
    if unused is not None and unused.system is not None:
        raise typer.BadParameter("--system needs the chat template that --raw leaves out")
    if unused is not None and (unused.tools is not None or unused.variables):
        raise typer.BadParameter("--tools and --set are for the chat template that --raw leaves out")
    if prompts.count("-") > 1:
        raise typer.BadParameter("stdin is one prompt: give - once")


def _print_stats(info: Mapping[str, Any]) -> None:
    from enginewright.runtime.executors.static_shapes import use_lines

    running = ", ".join(f"{key} {value}" for key, value in info["executor"].items())
    lines = [running, info["kv_cache"], f"preemptions: {info['preemptions']}"]
    if (use := info["prefix_cache"]) is not None:
        disk = "" if use["disk"] is None else f", {use['from_disk']} of them from {use['disk']['folder']}"
        host = "" if use["host"] is None else f", {use['from_host']} of them from main memory"
        lines.append(f"prefix cache: {use['reused']} of {use['tokens']} tokens were there{host}{disk}")
    if (ahead := info["speculation"]) is not None:
        lines.append(f"computed ahead: {ahead['drafted']} tokens, of which {ahead['accepted']} were right")
    lines += use_lines(info["buckets"])
    print("\n".join(lines), file=sys.stderr)
