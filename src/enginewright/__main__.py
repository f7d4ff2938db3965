"""``optimize``, and ``python -m enginewright`` where that isn't on PATH."""

from __future__ import annotations

import signal
import sys

_COMMAND_PACKAGES = frozenset({"pydantic", "rich", "typer"})


def main() -> None:
    """The ``optimize`` command. Without its packages it says what to install, as any part that is missing."""
    try:
        is_default = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL)
        if is_default:  # until the command is there, a Ctrl-C ends the process in silence
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from .optimizer.cli.app import main as command

        if is_default:  # then it is an exception, which cleans up
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()  # which imports more
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] not in _COMMAND_PACKAGES:
            raise
        print(
            f"error: the optimize command needs {e.name}, which is not installed\n"
            "  Install it with: pip install 'enginewright[cli]'; to export models, pip install 'enginewright[export]'.",
            file=sys.stderr,
        )
        sys.exit(10)  # MissingDependencyError's


if __name__ == "__main__":
    main()
