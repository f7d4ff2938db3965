"""A tiny bundle with a further target that carries code, or says that it does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from enginewright.runtime.bundle.manifest import MANIFEST_PATH, Manifest, TargetManifest

LIBRARY = "step-v2.so"
SECTIONS: dict[str, Any] = {
    "tvm": {"version": "0", "levels": ["v2"]},
    "cuda": {"compute_capabilities": ["9.0"], "dtype": "f32", "requests": 4, "chunk": 16},
}


def with_target(bundle: Path, name: str, *, content: bytes = b"\x7fELF", program: bytes | None = None) -> Path:
    """Adds target ``name`` to a bundle of the cpu target: a library, and where targets have one the program."""
    files = {LIBRARY: content}
    if name in SECTIONS:
        files["programs/decode.json"] = program or (bundle / "targets/cpu/programs/decode.json").read_bytes()
    folder = bundle / "targets" / name
    folder.mkdir(exist_ok=True)
    for file, data in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(data)
    listed = {n: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for n, data in files.items()}
    written = {"format_version": 2, "files": listed} | (
        {"sections": {name: SECTIONS[name]}} if name in SECTIONS else {}
    )
    (folder / "manifest.json").write_text(TargetManifest.model_validate(written).to_json())
    name_targets(bundle, "cpu", name)
    return bundle


def name_targets(bundle: Path, *names: str) -> None:
    """Makes the bundle's targets these."""
    manifest = Manifest.from_json((bundle / MANIFEST_PATH).read_text())
    (bundle / MANIFEST_PATH).write_text(manifest.model_copy(update={"targets": names}).to_json())
