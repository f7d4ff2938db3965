"""Starts a server of our own for a load test of a bundle."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from enginewright.runtime.shared.errors import EnginewrightError

_MOST_TOLD = 400
"""The most characters of a server's last output that an error quotes."""


def start(*arguments: str | Path, errors: IO[str] | None = None) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Starts ``optimize serve`` at a free port, and waits until it listens.

    Returns the process, and the JSON that it prints; empty or without ``url`` if it couldn't start. ``errors``: file
    for its stderr; None shares this process's.
    """
    program = [sys.executable, "-m", "enginewright", "serve", *map(str, arguments), "--port", "0", "--json"]
    # A session of its own: Ctrl-C ends who asks it, who still has to.
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.rstrip() == "}":
                break
        return process, json.loads("".join(lines) or "{}")
    except BaseException:
        stop(process)
        raise


def stop(process: subprocess.Popen[str]) -> int:
    """Ends a server by SIGTERM, as a service manager does, and returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    if process.stdout is not None:
        process.stdout.close()
    return process.wait()


@contextmanager
def served(bundle: Path) -> Iterator[str]:
    """Starts ``optimize serve BUNDLE``, yields its address, and ends it. Raises EnginewrightError if it can't
    start.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process, about = start(bundle, errors=errors)
        try:
            if "url" not in about:
                process.wait()
                errors.seek(0)
                message = about.get("error", {}).get("message") or errors.read().strip()[-_MOST_TOLD:]
                raise EnginewrightError(f"{bundle}: it can't be served: {message}", hint="Try it with: optimize serve")
            yield str(about["url"])
        finally:
            stop(process)
