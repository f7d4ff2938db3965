"""Wheels of what a machine with a GPU lacks besides torch and Triton: packed here, unpacked there without pip."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

Distributions = Mapping[tuple[str, ...], tuple[str, ...]]

DISTRIBUTIONS: Distributions = {("msgspec", "pydantic"): (), ("ml-dtypes",): ("--no-deps",)}
"""With pip's options: what pydantic stands on must be of its version; numpy, jinja2 and tokenizers are there."""
SERVER: Distributions = {
    ("msgspec", "pydantic", "starlette", "httptools", "prometheus-client", "uvicorn", "llguidance>=1.9.1"): ()
}
"""Needed as well where a server runs, and for structured answers."""
_MODULES = ("msgspec", "pydantic", "ml_dtypes")
_PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def own_python() -> str:
    """Such as "3.12"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pythons() -> tuple[str, ...]:
    """The Python versions to pack for: the H200 machine's, and this one's."""
    return tuple(dict.fromkeys(("3.12", own_python())))


def download(folder: Path, pythons: Sequence[str], distributions: Distributions = DISTRIBUTIONS) -> None:
    """The wheels for each version of Python, on x86-64. ValueError with what pip says where it has none."""
    for python, (names, options) in product(pythons, distributions.items()):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", *options]
        command += ["--python-version", python, *(part for name in _PLATFORMS for part in ("--platform", name))]
        done = subprocess.run([*command, "--dest", str(folder), *names], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"wheels for Python {python}: {done.stderr.strip()[-1000:]}")


def unpack(wheels: Path, folder: Path, environment: dict[str, str]) -> list[str]:
    """If any of the modules is missing here, unpacks those of this Python into ``folder``, and puts that into
    PYTHONPATH; their file names."""
    if all(importlib.util.find_spec(name) is not None for name in _MODULES):
        return []
    tags = (f"-cp{own_python().replace('.', '')}-", "-py3-", "-abi3-")
    files = sorted(path for path in wheels.glob("*.whl") if any(tag in path.name for tag in tags))
    for path in files:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
    path_there = filter(None, [environment.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *path_there])
    return [path.name for path in files]
