"""``optimize``: registers all commands.

Modules of commands import their dependencies only inside the command, so that ``optimize --help`` is fast.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import metadata
from types import ModuleType
from typing import Annotated

import typer

from . import (
    bench,
    bisect,
    buckets,
    build,
    cache,
    chat,
    diff,
    doctor,
    embed,
    export,
    generate,
    inspect,
    loadtest,
    plan,
    recipes,
    recover,
    report,
    sbom,
    serve,
    trace,
    tune,
    verify,
)
from . import eval as evaluation
from .spelling import Commands, command_class

app = typer.Typer(
    name="optimize",
    cls=Commands,
    help="Compiles a language model into a bundle, and runs it.",
    epilog=(
        "Examples:\n\n"
        "  optimize chat model.gguf\n\n"
        "  optimize export SmolLM2-135M-Instruct -o smollm2.bundle\n\n"
        '  optimize generate smollm2.bundle "Write one sentence about the ocean."\n\n'
        "  optimize serve smollm2.bundle"
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PANELS: dict[str, tuple[ModuleType, ...]] = {
    "Run a model": (chat, embed, generate, serve),
    "Make a bundle": (export, recipes, recover, buckets, build, cache),
    "Measure": (evaluation, bench, loadtest, plan, trace, tune),
    "Check": (verify, diff, bisect, doctor),
    "Look inside": (inspect, report, sbom),
}
"""The commands by what they are for, as the help shows them."""

for _panel, _modules in _PANELS.items():
    for _module in _modules:
        app.command(name=_module.NAME, epilog=_module.EPILOG, cls=command_class(_module), rich_help_panel=_panel)(
            _module.command
        )


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"enginewright {metadata.version('enginewright')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the ``optimize`` command. docs/use/cli.md lists the exit codes."""
    # PyTorch's threads wait for each other many times a second. Left alone they spin meanwhile, which takes the core
    # from the one that is waited for as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # What libraries make when they are imported isn't garbage: Python would look for some 900 times.
    gc.set_threshold(10_000, 10, 10)
    try:
        app()
    except KeyboardInterrupt:  # before the command has begun; commands have a message of their own
        sys.exit(128 + signal.SIGINT)
    finally:  # all is said and done: a Ctrl-C now ends the process, and isn't an exception in what Python still does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
