"""How every command talks: where it prints, how errors look, what it exits with."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from enginewright.plugins.errors import EnginewrightError

P = ParamSpec("P")

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Ends a command's process as documented, whatever happens: one place for errors, Ctrl-C and closed pipes.

    An error of ours is printed to stderr, and with ``--json`` (the parameter ``as_json``) also to stdout, as an object.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except EnginewrightError as e:
            print_error(e, as_json=bool(kwargs.get("as_json", False)))
            raise typer.Exit(e.exit_code) from e
        except KeyboardInterrupt as e:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from e
        except BrokenPipeError as e:
            # The reader is gone (as with `| head`): nothing to say, and nothing more to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from e

    return run


def print_error(error: EnginewrightError, *, as_json: bool = False) -> None:
    """Says what is wrong and what to do about it."""
    if as_json:
        body = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        print_json({"error": body | {"exit_code": error.exit_code}})
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(error.message, err=True)
    if error.hint:
        typer.secho(f"  {error.hint}", dim=True, err=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False))
