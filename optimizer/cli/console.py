"""The conventions of all commands: output streams, error messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import json
import os
import select
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from enginewright.runtime.shared.errors import (
    CapacityError,
    EnginewrightError,
    RecipeError,
    RequestError,
    SourceWarning,
)
from enginewright.runtime.shared.json_document import printable

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

    from rich.console import Console

P = ParamSpec("P")


class ToJson(Protocol):
    """A result that has a JSON form."""

    def to_json(self) -> dict[str, Any]: ...


Found = TypeVar("Found", bound=ToJson)

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """The exception for SIGTERM. It ends a command as Ctrl-C does, with the same clean-up."""


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Decorates a command so that errors, Ctrl-C and closed pipes end its process as documented.

    An error of ours is printed to stderr, and with ``--json`` (the parameter ``as_json``) also to stdout, as an object.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that knows no emoji shows ?, and the rest
        terminated = threading.Event()
        try:
            with (
                raises_terminated(terminated),
                _no_interrupt_dropped(),
                _interrupts_kept(),
                warnings_shown(hidden=bool(kwargs.get("quiet", False))),
            ):
                command(*args, **kwargs)
            sys.stdout.flush()
        except EnginewrightError as e:
            shown, code = _as_typed(e, command, kwargs)
            print_error(shown, as_json=bool(kwargs.get("as_json", False)), exit_code=code)
            raise typer.Exit(code) from e
        except KeyboardInterrupt as e:
            print("\nterminated" if terminated.is_set() else "\ninterrupted", file=sys.stderr)
            raise typer.Exit(EXIT_TERMINATED if terminated.is_set() else EXIT_INTERRUPTED) from e
        except BrokenPipeError as e:
            if _reader_is_gone():  # as with `| head`: nothing to say
                drop_stdout()
                raise typer.Exit(EXIT_BROKEN_PIPE) from e
            gone = EnginewrightError(
                "a process that this command had started ended before its work was done",
                hint="Is there memory enough? Else please report it.",
            )
            print_error(gone, as_json=bool(kwargs.get("as_json", False)))
            raise typer.Exit(gone.exit_code) from e
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            drop_stdout()
            print_error(full := CapacityError("stdout: no space left on the device", hint="Write to another disk."))
            raise typer.Exit(full.exit_code) from e

    return run


_FLAGS = {
    "overwrite=True": "--force",
    "resume=True": "--resume",
    "truncate=True": "--truncate",
    'trust="code"': "--trust code",
}
"""Argument of a function, as hints name it -> the option of a command."""


def _as_typed(
    error: EnginewrightError, command: Callable[..., None], given: Mapping[str, object]
) -> tuple[EnginewrightError, int]:
    """Returns ``error`` with the options' names on the command line, and the exit code.

    A message that begins with the name of a passed option ("max_tokens: -5 is out of range") is a usage error, with the
    parser's exit code. If the option names a file, the file is wrong instead, and the error keeps its own code.

    Args:
        error: the error.
        command: the command's function.
        given: the arguments that the command got.
    """
    message, hint, code = error.message, error.hint, error.exit_code
    for argument, spelled in _FLAGS.items():
        hint = None if hint is None else hint.replace(argument, spelled)
    name, colon, rest = message.partition(":")
    if colon and isinstance(error, RequestError | RecipeError):
        flag = _flag_of(command, name, given)
        message, code = (message, code) if flag is None else (f"{flag}:{rest}", EXIT_USAGE)
    return error.reworded(message, hint=hint), code


def _flag_of(command: Callable[..., None], name: str, given: Mapping[str, object]) -> str | None:
    """Returns the option of the command's parameter ``name``; None if there is none, it names a file, or has its
    default.
    """
    parameter = inspect.signature(command).parameters.get(name)
    if parameter is None or given.get(name) == parameter.default:
        return None
    hint = get_type_hints(command, include_extras=True)[name]
    option = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, OptionInfo)), None)
    if (
        option is None
        or option.metavar in ("FILE", "PATH")
        or Path in (get_args(hint)[0], *get_args(get_args(hint)[0]))
    ):
        return None
    spelled = (option.default, *(option.param_decls or ()))  # of Annotated options the first is taken for a default
    return next((s for s in spelled if isinstance(s, str) and s.startswith("--")), f"--{name.replace('_', '-')}")


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Replaces an error that a Ctrl-C caused in a library's clean-up, such as torch's mode stack, by
    KeyboardInterrupt.
    """
    try:
        yield
    except Exception as e:
        if _came_of_interrupt(e):
            raise KeyboardInterrupt from e
        raise


def _came_of_interrupt(error: BaseException) -> bool:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        e = waiting.pop()
        if isinstance(e, KeyboardInterrupt):
            return True
        if e is not None and id(e) not in seen:
            seen.add(id(e))
            waiting += [e.__cause__, e.__context__]
    return False


