"""A cache of bundles that exports have made on this machine, for later exports with the same result.

An entry's key hashes all that an export depends on: the source's bytes, our own code, the recipe with its files and the
user's, the versions of the libraries, and the processor. Time stamps aren't used. An entry is a whole bundle that was
compared with its source. Its files are hashed again before use; if one differs, the entry is removed and the export
runs.

    ~/.cache/enginewright/exports/KEY/entry.json     description, and the size and SHA-256 of each file
    ~/.cache/enginewright/exports/KEY/bundle/...     the files

Entries are written under temporary names and renamed. Beyond the maximum size, the least recently used are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO

import msgspec

import enginewright
from enginewright.optimizer.capture.find_source import describe_source
from enginewright.optimizer.capture.gguf.header import all_parts
from enginewright.optimizer.recipes.bucket_section import FILE_FIELDS
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.report.document import REPORT_PATH
from enginewright.optimizer.shared.files import hash_file
from enginewright.optimizer.shared.resources import peak_rss_bytes
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle.hashed_file import writing
from enginewright.runtime.bundle.manifest import FileSection, check_path
from enginewright.runtime.bundle.output_folder import Inputs, files_in
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, open_regular, read_regular
from enginewright.runtime.executors.kept_files import cache_file
from enginewright.runtime.shared.errors import CapacityError, RequestError

from .report import ExportReport

MOST_BYTES = 8 << 30
"""The most bytes of all entries together; a tenth of the disk's free space if that is less."""

LEAST_SOURCE_BYTES = 32 << 20
"""The size of a source from which on its exports are cached. A smaller one is exported as fast as it is looked up."""

FORMAT = 1
_CHUNK = 4 << 20
_ENTRY, _BUNDLE = "entry.json", "bundle"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_LEFT_AFTER = 24 * 3600.0
"""The seconds after which an unfinished entry counts as the remains of a killed export."""

_BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files next to a GGUF file that libraries may read."""


@dataclass(frozen=True)
class Entry:
    """The content of ``entry.json``, which describes a kept bundle.

    Attributes:
        key: the key that names the entry.
        source, recipe, targets: as in the export's report.
        made: time of the export, in seconds since 1970.
        files: path in the bundle -> size and SHA-256.
    """

    key: str
    source: str
    recipe: str
    targets: tuple[str, ...]
    made: float
    files: dict[str, FileSection]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class KeptExports:
    """The folder of entries. If ``root`` is None, because the user has no home folder, nothing is cached or found."""

    def __init__(self, root: Path | None) -> None:
        self.root = root

    @staticmethod
    def of_user() -> KeptExports:
        """Opens the cache below $XDG_CACHE_HOME, or ~/.cache."""
        place = cache_file("exports")
        return KeptExports(None if place is None else place.parent)

    def entries(self) -> list[Entry]:
        """Returns all readable entries, the most recently used first."""
        if self.root is None or not self.root.is_dir():
            return []
        root = self.root
        names = sorted(self._names(), key=lambda name: -_used(root / name))
        return [entry for name in names if (entry := self._read(name)) is not None]

    def bundle(self, key: str) -> Path | None:
        """Returns the folder of a cached bundle, to be served from there; None if there is no such entry.

        Only the sizes of its files are checked here. ``LLM`` checks their hashes.
        """
        entry = self._read(key)
        if self.root is None or entry is None:
            return None
        place = self.root / key / _BUNDLE
        for path, file in entry.files.items():
            if not (place / path).is_file() or (place / path).stat().st_size != file.bytes:
                _remove(self.root / key)
                return None
        with contextlib.suppress(OSError):
            os.utime(self.root / key)
        return place

    def clear(self) -> int:
        """Removes all entries, even unreadable ones, except exports in progress. Returns the number of freed bytes."""
        if self.root is None or not self.root.is_dir():
            return 0
        names = [name for name in os.listdir(self.root) if not self._in_progress(name)]
        freed = sum(_bytes_below(self.root / name) for name in names)
        for name in names:
            _remove(self.root / name)
        return freed

    def take(self, key: str, folder: Path) -> Entry | None:
        """Copies the files of an entry into the empty ``folder``, and checks their hashes.

        Returns None if there is no such entry.

        A damaged entry is removed. Raises OSError if ``folder`` can't be written.
        """
        entry = self._read(key)
        if self.root is None or entry is None:
            return None
        place = self.root / key / _BUNDLE
        for path, file in entry.files.items():
            if not _copy(place / path, folder / path, file):
                _remove(self.root / key)
                for leftover in folder.iterdir():
                    _remove(leftover)
                return None
        with contextlib.suppress(OSError):
            os.utime(self.root / key)
        return entry

    def keep(self, entry: Entry, bundle: Path, most: int | None = None) -> bool:
        """Adds an entry with the files of ``bundle``, as hard links if they are on the same disk.

        An existing entry with the key isn't changed. Least recently used entries are removed until all have at most
        ``most`` bytes.

        Returns False if the entry can't be written or is too large; no error is raised, as the export itself succeeded.
        """
        if self.root is None:
            return False
        if self.bundle(entry.key) is not None:  # which a process may be running; it is as good
            return True
        new = self.root / f".{entry.key}.{uuid.uuid4().hex[:12]}"
        try:
            new.mkdir(parents=True, mode=0o700)
            room = min(MOST_BYTES, shutil.disk_usage(new).free // 10) if most is None else most
            if entry.bytes > room:
                return False
            for path in entry.files:
                target = new / _BUNDLE / path
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(bundle / path, target)
                except OSError:
                    shutil.copyfile(bundle / path, target)
            (new / _ENTRY).write_bytes(msgspec.json.format(msgspec.json.encode(entry)))
            _remove(self.root / entry.key)
            os.rename(new, self.root / entry.key)
            self._make_room(room)
        except OSError:
            return False
        finally:
            _remove(new)
        return True

    @contextmanager
    def exporting(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Locks an entry while it is exported; another process that needs it waits, and calls ``on_wait``.

        The lock ends with the process. On a file system without locks nobody waits; then two exports may run, and the
        later one replaces the entry.

        Raises CapacityError or RequestError if the folder can't be written.
        """
        assert self.root is not None
        lock = self.root / f".{key}.lock"
        with _writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = _locked(lock, on_wait)
        try:
            yield
        finally:
            _remove(lock)  # before it is let go: whoever waits for it sees that it has no name any more
            file.close()

    @contextmanager
    def unfinished(self, key: str) -> Iterator[Path]:
        """Yields a temporary path for the bundle of ``key``. It and the remains of killed exports are removed.

        Raises CapacityError or RequestError if the folder can't be written.
        """
        assert self.root is not None
        for left in self.root.glob(f".{key}.*"):
            if left.is_dir():
                _remove(left)
        with _writing(self.root), tempfile.TemporaryDirectory(prefix=f".{key}.", dir=self.root) as folder:
            yield Path(folder) / "model.bundle"

    def _make_room(self, most: int) -> None:
        assert self.root is not None
        total = 0
        for entry in self.entries():
            total += entry.bytes
            if total > most:
                _remove(self.root / entry.key)
        for left in self.root.glob(".*"):  # of killed exports
            if time.time() - _used(left) > _LEFT_AFTER and not self._in_progress(left.name):
                _remove(left)

    def _in_progress(self, name: str) -> bool:
        """Returns True if a file or folder belongs to an export that a process is making."""
        assert self.root is not None
        if not name.startswith("."):
            return False
        try:
            with open(self.root / f".{name.split('.')[1]}.lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is no lock, or the file system has none
            return False
        return False

    def _names(self) -> Iterator[str]:
        assert self.root is not None
        for name in os.listdir(self.root):
            if len(name) == 64 and not set(name) - set("0123456789abcdef"):
                yield name

    def _read(self, key: str) -> Entry | None:
        if self.root is None:
            return None
        folder = self.root / key
        try:
            text = read_regular(folder / _ENTRY, most=MOST_JSON_BYTES, within=folder)
            entry = msgspec.json.decode(text, type=Entry)
            for path in entry.files:
                check_path(path)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        return entry if (entry.key, entry.format) == (key, FORMAT) else None


def no_room(root: Path | None, what: str) -> CapacityError:
    """Returns the error of a cache whose disk is full. ``what`` continues the sentence "FOLDER hasn't the room ..."."""
    return CapacityError(
        f"{root} hasn't the room {what}",
        hint="Run `optimize cache clear`, free space on that disk, or set XDG_CACHE_HOME to a folder on another one.",
    )


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Converts errors of writing the cache to errors that name it."""
    try:
        yield
    except CapacityError as e:
        if isinstance(e.__cause__, OSError):
            raise no_room(root, "for another bundle") from e
        raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(root, "for another bundle") from e
        place = None if e.filename is None else Path(os.fsdecode(e.filename))
        if place is None or not (place.is_relative_to(root) or root.is_relative_to(place)):
            raise
        raise RequestError(
            f"{root}, where exports are kept, can't be written: {e.strerror or type(e).__name__}",
            hint="Check its permissions, or set XDG_CACHE_HOME to a folder that you may write to.",
        ) from e


def _locked(path: Path, on_wait: Callable[[], None]) -> IO[bytes]:
    """Opens a file and locks it against other processes that use this function. Raises OSError if it can't be made."""
    while True:
        file = open(path, "ab")  # noqa: SIM115  the lock ends when it is closed
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            return file
        with contextlib.suppress(OSError):  # one that has lost its name was another process's, which is done
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def take_export(key: str, output: str | Path, overwrite: bool, inputs: Inputs, start: float) -> ExportReport | None:
    """Copies the bundle of a cached export to ``output``, and returns that export's report; None if none is cached.

    Args:
        key: the key under which the export is cached.
        output: the folder to write.
        overwrite: True if an existing bundle may be replaced.
        inputs: option -> path of each input, none of which may be in the output.
        start: the time at which this export began, of ``time.perf_counter``.

    Raises the errors of writing a bundle.
    """
    with BundleWriter(output, overwrite, inputs) as writer:
        with writing(writer.final_path, 0):
            entry = KeptExports.of_user().take(key, writer.folder)
        if entry is None:
            return None
        try:
            saved = msgspec.json.decode((writer.folder / REPORT_PATH).read_bytes())
            report = msgspec.convert(saved, ExportReport)
        except (OSError, msgspec.MsgspecError):
            return None
        writer.publish()
    return replace(
        report,
        path=str(output),
        seconds=round(time.perf_counter() - start, 3),
        peak_rss_bytes=peak_rss_bytes(),
        kept_since=datetime.fromtimestamp(entry.made, UTC).isoformat(timespec="seconds"),
    )


def keep_export(key: str, report: ExportReport, source: str | Path) -> None:
    """Adds the bundle that an export has just written to the cached exports, if there is room for it."""
    with contextlib.suppress(OSError):  # somebody has moved the bundle already
        entry = describe(key, Path(report.path), report.recipe, report.targets, describe_source(Path(source)).name)
        KeptExports.of_user().keep(entry, Path(report.path))


def describe(key: str, bundle: Path, recipe: str, targets: Iterable[str], source: str) -> Entry:
    """Returns the entry in the cache of exports for a new bundle, with the hash of each of its files.

    Args:
        key: key of the export, from `key_of`.
        bundle: folder of the bundle.
        recipe: name of the recipe.
        targets: names of the targets.
        source: name of the source model.
    """
    files = {path: hash_file(bundle / path) for path in sorted(files_in(bundle))}
    return Entry(key, source, recipe, tuple(targets), time.time(), files)


def key_of(
    source: Path,
    recipe: Recipe,
    *,
    files: Mapping[str, str | Path | None] | None = None,
    least: int | None = None,
    targets: Sequence[str] | None = None,
    **others: object,
) -> str | None:
    """Returns the key under which an export of a local source is cached; None if it isn't cached.

    An export isn't cached if the source is smaller than ``least`` bytes, or if the recipe uses targets or passes of
    other packages, whose code may change under the same version.

    Args:
        source: a folder or a GGUF file.
        recipe: the recipe, with the changes of all options.
        files: other files that are read, by the options' names.
        least: smallest source in bytes; None for LEAST_SOURCE_BYTES.
        targets: targets that replace the recipe's.
        others: every other argument that changes the result, as plain values.

    Raises OSError if a file can't be read.
    """
    targets = recipe.targets if targets is None else tuple(targets)
    if {*targets, *(name for name, on in recipe.passes.items() if on)} & _foreign():
        return None
    read = _files_of_source(source)
    if sum(os.path.getsize(path) for path in read.values()) < (LEAST_SOURCE_BYTES if least is None else least):
        return None
    beside = {name: getattr(recipe.buckets, name) for name in FILE_FIELDS} if recipe.buckets is not None else {}
    extra_files = {name: path for name, path in {**beside, **(files or {})}.items() if path is not None}
    if not all(os.path.isfile(path) for path in extra_files.values()):  # a pipe is read once
        return None
    facts = {
        "format": FORMAT,
        "source": describe_source(source).model_dump(mode="json"),
        "bytes": {name: hash_file(path).sha256 for name, path in read.items()},
        "recipe": recipe.model_dump(mode="json"),
        "files": {name: (str(path), hash_file(Path(path)).sha256) for name, path in extra_files.items()},
        "others": others | {"targets": targets},
        "code": _our_code(),
        "versions": _versions(targets),
        "machine": _machine(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _files_of_source(source: Path) -> dict[str, Path]:
    """Returns all files of a folder; for a GGUF file, its parts and the neighbouring files that libraries read."""
    if source.is_dir():
        return {path: source / path for path in sorted(files_in(source)) if (source / path).is_file()}
    beside = [p for p in sorted(source.parent.iterdir()) if p.name in _BESIDE and p.is_file()]
    return {p.name: p for p in (*all_parts(source), *beside)}


def _foreign() -> set[str]:
    """Returns the names of targets and passes that other packages declare."""
    groups = ("enginewright.targets", "enginewright.passes")
    return {entry.name for group in groups for entry in metadata.entry_points(group=group)}


@cache
def _our_code() -> str:
    """Returns a hash of all files of the package, sources and compiled ones.

    The version isn't enough for a working tree.
    """
    digest = hashlib.sha256()
    sources = {
        f"{i}/{path}": Path(root, path) for i, root in enumerate(enginewright.__path__) for path in _sources(root)
    }
    for name, path in sorted(sources.items()):
        digest.update(f"{name} {hash_file(path).sha256}\n".encode())
    return digest.hexdigest()


def _sources(root: str) -> list[str]:
    """Returns the files below a folder. Links, by which a working tree has the parts of the package, are followed."""
    return [
        os.path.relpath(os.path.join(folder, name), root)
        for folder, folders, names in os.walk(root, followlinks=True)
        if "__pycache__" not in folder
        for name in names
    ]


def _versions(targets: Iterable[str]) -> dict[str, str | None]:
    """Returns package -> version, for all packages on which an export to ``targets`` depends.

    These are the requirements of this package, of its extra "export", and of the extras of the targets. An extra that
    shares a package with a target's, such as one for another build of a library, counts too.
    """
    extras: dict[str, set[str]] = {}
    for line in metadata.requires("enginewright") or []:
        extra = re.search(r"extra == .([\w-]+)", line)
        extras.setdefault("" if extra is None else extra[1], set()).add(re.split(r"[^\w.-]", line)[0])
    names = extras.get("", set()) | extras.get("export", set())
    for target in targets:
        target_extra = extras.get(target, set()) - names
        names |= target_extra.union(*(others for others in extras.values() if target_extra & others))
    return {name: _version(name) for name in sorted(names)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, object]:
    """Returns facts of the processor and of libraries' settings, on which rounding and the reported speeds depend."""
    lines = _lines(Path("/proc/cpuinfo"))
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")},
        "gpus": sorted(str(line) for p in Path("/proc/driver/nvidia").glob("gpus/*/information") for line in _lines(p)),
        "driver": _lines(Path("/proc/driver/nvidia/version")),
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _copy(source: Path, target: Path, expected: FileSection) -> bool:
    """Copies a file, and returns True if its size and hash are as expected. Raises OSError if ``target`` can't be
    written.
    """
    try:
        file = open_regular(source, most=expected.bytes)
    except OSError:
        return False
    digest, size = hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with file, open(target, "xb") as copy:
        while True:
            try:
                piece = file.read(_CHUNK)
            except OSError:
                return False
            if not piece:
                break
            digest.update(piece)
            size += len(piece)
            copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())
    return (size, digest.hexdigest()) == (expected.bytes, expected.sha256)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _bytes_below(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def _remove(path: Path) -> None:
    """Removes a file or folder, if it exists; another process may remove it at the same time."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
