"""``optimize``: registers all commands.

Modules of commands import their dependencies only inside the command, so that ``optimize --help`` is fast.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from typing import Annotated

import typer

from .spelling import Commands, command_class

_PANELS = {
    "Run a model": ("chat", "embed", "generate", "serve"),
    "Make a bundle": ("export", "recipes", "recover", "buckets", "build", "cache"),
    "Measure": ("eval", "bench", "loadtest", "plan", "trace", "tune"),
    "Check": ("verify", "diff", "bisect", "doctor"),
    "Look inside": ("inspect", "report", "sbom"),
}
"""Title of a group of commands in the help -> the commands. A command is the module of this package with its name."""


def command_line(name: str | None = None) -> typer.Typer:
    """Returns the command line with the command ``name``, or with all commands.

    With one command, the modules of the others aren't imported, so that it starts faster. An unknown ``name`` gives all
    commands, for the help and for the message with the nearest name.
    """
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
    app.callback()(_root)
    panels = {command: panel for panel, commands in _PANELS.items() for command in commands}
    for command in [name] if name in panels else panels:
        module = import_module(f".{command}", __package__)
        app.command(name=command, epilog=module.EPILOG, cls=command_class(module), rich_help_panel=panels[command])(
            module.command
        )
    return app


def __getattr__(name: str) -> typer.Typer:
    """Returns ``app``, the command line with all commands. It is made at the first access."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return command_line()


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"enginewright {metadata.version('enginewright')}")
        raise typer.Exit


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
        command_line(sys.argv[1] if len(sys.argv) > 1 else None)()
    except KeyboardInterrupt:  # before the command has begun; commands have a message of their own
        sys.exit(128 + signal.SIGINT)
    finally:  # all is said and done: a Ctrl-C now ends the process, and isn't an exception in what Python still does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
