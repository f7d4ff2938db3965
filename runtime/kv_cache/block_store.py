"""Blocks of the prefix cache in a folder: written when they leave the pool, read where that is faster than computing.

A record is one file, and is verified before it is used. Its name is a keyed hash of everything that its keys and values
depend on: the program and weights, the instruction set and the order of sums (``identity``), the tenant, and every
token up to its end. The record ends with a keyed hash (BLAKE2b, RFC 7693) of its name and contents. A record that was
truncated, changed, renamed, or forged without the key is not read, and its tokens are recomputed. The key is outside
the folder.

::

    "EWKV0001" | payloads (u32) | bytes of each (u64) | K tokens (i32) | payloads, one per cache group | hash (32 bytes)

The states of recurrent layers after a block of tokens are a record of their own, whose name is a hash of the block's.
States after the first tokens of a block are in one record with the keys and values of these tokens.

The folder is the user's alone (0700, no link), and one process writes it, which holds a lock; another reads. A file is
written under another name, then renamed. If the files take more bytes than a limit, the least recently used is deleted;
old files are deleted too.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import queue
import re
import secrets
import stat
import struct
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from enginewright.runtime.requests.block_keys import Item, Namespace, token_ids

from ..bundle.regular_file import read_regular
from ..shared.errors import shown
from .record_names import HASH_BYTES, RecordNames

Payload = npt.NDArray[np.uint8]
"""A block's memory in all layers of a group."""

MAGIC = b"EWKV0001"
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{64})\.kv")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9]+\.partial")
_LOCK = ".lock"
_WAITING_WRITES, _WAITING_BYTES = 64, 1 << 28
"""The most blocks, and bytes, that wait to be written; further blocks are skipped, as waiting blocks hold memory."""
_SECONDS_TO_CLOSE = 60.0


@dataclass
class StoreUse:
    """Counts of blocks that were read from and written to the folder so far.

    Attributes:
        read, written: blocks that were read and written.
        refused: records that were damaged or not ours; their tokens were recomputed.
        skipped: blocks that weren't written, since the disk was behind or failed.
        deleted: files that were deleted for their age or for the limit of size.
    """

    read: int = 0
    written: int = 0
    refused: int = 0
    skipped: int = 0
    deleted: int = 0


