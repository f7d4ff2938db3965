"""Writes files under temporary names, so that no other process reads a part of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file next to ``path``; at the end of the block it is renamed to ``path``.

    After an error, ``path`` is unchanged and the temporary file is removed.
    """
    unfinished = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
