from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import pytest
import typer

from enginewright.optimizer.cli.console import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    command_line,
    print_error,
    print_json,
    reported,
)
from enginewright.runtime.shared.errors import (
    BundleError,
    CapacityError,
    RequestError,
    SourceWarning,
    UnsupportedModelError,
)
from tests.waiting import HANG


def test_what_works_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    @reported
    def command(as_json: bool = False) -> None:
        print_json({"a": "ü"})

    command()
    assert json.loads(capsys.readouterr().out) == {"a": "ü"}


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_said_with_its_hint_and_code(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    @reported
    def command(as_json: bool = False) -> None:
        raise CapacityError("memory: too little", hint="Give more.")

    with pytest.raises(typer.Exit) as caught:
        command(as_json=as_json)
    assert caught.value.exit_code == 9
    printed = capsys.readouterr()
    assert "memory: too little" in printed.err
    assert "Give more." in printed.err
    if as_json:
        expected = {"type": "CapacityError", "message": "memory: too little", "hint": "Give more.", "exit_code": 9}
        assert json.loads(printed.out) == {"error": expected}
    else:
        assert printed.out == ""


def _named(max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n")] = None) -> None:
    raise RequestError("max_tokens: -5 is out of range", hint="Pass overwrite=True to replace it.")


def test_an_option_that_was_given_is_called_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        reported(_named)(max_tokens=-5)
    assert caught.value.exit_code == 2
    printed = capsys.readouterr().err
    assert printed == "error: --max-tokens: -5 is out of range\n  Pass --force to replace it.\n"


def test_an_option_may_be_called_otherwise_than_its_argument(capsys: pytest.CaptureFixture[str]) -> None:
    def command(learning_rate: Annotated[float, typer.Option("--lr", help="How fast.")] = 1e-4) -> None:
        raise RequestError(f"learning_rate: {learning_rate} is out of range")

    with pytest.raises(typer.Exit):
        reported(command)(learning_rate=-1.0)
    assert capsys.readouterr().err == "error: --lr: -1.0 is out of range\n"


def test_what_was_not_given_is_no_mistake_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        reported(_named)(max_tokens=None)
    assert caught.value.exit_code == 8
    assert "error: max_tokens: -5" in capsys.readouterr().err


def test_of_an_option_that_names_a_file_it_is_the_file_that_is_wrong() -> None:
    def of_path(text: Annotated[Path | None, typer.Option("--text")] = None) -> None:
        raise RequestError("text: it is empty")

    def of_text(text: Annotated[str, typer.Option(metavar="FILE")] = "") -> None:
        raise RequestError("text: it is empty")

    for call in (lambda: reported(of_path)(text=Path("a")), lambda: reported(of_text)(text="a")):
        with pytest.raises(typer.Exit) as caught:
            call()
        assert caught.value.exit_code == 8


def test_a_command_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", list(argv))
        return command_line("generate", "a b.bundle", "Why?")

    monkeypatch.setattr("shutil.which", lambda name: None)
    assert named("/a folder/bin/optimize") == "'/a folder/bin/optimize' generate 'a b.bundle' 'Why?'"
    assert named("/x/enginewright/__main__.py") == f"{sys.executable} -m enginewright generate 'a b.bundle' 'Why?'"
    monkeypatch.setattr("shutil.which", lambda name: "/bin/optimize")
    assert named("/bin/optimize") == "optimize generate 'a b.bundle' 'Why?'"


def test_an_error_without_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(BundleError("manifest.json is missing"))
    assert capsys.readouterr().err == "error: manifest.json is missing\n"


def test_ctrl_c_is_said_briefly(capsys: pytest.CaptureFixture[str]) -> None:
    @reported
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == EXIT_INTERRUPTED == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    @reported
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(HANG)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one doesn't break what cleans up
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == EXIT_TERMINATED == 143 and cleaned
    assert capsys.readouterr().err == "\nterminated\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_in_a_finalizer_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    class Finalized:
        def __del__(self) -> None:
            raise KeyboardInterrupt  # as the signal's handler does if it comes while this runs

    @reported
    def command() -> None:
        Finalized()
        for _ in range(1000):
            time.sleep(0.01)

    hook = sys.unraisablehook
    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == EXIT_INTERRUPTED
    assert capfd.readouterr().err == "\ninterrupted\n"
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("error", [AssertionError("mode stack"), UnsupportedModelError("can't be captured")])
def test_ctrl_c_that_breaks_a_library_is_still_ctrl_c(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    @reported
    def command() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_errors_that_nobody_foresaw_keep_their_traceback() -> None:
    @reported
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_are_for_terminals_without_no_color(no_color: str, coloured: bool) -> None:
    code = (
        "import sys\nfrom enginewright.optimizer.cli.console import print_error\n"
        "from enginewright.runtime.shared.errors import BundleError\n"
        "print_error(BundleError('a', hint='b'))"
    )
    terminal, child = pty.openpty()
    try:
        environment = os.environ | {"NO_COLOR": no_color, "TERM": "xterm"}
        subprocess.run([sys.executable, "-c", code], stderr=child, env=environment, check=True)
        assert (b"\x1b[" in os.read(terminal, 4096)) == coloured
    finally:
        os.close(child)
        os.close(terminal)


def test_a_character_that_the_output_lacks_is_no_error() -> None:
    code = (
        "import typer\nfrom enginewright.optimizer.cli.console import reported\n"
        "@reported\n"
        "def command() -> None:\n"
        "    print('a \u4f60 b')\n"
        "typer.run(command)\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a ? b\n")


def test_a_full_disk_is_said() -> None:
    code = (
        "import typer\nfrom enginewright.optimizer.cli.console import reported\n"
        "@reported\n"
        "def command() -> None:\n"
        "    print('a line')\n"
        "typer.run(command)\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 9
    assert done.stderr.startswith("error: stdout: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("call", ["print", "stdout_console().print"])  # rich ends the process itself, with 1
def test_a_closed_pipe_is_no_error(call: str) -> None:
    code = (
        "import typer\nfrom enginewright.optimizer.cli.console import reported, stdout_console\n"
        "@reported\n"
        "def command() -> None:\n"
        "    for _ in range(100_000):\n"
        f"        {call}('a line that nobody reads')\n"
        "typer.run(command)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.readline()
    writer.stdout.close()
    assert writer.wait(timeout=HANG) == EXIT_BROKEN_PIPE
    assert writer.stderr.read() == b""
    writer.stderr.close()


def test_a_broken_pipe_of_its_own_is_no_closed_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    """A process that a command has started may die of anything: that isn't a reader who has seen enough."""

    @reported
    def command() -> None:
        raise BrokenPipeError

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 1
    assert "a process that this command had started ended" in capfd.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_a_warning_about_a_source_has_no_file_and_line(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning

    @reported
    def command(quiet: bool = False) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning("few bits", SourceWarning, "stages.py", 3)
            warnings.showwarning("theirs", DeprecationWarning, "torch.py", 3)

    command(quiet=quiet)
    errors = capsys.readouterr().err
    assert ("warning: few bits\n" in errors) is not quiet and "stages.py" not in errors
    assert warnings.showwarning is before
