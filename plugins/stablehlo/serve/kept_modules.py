"""Modules that XLA compiled on this machine, kept for the next start.

Compiling takes up to seconds a module, reading what was compiled a tenth of that. A file holds one: of its artifact,
the version of jaxlib, the processor, the threads (XLA cuts work into as many parts) and XLA's flags, behind the SHA-256
of its contents, as XLA trusts what it reads. What is damaged is compiled again. Beyond half a gigabyte, files go that
were used least recently. See ``runtime_cache.py`` for folders.
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
"""The most bytes of all files: some hundred modules."""

_DIGEST = hashlib.sha256().digest_size


class KeptModules:
    """Compiles modules, or finds them compiled. Those of other devices than CPUs are not kept.

    Args:
        pjrt: the client.
        threads: the number of its threads.

    Attributes:
        compiled, found: the numbers of modules compiled and found so far.
    """

    def __init__(self, pjrt: Pjrt, threads: int) -> None:
        self._pjrt = pjrt
        processor = processor_name(), *processor_features()
        self._keep = pjrt.provider == "cpu"
        self._of = pjrt.version, str(threads), os.environ.get("XLA_FLAGS", ""), *processor
        self.compiled = self.found = 0

    def load(self, artifact: bytes, name: str) -> Any:
        """The executable of an artifact. Raises what ``Pjrt.compile`` raises."""
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