class BlockStore(RecordNames):
    """A folder of records, one for each block of the prefix cache. Not safe for several threads.

    The first problem with the folder, a file or the disk is reported as a RuntimeWarning, and in ``problem``. Requests
    are then computed as if nothing had been stored.

    Args:
        folder: the folder; created if it is missing.
        identity: see ``disk_tier.BlockMemory.cache_identity``.
        most_bytes: the most bytes of all its files.
        most_age: the most seconds since a record was last used.
        key_file: the file of the key; created if it is missing. None takes ``default_key_file()``.
    """

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        *,
        most_bytes: int,
        most_age: float = float("inf"),
        key_file: Path | None = None,
    ) -> None:
        super().__init__(b"", identity)
        self.folder = folder
        self.use = StoreUse()
        self.problem: str | None = None
        self.seconds_per_block: float | None = None  # of reading, so far
        self._most_bytes = most_bytes
        self._most_age = most_age
        self._files: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # name's hash -> file, bytes; oldest use first
        self._bytes = 0
        self._guard = threading.Lock()  # of the two above and of ``use``
        self._lock: int | None = None
        self._writer: threading.Thread | None = None
        self._queue: queue.Queue[tuple[bytes, str, Sequence[int], list[Payload]] | None] = queue.Queue(_WAITING_WRITES)
        self._waiting: dict[bytes, int] = {}  # name's hash -> bytes of its payloads
        self._off = False
        try:
            key_file = default_key_file() if key_file is None else key_file
            own_folder(folder)
            if key_file.resolve().is_relative_to(folder.resolve()):
                raise OSError(0, "its key would lie in it", os.fspath(key_file))
            self._key = _read_key(key_file)
            self._take_lock()
            self._look()
        except OSError as e:
            self._key = b""
            self._say(f"{e.filename or folder}: {e.strerror}; it is not used", raises=True)

    @property
    def usable(self) -> bool:
        """True if records may be read: the folder had no problem so far."""
        return bool(self._key) and not self._off

    @property
    def writable(self) -> bool:
        """True if this process writes records: it holds the folder's lock."""
        return self.usable and self._lock is not None

    def has(self, name: bytes) -> bool:
        """Returns True if there is a record of this name; it may still turn out to be damaged."""
        return name in self._files

    def read(self, name: bytes, items: Sequence[Item], sizes: Sequence[int]) -> list[Payload] | None:
        """Returns the payloads of a record; None if it is missing, damaged, or of other tokens or sizes.

        Args:
            name: the record's name.
            items: the items of its block.
            sizes: the bytes of each payload.
        """
        with self._guard:
            if name not in self._files:
                return None
            file, length = self._files[name]
        start = time.perf_counter()
        path = self.folder / file
        try:
            data = memoryview(read_regular(path, most=length, within=self.folder))
            payloads = self._checked(name, data, token_ids(items), sizes)
        except (OSError, ValueError) as e:
            if not isinstance(e, FileNotFoundError):  # which the writer may have deleted
                self._say(f"{path}: {e.strerror if isinstance(e, OSError) else e}; its tokens are computed again")
                self.use.refused += 1
            self._forget(name, delete=not isinstance(e, FileNotFoundError))
            return None
        seconds = time.perf_counter() - start
        before = self.seconds_per_block
        self.seconds_per_block = seconds if before is None else 0.9 * before + 0.1 * seconds
        self.use.read += 1
        return payloads

    def write(
        self,
        name: bytes,
        namespace: Namespace,
        items: Sequence[Item],
        payloads: list[Payload],
        *,
        wait: bool = False,
    ) -> None:
        """Queues a record to be written by a thread, unless the folder has it already.

        Args:
            name: the name of the record.
            namespace: the namespace of the tokens.
            items: the items of the block's tokens.
            payloads: the contents of the record.
            wait: True waits for room in the queue; False skips the record if there is no room.
        """
        if not self.writable or name in self._files or name in self._waiting:
            return
        size = sum(map(len, payloads))
        if self._waiting and sum(tuple(self._waiting.values())) + size > _WAITING_BYTES:
            if not wait:
                self.use.skipped += 1
                return
            self.flush()
        try:
            if self._writer is None:
                writer = threading.Thread(target=self._write_all, name="enginewright-prefixes", daemon=True)
                writer.start()
                self._writer = writer
            self._waiting[name] = size
            self._queue.put(
                (name, self._folder_part(namespace.tenant), token_ids(items), payloads),
                block=wait,
                timeout=_SECONDS_TO_CLOSE,
            )
        except queue.Full:
            self._waiting.pop(name, None)
            self.use.skipped += 1
            if wait:
                self._switch_off(f"the disk takes nothing for {_SECONDS_TO_CLOSE:g} s")
        except RuntimeError as e:
            self._waiting.pop(name, None)
            self._switch_off(str(e))  # no thread can be started

    def used(self, names: Sequence[bytes]) -> None:
        """Marks the records of a prefix as used now.

        ``names`` has the records in the order of tokens. Among them the last one is deleted first, as it is useless
        without the others.
        """
        for name in reversed(names):
            with self._guard:
                if name not in self._files:
                    continue
                self._files.move_to_end(name)
                file, _ = self._files[name]
            with suppress(OSError):
                _touch(self.folder / file)

    def delete(self, tenant: str | None = None) -> int:
        """Deletes the records of a tenant, or of all tenants if ``tenant`` is None.

        Returns the number of deleted files.

        Records of other models are deleted too.
        """
        if not self.writable:
            return 0
        self.flush()
        part = None if tenant is None else self._folder_part(tenant)
        gone = [name for name, (file, _) in list(self._files.items()) if part is None or file.startswith(part)]
        for name in gone:
            self._forget(name, delete=True)
        return len(gone)

    def flush(self) -> None:
        """Waits until all queued records are written or skipped, a minute at most."""
        done = self._queue.all_tasks_done
        with done:
            if not done.wait_for(lambda: not self._queue.unfinished_tasks, _SECONDS_TO_CLOSE):
                self._switch_off(f"the disk isn't done after {_SECONDS_TO_CLOSE:g} s")

    def close(self) -> None:
        """Waits until all queued records are written, a minute at most, and ends the thread."""
        if self._writer is not None:
            with suppress(queue.Full):
                self._queue.put(None, timeout=_SECONDS_TO_CLOSE)
                self._writer.join(_SECONDS_TO_CLOSE)
            self._writer = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._key = b""

    def describe(self) -> dict[str, object]:
        """Returns the facts about the folder for ``LLM.info()``."""
        used = dict(vars(self.use)) | {"files": len(self._files), "bytes": self._bytes}
        return {"folder": str(self.folder), "problem": self.problem, "writes": self.writable} | used

    def _folder_part(self, tenant: str) -> str:
        """Returns the first part of the names of a tenant's files: a hash from which the tenant can't be derived."""
        return self._hash("tenant", tenant.encode()).hex()[:16]

    def _checked(self, name: bytes, data: memoryview, tokens: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        """Returns the payloads of a record. Raises ValueError if it is truncated, altered, or of other tokens or sizes.

        Args:
            name: the record's name.
            data: the contents of its file.
            tokens: the tokens that it must have.
            sizes: the bytes that each payload must have.
        """
        end = len(data) - HASH_BYTES
        if end < 0 or not hmac.compare_digest(self._seal(name, [data[:end]]), bytes(data[end:])):
            raise ValueError("it is damaged, or was not written with this key")
        head = _head(tokens, sizes)
        if bytes(data[: len(head)]) != head or end != len(head) + sum(sizes):  # an older format, say
            raise ValueError("it holds something else")
        payloads, at = [], len(head)
        for size in sizes:
            payloads.append(np.frombuffer(data[at : at + size], np.uint8))
            at += size
        return payloads

    def _seal(self, name: bytes, parts: Iterable[bytes | memoryview]) -> bytes:
        digest = hashlib.blake2b(name, digest_size=HASH_BYTES, key=self._key, person=b"ew-record")
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _write_all(self) -> None:
        """Writes queued records until the queue gives None. Each record is marked as done even after an error, as
        ``flush`` waits for that.
        """
        while (work := self._queue.get()) is not None:
            name, part, tokens, payloads = work
            try:
                if not self._off:
                    self._write(name, f"{part}-{name.hex()}.kv", tokens, payloads)
            except OSError as e:  # a full disk, say: later blocks are tried again
                self._say(f"{e.filename or self.folder}: {e.strerror}; blocks that can't be written are not kept")
                self.use.skipped += 1
            except BaseException as e:  # noqa: BLE001  nobody is above this thread
                self._switch_off(f"writing a block failed: {shown(e, 300)}")
                self.use.skipped += 1
            finally:
                self._waiting.pop(name, None)
                self._queue.task_done()

    def _switch_off(self, why: str) -> None:
        """Stops all reading and writing; requests are then computed as if nothing had been stored."""
        self._off = True
        self._say(f"{self.folder}: {why}; it is not used any more")

    def _write(self, name: bytes, file: str, tokens: Sequence[int], payloads: list[Payload]) -> None:
        head = _head(tokens, [len(payload) for payload in payloads])
        size = len(head) + sum(map(len, payloads)) + HASH_BYTES
        if size > self._most_bytes:
            self.use.skipped += 1
            return
        while self._files and self._bytes + size > self._most_bytes:
            self._forget(next(iter(self._files)), delete=True)
            self.use.deleted += 1
        unfinished = self.folder / f".{name.hex()}.{os.getpid()}.partial"
        try:
            descriptor = os.open(
                unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            with open(descriptor, "wb") as out:
                parts: list[bytes | memoryview] = [head, *(payload.data for payload in payloads)]
                for part in [*parts, self._seal(name, parts)]:
                    out.write(part)
            _touch(unfinished)
            os.replace(unfinished, self.folder / file)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        with self._guard:
            self._files[name] = file, size
            self._bytes += size
            self.use.written += 1

    def _forget(self, name: bytes, *, delete: bool) -> None:
        with self._guard:
            if name not in self._files:
                return
            file, size = self._files.pop(name)
            self._bytes -= size
        if delete and self.writable:
            with suppress(OSError):
                (self.folder / file).unlink()

    def _take_lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self.folder / _LOCK, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock = lock
        except OSError:
            os.close(lock)
            self._say(f"{self.folder}: another process writes it; this one only reads", raises=True)

    def _look(self) -> None:
        """Lists the folder's records, and deletes those that are too old. Files that aren't records are ignored."""
        now, records = time.time(), []
        for entry in os.scandir(self.folder):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                continue
            old = now - status.st_mtime > self._most_age
            if match := _NAME.fullmatch(entry.name):
                if not old:
                    records.append((status.st_mtime_ns, bytes.fromhex(match[2]), entry.name, status.st_size))
                elif self.writable:
                    Path(entry.path).unlink(missing_ok=True)
                    self.use.deleted += 1
            elif _UNFINISHED.fullmatch(entry.name) and self.writable:  # of a process that was killed: we have the lock
                Path(entry.path).unlink(missing_ok=True)
        for _, name, file, size in sorted(records):
            self._files[name] = file, size
            self._bytes += size

    def _say(self, problem: str, *, raises: bool = False) -> None:
        """Reports the first problem as a warning.

        ``raises``: True if a filter that turns warnings into errors may raise here; elsewhere that would end a thread
        for which others wait.
        """
        if self.problem is not None:
            return
        self.problem = problem
        try:
            warnings.warn(f"prefix cache: {problem}", RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            if raises:
                raise


def default_key_file() -> Path:
    """Returns ``$XDG_CONFIG_HOME/enginewright/prefix-cache.key``, with ``~/.config`` if the variable isn't set."""
    root = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(root, "enginewright", "prefix-cache.key")


def _touch(path: Path) -> None:
    """Sets a file's times to now, in nanoseconds: the system's own times are coarser."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _head(tokens: Sequence[int], sizes: Sequence[int]) -> bytes:
    return MAGIC + struct.pack(f"<I{len(sizes)}Q{len(tokens)}i", len(sizes), *sizes, *tokens)


def own_folder(folder: Path) -> None:
    """Creates a folder, or checks that it belongs to the user alone. Raises OSError if it doesn't."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(0, "it is not a folder (a link to one is not taken)", os.fspath(folder))
    if status.st_uid != os.getuid():
        raise OSError(0, "it belongs to another user", os.fspath(folder))
    if status.st_mode & 0o077:
        raise OSError(0, "others may read or write it: chmod 700", os.fspath(folder))


def _read_key(path: Path) -> bytes:
    """Returns the key in the file at ``path``, which is created with a random key if it is missing. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(path):
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as out:
                out.write(secrets.token_bytes(HASH_BYTES))
            with suppress(FileExistsError):  # another process was faster: its key counts
                os.link(unfinished, path)
        finally:
            unfinished.unlink()
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(0, "this key is another user's, or others may read it: chmod 600", os.fspath(path))
    key = read_regular(path, most=HASH_BYTES)
    if len(key) != HASH_BYTES:
        raise OSError(0, "this key is damaged: delete it, and what was kept with it is computed again", os.fspath(path))
    return key
