"""Stores the kernels that TensorRT-RTX compiles at run time in a file, for the next start.

Compiling an engine's kernels takes seconds at each start, and again for other sizes. There is one file for each engine,
GPU and version of the library (``runtime/executors/kept_files.py``). The library itself rejects a cache that doesn't
fit the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginewright.runtime.executors.kept_files import read_own, write_own

FOLDER = "tensorrt-rtx"


class RuntimeCache:
    """The compiled kernels of one engine.

    Args:
        path: the path of the file; None stores nothing.
        config: a runtime config of the engine, which creates the library's cache object.

    Attributes:
        state: a note if the file was found, or why it isn't written.
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
        """Makes contexts that are created with ``config`` use the cache."""
        config.set_runtime_cache(self._api)

    def save(self) -> None:
        """Writes the file if there are kernels that it doesn't contain. If there is no space for it, the next start
        compiles again.
        """
        data = bytes(self._api.serialize())
        if self._path is None or data == self._loaded:
            return
        try:
            write_own(self._path, data)
            self._loaded = data
        except OSError as e:
            self.state = f"not kept: {e.strerror}"
