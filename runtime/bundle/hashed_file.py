"""Writes files and computes their SHA-256 meanwhile, and checks the hashes of existing files on a thread of low
priority.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from ..shared.errors import BundleError, CapacityError
from .regular_file import open_regular

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK = 4 << 20
"""Bytes that are written at a time, at multiples of that size.

The system then stores them in huge pages (2 MB) if the file system can, so that the mapped file is read faster.
"""


class Mark(msgspec.Struct, frozen=True):
    """A position in a ``HashedFile``: the number of bytes before it, and the hash of these bytes."""

    bytes: int
    hash: hashlib._Hash


class HashedFile:
    """A new file whose hash is computed while it is written.

    Errors name the path ``shown``, because the file is renamed later.
    """

    def __init__(self, path: Path, shown: Path) -> None:
        self.bytes = 0
        self._shown = shown
        self._hash = hashlib.sha256()
        self._waiting = bytearray()  # the end of what was written, which the file doesn't have yet
        with writing(shown, 0):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(path, "xb")  # noqa: SIM115  closed by its owner

    def write(self, data: bytes | memoryview, *, needed: int) -> None:
        rest = memoryview(data)
        while len(rest):
            left = _BLOCK - self.bytes % _BLOCK
            piece, rest = rest[:left], rest[left:]
            self._waiting += piece
            self._hash.update(piece)
            self.bytes += len(piece)
            if len(piece) == left:
                self._flush(needed)

    def sync(self) -> None:
        self._flush(self.bytes)
        with writing(self._shown, self.bytes):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        # A full disk is reported by write or sync; closing tries to write the same bytes again and would hide it.
        try:
            self._file.close()
        except OSError as e:
            if e.errno not in _FULL:
                raise

    def digest(self) -> str:
        return self._hash.hexdigest()

    def mark(self) -> Mark:
        """Returns the present position, with the hash up to it, to which ``rewind`` can return."""
        return Mark(self.bytes, self._hash.copy())

    def rewind(self, mark: Mark) -> None:
        """Removes everything that was written after ``mark``. A mark can be used once."""
        written = self.bytes - len(self._waiting)
        if mark.bytes >= written:
            del self._waiting[mark.bytes - written :]
        else:
            self._waiting.clear()
            with writing(self._shown, 0):
                self._file.seek(mark.bytes)
                self._file.truncate()
        self.bytes, self._hash = mark.bytes, mark.hash

    def _flush(self, needed: int) -> None:
        with writing(self._shown, needed):
            self._file.write(self._waiting)
            self._file.flush()
        self._waiting.clear()


class HashedBeside:
    """A thread of the lowest priority that compares files with their expected hashes.

    Files that can't be read are skipped.

    Args:
        folder: the folder with the files.
        wanted: path in the folder -> expected SHA-256.

    Attributes:
        altered: the first file with another hash; None as long as there is none.
    """

    def __init__(self, folder: Path, wanted: Mapping[str, str]) -> None:
        self.altered: str | None = None
        self._opened: list[tuple[str, str, io.BufferedReader]] = []
        for name, expected in wanted.items():  # now: others may take their places, which is nothing to what is open
            with suppress(OSError):  # whoever reads it says so
                self._opened.append((name, expected, open_regular(folder / name, within=folder)))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="enginewright-hashes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end after the block that it is hashing."""
        self._stopped.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until all files are compared, or for ``seconds``; returns True if the thread has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # another system
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        piece = bytearray(_BLOCK)
        try:
            for name, expected, file in self._opened:
                digest = hashlib.sha256()
                try:
                    while not self._stopped.is_set() and (size := file.readinto(piece)):
                        digest.update(memoryview(piece)[:size])
                except OSError:
                    continue  # whoever reads it says so
                if self._stopped.is_set():
                    return
                if digest.hexdigest() != expected:
                    self.altered = name
                    return
        finally:
            for *_, file in self._opened:
                file.close()


@contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Turns an OSError of its block into a CapacityError if the disk is full, and otherwise into a BundleError.

    Args:
        path: the path that the message names.
        needed: the number of bytes to be written, for the message.
    """
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise CapacityError(
                f"{path}: no space for {needed:,} more bytes ({os.strerror(e.errno or 0)})",
                hint="Free space on that disk, or write the bundle to another one.",
            ) from e
        raise BundleError(
            f"{path}: cannot be written: {e.strerror or e}", hint="Choose a folder that you may write to."
        ) from e


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
