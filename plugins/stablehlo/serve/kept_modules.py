"""A cache, in files, of modules that XLA compiled on this machine.

Compiling a module takes up to seconds, reading a compiled one a tenth of that. A file has one module; its name depends
on the artifact, the version of jaxlib, the CPU, the number of threads (by which XLA divides work) and XLA's flags. The
contents follow their SHA-256, because XLA doesn't check them. A damaged file is compiled again. Beyond half a gigabyte,
the least recently used files are deleted. See ``runtime/executors/kept_files.py``.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import Any

from enginewright.runtime.executors.kept_files import cache_file, keep_newest, read_own, write_own

from ...native.processor import processor_features, processor_name
from .pjrt_library import Pjrt

FOLDER = "stablehlo"
MOST_BYTES = 512 << 20
"""The most bytes of all files together, which is some hundred modules."""

_DIGEST = hashlib.sha256().digest_size


class KeptModules:
    """Compiles modules, or reads them from the cache. Only modules for CPUs are cached.

    Args:
        pjrt: the client.
        threads: the number of its threads.

    Attributes:
        compiled, found: the numbers of modules that were compiled, and that were read from the cache.
    """

    def __init__(self, pjrt: Pjrt, threads: int) -> None:
        self._pjrt = pjrt
        processor = processor_name(), *processor_features()
        self._keep = pjrt.provider == "cpu"
        self._of = pjrt.version, str(threads), os.environ.get("XLA_FLAGS", ""), *processor
        self.compiled = self.found = 0

    def load(self, artifact: bytes, name: str) -> Any:
        """Returns the executable of an artifact. ``name`` is the module's, for errors. Raises the errors of
        ``Pjrt.compile``.
        """
        path = cache_file(FOLDER, hashlib.sha256(artifact).hexdigest(), *self._of) if self._keep else None
        try:
            stored = read_own(path) if path is not None else b""
        except OSError:  # a folder or file that others may write to
            path, stored = None, b""
        content = stored[_DIGEST:]
        whole = content and hashlib.sha256(content).digest() == stored[:_DIGEST]
        if whole and (loaded := self._pjrt.deserialize(content)) is not None:
            self.found += 1
            if path is not None:
                with suppress(OSError):
                    os.utime(path)
            return loaded
        executable = self._pjrt.compile(artifact, name)
        self.compiled += 1
        if path is not None and (content := self._pjrt.serialize(executable)):
            with suppress(OSError):  # the next start compiles it again
                write_own(path, hashlib.sha256(content).digest() + content)
                keep_newest(path.parent, MOST_BYTES)
        return executable
