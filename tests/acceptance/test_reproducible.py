"""Two exports of one input are byte-equal outside report/, also into other folders and by another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel


def contents(bundle: Path) -> dict[str, bytes]:
    files = (f for f in bundle.rglob("*") if f.is_file())
    return {str(f.relative_to(bundle)): f.read_bytes() for f in files if "report" not in f.relative_to(bundle).parts}


def test_two_exports_are_byte_equal(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    for place in ("one", "two"):
        tiny_model("Gemma2").save_pretrained(tmp_path / place / "model")
        script = "import sys, enginewright as ew; ew.export(sys.argv[1], sys.argv[2])"
        arguments = [str(tmp_path / place / "model"), str(tmp_path / place / "out.bundle")]
        subprocess.run([sys.executable, "-c", script, *arguments], check=True)
    first, second = (contents(tmp_path / place / "out.bundle") for place in ("one", "two"))
    assert "manifest.json" in first and "weights/index.json" in first
    assert first == second
    assert not any(str(tmp_path).encode() in data for data in first.values())
