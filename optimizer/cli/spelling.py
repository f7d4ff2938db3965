"""The spelling of commands and options: a wrong word gets the nearest as a hint, and old names continue to work.

An option has one name in all commands: --context is the maximum number of tokens of a request, and options that accept
lists have a singular name (--target, --gpu, --batch 1,4,16). -n is always --max-tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup, TyperOption

_MEANT = {
    "build": ("build-engine", "engine"),
    "bench": ("benchmark", "perf", "speed", "throughput"),
    "cache": ("clear-cache",),
    "chat": ("repl", "talk"),
    "eval": ("evaluate", "perplexity", "lm-eval"),
    "export": ("compile", "convert", "import", "quantize", "quantise", "optimize"),
    "generate": ("complete", "infer", "prompt", "run"),
    "inspect": ("info", "show", "ls", "list"),
    "loadtest": ("load", "load-test", "stress"),
    "serve": ("server", "api-server", "listen"),
    "doctor": ("check", "env"),
    "recover": ("finetune", "fine-tune", "train"),
}
"""Name of a command in other programs -> our command."""

_OPTIONS_MEANT = {
    "--alias": ("--served-model-name",),
    "--api-keys": ("--api-key", "--api-key-file"),
    "--context": ("--max-seq-len", "--ctx-size", "--n-ctx", "--num-ctx", "-c"),
    "--kv-cache": ("--kv-cache-dtype", "--cache-type-k", "--cache-type-v"),
    "--lora": ("--lora-modules", "--adapter"),
    "--max-requests": ("--parallel", "--num-parallel"),
    "--max-tokens": ("--n-predict", "--predict", "--num-predict", "--max-new-tokens"),
    "--memory": ("--gpu-memory-utilization",),
    "--partition": ("--pipeline-parallel-size",),
    "--ranks": ("--tp-size",),
    "--recipe": ("--quantization", "--quantize", "--quant", "--dtype"),
    "--repetition-penalty": ("--repeat-penalty",),
    "--replicas": ("--data-parallel-size", "--dp-size"),
    "--schema": ("--json-schema", "--format"),
    "--speculate": ("--speculative-config", "--speculative-model", "--model-draft", "--draft-model"),
    "--system": ("--system-prompt",),
    "--target": ("--device", "--backend"),
    "--temperature": ("--temp",),
    "--threads": ("--n-threads", "--num-threads", "--threads-batch"),
    "--tls-certificate": ("--ssl-certfile", "--ssl-cert-file"),
    "--tls-key": ("--ssl-keyfile", "--ssl-key-file"),
}
"""Our option -> names of options of vLLM, SGLang, llama.cpp and Ollama for the same purpose.

Options of vLLM whose argument of ``LLM`` has another name here are in ``OF_LLM`` of runtime/requests/vllm_names.py.
"""


def _without_types(params: list[Any]) -> list[Any]:
    """Removes the type of options without a value, which the help would show as `--quiet <bool>`."""
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag and param.metavar is None:
            param.metavar = ""
    return params


class Commands(TyperGroup):
    """A group of commands that answers an unknown name with the nearest one."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"There is no command {name!r}. {self._instead(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _instead(self, ctx: Any, name: str) -> str:
        known = {other: command for command, others in _MEANT.items() for other in others}
        known |= {command: command for command in self.list_commands(ctx)}
        near = _near(name, known)
        return f"Did you mean `optimize {known[near]}`?" if near else "`optimize --help` lists all commands."


class Command(TyperCommand):
    """A command. Older names of its options still work, but the help doesn't show them."""

    renamed: ClassVar[Mapping[str, str]] = {}

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        known = {spelled for param in self.params for spelled in param.opts}
        for name in (word.partition("=")[0] for word in args[:end]):
            if not name.startswith("-") or name in known or name in self.renamed:
                continue
            if (ours := _option_meant(name)) in known:
                help_of = f"{ctx.command_path} --help"
                ctx.fail(f"No such option: {name}. The option here is {ours}; see `{help_of}` for its values.")
        return super().parse_args(ctx, [*map(self._today, args[:end]), *args[end:]])

    def _today(self, word: str) -> str:
        name, equals, value = word.partition("=")
        return self.renamed.get(name, name) + equals + value


def command_class(module: ModuleType) -> type[Command]:
    """Returns the class of a command, with old names of its options from its module's table RENAMED, if there
    is one.
    """
    renamed = getattr(module, "RENAMED", None)
    return type("Command", (Command,), {"renamed": renamed}) if renamed else Command


def _option_meant(name: str) -> str | None:
    """Returns our option for an option of another program; None if there is none."""
    from enginewright.runtime.requests.vllm_names import OF_LLM, Renamed

    rule = OF_LLM.get(name.removeprefix("--").replace("-", "_"))
    if isinstance(rule, Renamed):
        return "--" + rule.ours.replace("_", "-")
    return next((option for option, others in _OPTIONS_MEANT.items() if name in others), None)


def _near(word: str, known: Mapping[str, str]) -> str:
    """Returns the name in ``known`` that is nearest to ``word``; "" if none is near."""
    return next(iter(difflib.get_close_matches(word.lower(), known, 1)), "")
