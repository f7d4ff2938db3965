"""Runs the blocks of a page of documentation as its reader would: Python in one file, from the first to the last; a
server in one terminal, and what asks it in another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import HANG, wait_until

NOT_RUN = "<!-- not run"
"""On the line before a block, with the reason: ``<!-- not run: needs a GPU -->``."""

_FENCE = re.compile(r"^```(\w*)\s*$")


def script_of(page: str, language: str = "python") -> str:
    """The page's blocks of a language, each on the lines where the page has it, so that a traceback names those."""
    lines: list[str] = []
    inside: str | None = None  # the language of the block that a line is in
    before = ""
    for line in page.splitlines():
        fence = _FENCE.match(line)
        code = inside == language and fence is None
        lines.append(line if code else "")
        if fence is not None:
            opens = "other" if before.startswith(NOT_RUN) else fence.group(1) or "text"
            inside = opens if inside is None else None
        before = line
    if inside is not None:
        raise ValueError("the last block isn't closed")
    return "\n".join(lines) + "\n"


def run_python(
    page: Path, folder: Path, names: Mapping[str, Path], *, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a page's ``python`` blocks in a process of their own.

    Args:
        page: Markdown.
        folder: where they run; must exist.
        names: what the page takes for granted, as links in ``folder``: "smollm2.bundle" -> a bundle.
        timeout: in seconds.

    Raises:
        AssertionError: a block fails; with its output, which names the page's line.
    """
    script = script_of(page.read_text(encoding="utf-8"))
    assert script.strip(), f"{page} has no python block"
    for name, path in names.items():
        (folder / name).symlink_to(path)
    (folder / f"{page.stem}.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, f"{page.stem}.py"], cwd=folder, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{page} (lines as in the page):\n{done.stderr}"
    return done


BLOCK = re.compile(r"(?<!-->\n)^```(bash|python)\n(.*?)^```", re.M | re.S)


def run_with_server(page: Path, folder: Path, names: Mapping[str, Path], *, timeout: float = 300) -> list[str]:
    """Runs a page's ``bash`` and ``python`` blocks one after the other, each on its own.

    A block that begins with ``optimize serve`` starts a server, which answers the blocks behind it and ends when the
    next one begins. It listens at a free port, which stands in the others for 8000.

    Returns what each block but the servers printed. Raises AssertionError naming the block that failed.
    """
    for name, path in names.items():
        (folder / name).symlink_to(path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    printed: list[str] = []
    server: subprocess.Popen[bytes] | None = None
    port = ""
    try:
        for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            if code.startswith("optimize serve"):
                _end(server)
                command = ["bash", "-c", f"exec {code.rstrip()} --port 0"]
                log = folder / "server.log"
                with log.open("w") as file:
                    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
                wait_until(lambda: "serving at" in log.read_text() or server.poll() is not None)  # noqa: B023
                match = re.search(r"serving at https?://[\w.]+:(\d+) ", log.read_text())
                assert match is not None, f"{code}{log.read_text()}"
                port = match[1]
                continue
            program = ["bash", "-eo", "pipefail", "-c"] if kind == "bash" else [sys.executable, "-c"]
            done = subprocess.run(
                [*program, code.replace(":8000", f":{port}")],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
            assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout)
        _end(server)
        return printed
    except BaseException:
        if server is not None:
            server.kill()
        raise


def _end(server: subprocess.Popen[bytes] | None) -> None:
    if server is not None:
        server.send_signal(signal.SIGTERM)
        assert server.wait(HANG) == 0
