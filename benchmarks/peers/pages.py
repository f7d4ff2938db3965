"""Gives the files of all engines the same chance in the file cache.

How fast a mapped file is read depends on the pages that the system keeps it in, and these on the pieces that it was
written in. Converters write as they like; here every large file is written anew in large pieces before a run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PIECE = 4 << 20
"""Bytes written at a time: two of the largest pages that file caches have on x86-64."""


def write_anew(model: Path) -> int:
    """Writes a model's files of at least a piece anew, beside and renamed; returns their bytes."""
    written = 0
    for path in [model] if model.is_file() else sorted(p for p in model.rglob("*") if p.is_file()):
        if path.is_symlink() or path.stat().st_size < PIECE:
            continue
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            with open(path, "rb") as source, open(unfinished, "wb", buffering=0) as target:
                while piece := source.read(PIECE):
                    target.write(piece)
            shutil.copymode(path, unfinished)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        written += path.stat().st_size
    return written
