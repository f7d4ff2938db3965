"""The peers' environment: theirs alone, with what ours has behind it (converters want torch and transformers)."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from peers.engines import CAPS, Engine
from peers.processes import REASON, environment


def peers_python(folder: Path) -> Path:
    """The interpreter of the environment in ``folder``, which is made if it isn't there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    borrowed = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "borrowed.pth"
    if not borrowed.exists():
        borrowed.write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    return python


def install(engine: Engine, python: Path, isa: str | None = None) -> str | None:
    """Installs what is missing; the reason if it can't be installed, or imported after that.

    ``isa``: the instruction set of an engine that is compiled here; by default the machine's.
    """
    caps = CAPS[isa] if isa else {}
    missing = [package for package in engine.packages if not installed(package, python)]
    if missing:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
        pip += ["--no-binary", ",".join(missing), "--no-cache-dir"] if caps else []
        done = subprocess.run([*pip, *missing], check=False, capture_output=True, text=True, env=os.environ | caps)
        if done.returncode:
            return f"pip install {' '.join(missing)} failed: {last_error(done.stderr)}"
    probe = [str(python), "-c", f"import {engine.module}"]
    done = subprocess.run(probe, check=False, capture_output=True, text=True, env=environment())
    return f"import {engine.module} failed: {last_error(done.stderr)}" if done.returncode else None


def installed(package: str, python: Path) -> bool:
    """Returns True if the environment has the package, in the required version."""
    name, _, version = package.partition("==")
    probe = [str(python), "-c", "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))", name]
    done = subprocess.run(probe, check=False, capture_output=True, text=True)
    return done.returncode == 0 and (not version or done.stdout.strip() == version)


def last_error(text: str) -> str:
    """The last line that isn't a warning."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return (lines[-1] if lines else "it said nothing")[:REASON]
