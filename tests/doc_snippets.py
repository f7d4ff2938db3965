"""Runs the Python blocks of a page of documentation as its reader would: in one file, from the first to the last."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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