@contextmanager
def raises_terminated(terminated: threading.Event) -> Iterator[None]:
    """Raises ``Terminated`` at the first SIGTERM, and ignores later ones during clean-up.

    A handler that is installed within the block replaces it: a listening server first ends its requests.

    Args:
        terminated: set at the signal.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        del number, frame
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        terminated.set()
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _no_interrupt_dropped() -> Iterator[None]:
    """Repeats a Ctrl-C that arrives while Python finalizes an object, where Python would drop it."""
    before = sys.unraisablehook

    def interrupt_again(unraisable: UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        timer = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT])
        timer.daemon = True
        timer.start()

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _reader_is_gone() -> bool:
    """Returns True if the reader of this process's stdout or stderr has closed its end."""
    pipes = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, it isn't a file, or is closed
            pipes.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in pipes.poll(0))


@contextmanager
def warnings_shown(*, hidden: bool) -> Iterator[None]:
    """Prints warnings about sources like a command's other warnings, without file and line.

    ``hidden``: True prints none of them.
    """
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if not issubclass(category, SourceWarning):
            before(message, category, *place)
        elif not hidden:
            print_styled(f"warning: {message}", fg="yellow")

    warnings.showwarning = show  # type: ignore[assignment]  # whose last parameters have defaults
    try:
        yield
    finally:
        warnings.showwarning = before


def drop_stdout() -> None:
    """Redirects stdout to the null device, so that Python doesn't retry unwritten output when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(error: EnginewrightError, *, as_json: bool = False, exit_code: int | None = None) -> None:
    """Prints an error and its hint. ``exit_code`` replaces the error's own in JSON."""
    if as_json:
        body = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        print_json({"error": body | {"exit_code": error.exit_code if exit_code is None else exit_code}})
    print_styled("error: ", fg="red", bold=True, nl=False)
    typer.echo(printable(error.message), err=True)  # it may quote what a file says
    if error.hint:
        print_styled(f"  {printable(error.hint)}", dim=True)


def print_styled(text: str, **style: Any) -> None:
    """Prints to stderr, in colour if that is a terminal and NO_COLOR is not set (no-color.org)."""
    typer.secho(text, err=True, color=False if os.environ.get("NO_COLOR") else None, **style)


def stdout_console() -> Console:
    """Returns a Rich console for tables, which raises BrokenPipeError if stdout is closed; Rich's own exits with 1."""
    from rich.console import Console

    class Reported(Console):
        """A console that leaves a closed stdout to the caller."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Reported(highlight=False)


def command_line(*words: str) -> str:
    """Returns a command as the user can type it again, even if ``optimize`` isn't on PATH."""
    started = Path(sys.argv[0])
    if (started.parent.name, started.name) == ("enginewright", "__main__.py"):
        program = f"{shlex.quote(sys.executable)} -m enginewright"
    elif shutil.which("optimize") is None and started.name in ("optimize", "enginewright"):
        program = shlex.quote(sys.argv[0])
    else:
        program = "optimize"
    return " ".join([program, *map(shlex.quote, words)])


def print_json(data: Any) -> None:
    """Prints one JSON document on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_found(found: Found, show: Callable[[Found, Console], None], *, as_json: bool, plot: Path | None) -> None:
    """Prints a result as JSON, or by ``show``: 140 columns wide if stdout isn't a terminal."""
    if as_json:
        print_json(found.to_json())
        return
    console = stdout_console()
    if not console.is_terminal:
        console.width = 140
    show(found, console)
    if plot is not None:
        print(f"plot     {plot}")


def comparison_lines(report: Mapping[str, Any]) -> str:
    """Returns one target's comparison with the source as text of one or two lines.

    ``report`` is a ``VerificationReport`` as plain values, so that no exporting package is needed. Raises KeyError,
    TypeError or ValueError if it isn't one.
    """
    random, text = report["random_tokens"], report["text"]
    line = f"target {report['target']}, compared with the source on {random['tokens']} random tokens: logits at most "
    line += f"{random['max_logit_error']:.2g} apart"
    if report["tolerance"] is not None:
        return f"{line} (allowed: {report['tolerance']:.2g}, as they reach {random['largest_logit']:.3g})"
    kind = "cosine distance" if random.get("of_vectors") else "KL"
    line += f" (they reach {random['largest_logit']:.3g}), {kind} {random['kl_mean']:.2g}, "
    line += f"top-1 {random['top1_agreement']:.1%}"
    if text is None:
        return f"{line}\n  no text was compared: {report['text_omitted']}"
    part = (
        ""
        if text["windows"] == text["windows_in_text"]
        else f", {text['windows']} of the package's {text['windows_in_text']} windows"
    )
    line += f"\n  on a text of {text['tokens']:,} tokens{part}: {kind} {text['kl_mean']:.2g}, "
    line += f"top-1 {text['top1_agreement']:.1%}"
    if text["perplexity"] is None:
        from enginewright.optimizer.measure.text_metrics import shown_metrics  # numpy

        figures = shown_metrics(text.get("metrics", {}))
        return "\n  ".join([line, *([", ".join(f"{label} {value}" for label, value in figures)] if figures else [])])
    return f"{line}, perplexity {text['perplexity']:.3f}, the source's {text['source_perplexity']:.3f} there"
