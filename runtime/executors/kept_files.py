"""A cache of files that were compiled on this machine, for the next start.

The files are in ``$XDG_CACHE_HOME/enginewright``, by default ``~/.cache/enginewright``. A processor or a GPU runs their
code; therefore a folder or a file that other users may write to isn't read.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from ..bundle.regular_file import open_regular
from ..shared.replaced_file import replacing

_MOST_BYTES = 4 << 30


def cache_file(folder: str, *of: str) -> Path | None:
    """Returns the path of a cached file in ``folder``, named by a hash of ``of``, such as version, GPU and hash of
    an engine.

    Returns None if the user has no home folder.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        return None
    return Path(root, "enginewright", folder, hashlib.sha256("\n".join(of).encode()).hexdigest()[:32])


def write_own(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path`` by renaming a temporary file. Raises OSError."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)


def keep_newest(folder: Path, most: int) -> None:
    """Deletes the least recently used files of ``folder`` until the rest have at most ``most`` bytes or one file is
    left.

    Other processes may do so at the same time.
    """
    with suppress(OSError):
        files = sorted((e.stat().st_mtime_ns, e.stat().st_size, e.path) for e in os.scandir(folder) if e.is_file())
        total = sum(size for _, size, _ in files)
        for _, size, path in files[:-1]:
            if total <= most:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def read_own(path: Path) -> bytes:
    """Returns the contents of a cached file, or no bytes if there is none; makes the folder. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(path.parent.stat(), path.parent)
    try:
        with open_regular(path, most=_MOST_BYTES) as file:
            _check_own(os.fstat(file.fileno()), path)
            return file.read()
    except FileNotFoundError:
        return b""


def _check_own(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(0, f"{path.name} is another user's, or others may write it", str(path))
