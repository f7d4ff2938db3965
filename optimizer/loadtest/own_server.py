"""A server of our own for the time of a load test, where a bundle is named instead of an address."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginewright.runtime.shared.errors import EnginewrightError

_MOST_TOLD = 400
"""Characters of what a server said before it ended."""


@contextmanager
def served(bundle: Path) -> Iterator[str]:
    """Starts ``optimize serve BUNDLE``, gives its address, and ends it. Raises EnginewrightError if it can't start."""
    program = [sys.executable, "-m", "enginewright", "serve", str(bundle), "--port", "0", "--json"]
    with tempfile.TemporaryFile("w+") as errors:
        # A session of its own: Ctrl-C ends the test, which still has to ask it.
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.rstrip() == "}":
                    break
            about = json.loads("".join(lines) or "{}")
            if "url" not in about:
                process.wait()
                errors.seek(0)
                said = about.get("error", {}).get("message") or errors.read().strip()[-_MOST_TOLD:]
                raise EnginewrightError(f"{bundle}: it can't be served: {said}", hint="Try it with: optimize serve")
            yield str(about["url"])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
