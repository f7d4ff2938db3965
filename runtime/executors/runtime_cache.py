"""What was compiled on this machine, kept for the next start: files of one's own, and TensorRT-RTX's runtime cache.

TensorRT-RTX makes an engine's kernels where it runs, which takes seconds at each start, and again for other sizes. A
file holds them: one for each engine, GPU and version of the library, in ``$XDG_CACHE_HOME/enginewright/tensorrt-rtx``
(``~/.cache`` without that). They are code that the GPU runs, so a folder or file that others may write isn't read. The
library looks whether a cache fits the machine, and takes none that doesn't. ``kept_modules.py`` keeps XLA's beside it.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..bundle.regular_file import open_regular

FOLDER = "tensorrt-rtx"
_MOST_BYTES = 4 << 30


class RuntimeCache:
    """Of one engine.

    Args:
        path: of the file; None: nothing is kept.
        config: a runtime config of the engine's, which makes the library's object.

    Attributes:
        state: for people: whether it was found, and why it isn't kept.
    """

    def __init__(self, path: Path | None, config: Any) -> None:
        self._path = path
        self._api: Any = config.create_runtime_cache()
        self._loaded = b""
        try:
            data = b"" if path is None else read_own(path)
        except OSError as e:
            self._path, self.state = None, f"not kept: {e.strerror}"
            return
        if data and self._api.deserialize(data):
            self._loaded = data
        refused = "made anew: the library refuses the one that is there"
        self.state = "found" if self._loaded else refused if data else "made" if path is not None else "not kept"

    def use(self, config: Any) -> None:
        """For a context that is made with ``config``."""
        config.set_runtime_cache(self._api)

    def save(self) -> None:
        """Writes the file if there are kernels that it doesn't have. Without space for it the next start compiles."""
        data = bytes(self._api.serialize())
        if self._path is None or data == self._loaded:
            return
        try:
            write_own(self._path, data)
            self._loaded = data
        except OSError as e:
            self.state = f"not kept: {e.strerror}"


def cache_file(folder: str, *of: str) -> Path | None:
    """The file for what is named, such as version, GPU and hash of an engine. None where there is no home for it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        return None
    return Path(root, "enginewright", folder, hashlib.sha256("\n".join(of).encode()).hexdigest()[:32])


def write_own(path: Path, data: bytes) -> None:
    """Whole or not at all. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def keep_newest(folder: Path, most: int) -> None:
    """Deletes the files of a folder that were used least recently, until all have ``most`` bytes or one is left.

    Other processes may do the same at the same time.
    """
    with suppress(OSError):
        found = sorted((e.stat().st_mtime_ns, e.stat().st_size, e.path) for e in os.scandir(folder) if e.is_file())
        total = sum(size for _, size, _ in found)
        for _, size, path in found[:-1]:
            if total <= most:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def read_own(path: Path) -> bytes:
    """The file's contents; b"" where there is none yet. Makes the folder. Raises OSError."""
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
