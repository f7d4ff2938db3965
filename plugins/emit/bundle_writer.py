"""Writes a bundle completely or not at all.

All files are written to a hidden folder next to the final name, which ``commit`` renames. An exception or Ctrl-C
removes that folder; the next export to the same name removes that of a killed process. The writer holds a lock (flock)
on the folder, which ends with the process, so that another process doesn't remove it while it is in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
import numpy.typing as npt

from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.hashed_file import HashedFile, Mark, sync_folder, writing
from enginewright.runtime.bundle.manifest import (
    REPORT_FOLDER,
    FileSection,
    Manifest,
    TargetManifest,
    check_path,
    target_folder,
    target_manifest_path,
)
from enginewright.runtime.bundle.output_folder import Inputs, output_place, why_not_a_bundle
from enginewright.runtime.bundle.weights import (
    ALIGNMENT,
    INDEX_PATH,
    Blob,
    SourceRows,
    TensorEntry,
    WeightsIndex,
    stored_bytes,
    stored_dtype,
)
from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.panel_layouts import Layout
from enginewright.runtime.shared.weight_formats import Storage

Data = npt.NDArray[np.generic] | Iterable[npt.NDArray[np.generic]]

BLOB_BYTES = 4 << 30
"""The size in bytes from which on a blob is complete and a new one begins; a tensor is never split."""


class BundleWriter:
    """A context manager that writes the bundle ``final_path``::

        with BundleWriter("smollm2.bundle") as writer:
            writer.write_text("targets/cpu/program.json", program.to_json())
            writer.weights().add("embed", table, parts=[SourceRows(source="model.embed", rows=(0, 49152))])
            writer.commit(manifest, {"cpu": TargetManifest()})

    Leaving the block without ``commit`` (or ``complete`` and ``publish``) removes all files.

    Args:
        final_path: the bundle to write. It may be an empty folder.
        overwrite: True replaces an existing bundle. A folder that isn't a bundle, or has other files too, is never
            replaced.
        inputs: the files from which the bundle is made, which must be outside of it.

    Raises:
        BundleError: ``final_path`` exists, or can't be used (see ``output_place``), or a file can't be written there.
        CapacityError: the disk is full; names the file and the bytes needed.
    """

    def __init__(
        self, final_path: str | os.PathLike[str], overwrite: bool = False, inputs: Inputs = MappingProxyType({})
    ) -> None:
        self.final_path = output_place(final_path, inputs)
        self._overwrite = overwrite
        self._files: dict[str, FileSection] = {}
        self._weights: WeightsWriter | None = None
        self._lock: int | None = None
        self._folder = self._sibling("partial")
        self._replaced = self._sibling("replaced")

    def __enter__(self) -> BundleWriter:
        self.check()
        try:
            with writing(self.final_path, 0):
                self.final_path.parent.mkdir(parents=True, exist_ok=True)
                self._remove_stale()
                self._folder.mkdir()
            self._lock = _lock(self._folder)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._weights is not None:
                self._weights.close()
        finally:
            self._discard()

    def _discard(self) -> None:
        """Removes all temporary folders. If there is no new bundle, the old one stays."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.path.lexists(self.final_path):
            shutil.rmtree(self._replaced, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_text(self, path: str, text: str) -> None:
        """Writes a UTF-8 file; see ``write_bytes``."""
        self.write_bytes(path, text.encode())

    def write_bytes(self, path: str, data: bytes) -> None:
        """Writes the file ``path`` (relative, with forward slashes). Raises ValueError for a path that was written
        before.
        """
        if path in self._files or path == MANIFEST_PATH:
            raise ValueError(f"{path} was written before")
        file = HashedFile(self._folder / check_path(path), self.final_path / path)
        try:
            file.write(data, needed=len(data))
            file.sync()
        finally:
            file.close()
        self._add(path, file)

    def adopt(self, path: str, source: Path) -> FileSection:
        """Moves the file ``source``, on the same disk, to ``path`` in the bundle; returns its size and hash.

        Raises ValueError for a path that was written before, BundleError if the file can't be moved.
        """
        if path in self._files or path == MANIFEST_PATH:
            raise ValueError(f"{path} was written before")
        place = self._folder / check_path(path)
        with writing(self.final_path / path, 0):
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256")
                size = os.fstat(file.fileno()).st_size
            os.rename(source, place)
        self._files[path] = FileSection(bytes=size, sha256=digest.hexdigest())
        return self._files[path]

    @contextmanager
    def undone_by_error(self, target: str) -> Iterator[None]:
        """A context that removes the files and weights that were written in it for ``target`` if it raises an error.

        A blob that was completed in it stays, but the index has none of its tensors.
        """
        files, weights = dict(self._files), self.weights()
        before = weights.mark()
        try:
            yield
        except BaseException:
            weights.rewind(before)
            shutil.rmtree(self._folder / target_folder(target), ignore_errors=True)
            for path in [path for path in self._files if path not in files and path not in weights.blob_paths]:
                (self._folder / path).unlink(missing_ok=True)
                del self._files[path]
            raise

    @property
    def bytes_written(self) -> int:
        """The bytes of the files that the manifests list."""
        return sum(file.bytes for file in self._files.values())

    def weights(self) -> WeightsWriter:
        """Returns the writer of the bundle's weights, of which there is one."""
        if self._weights is None:
            self._weights = WeightsWriter(self)
        return self._weights

    def finish_weights(self) -> None:
        """Completes the weights and writes their index; none may be added afterwards. ``complete`` calls it if nobody
        did.
        """
        if self._weights is not None and not self._weights.finished:
            self._weights.finish()

    @property
    def folder(self) -> Path:
        """The temporary folder of the bundle until it is published. A complete bundle can be opened there."""
        return self._folder

    def commit(self, manifest: Manifest, targets: Mapping[str, TargetManifest]) -> Manifest:
        """Completes the bundle and publishes it. Returns the manifest as written; see ``complete``."""
        written = self.complete(manifest, targets)
        self.publish()
        return written

    def complete(self, manifest: Manifest, targets: Mapping[str, TargetManifest]) -> Manifest:
        """Completes the weights and writes the manifests. Afterwards, only files in report/ may be written.

        Args:
            manifest: the manifest, whose ``targets`` and ``files`` are filled in.
            targets: target -> its manifest, whose ``files`` are filled in.

        Returns:
            the manifest as written.
        """
        self.finish_weights()
        files = dict(sorted(self._files.items()))
        for name, target in targets.items():
            prefix = f"{target_folder(name)}/"
            entries = {path.removeprefix(prefix): files.pop(path) for path in list(files) if path.startswith(prefix)}
            self._write_manifest(target_manifest_path(name), target.model_copy(update={"files": entries}).to_json())
        complete = manifest.model_copy(update={"targets": tuple(sorted(targets)), "files": files})
        text = complete.to_json()
        Manifest.from_json(text)
        self._write_manifest(MANIFEST_PATH, text)
        return complete

    def publish(self) -> None:
        """Renames the complete bundle to its final path."""
        with writing(self.final_path, 0):
            for folder, _, _ in os.walk(self._folder):
                sync_folder(Path(folder))
            self._rename()

    def _write_manifest(self, path: str, text: str) -> None:
        file = HashedFile(self._folder / path, self.final_path / path)
        data = text.encode()
        try:
            file.write(data, needed=len(data))
            file.sync()
        finally:
            file.close()

    def _rename(self) -> None:
        """Replaces the old bundle by the new one, by two renames. If the process is killed in between,
        ``_remove_stale`` repairs it.
        """
        self.check()
        try:
            if os.path.lexists(self.final_path / MANIFEST_PATH):
                os.rename(self.final_path, self._replaced)
            os.rename(self._folder, self.final_path)
        except BaseException:
            if self._replaced.exists() and not os.path.lexists(self.final_path):
                os.rename(self._replaced, self.final_path)
            raise
        sync_folder(self.final_path.parent)

    def check(self) -> None:
        """Raises BundleError if a file or folder at the final path may not be replaced."""
        path = self.final_path
        if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
            return
        if (why := why_not_a_bundle(path)) is not None:
            raise BundleError(f"{path} {why}", hint="Choose another path, or remove it yourself.")
        if not self._overwrite:
            raise BundleError(f"{path} exists", hint="Pass overwrite=True to replace it, or another path.")

    def _sibling(self, role: str) -> Path:
        return self.final_path.with_name(f".{self.final_path.name}.{role}-{uuid.uuid4().hex[:12]}")

    def _siblings(self, role: str) -> list[Path]:
        """Returns the temporary folders for this bundle that have the role ``role`` in their name."""
        ours = re.compile(re.escape(f".{self.final_path.name}.{role}-") + "[0-9a-f]{12}")
        matching = (p for p in self.final_path.parent.iterdir() if ours.fullmatch(p.name))
        return sorted(p for p in matching if p.is_dir() and not p.is_symlink())

    def _remove_stale(self) -> None:
        """Removes the temporary folders of killed exports to this path, and restores an old bundle that was moved
        away.
        """
        for path in self._siblings("replaced"):
            if os.path.lexists(self.final_path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.rename(path, self.final_path)
                self.check()
        for path in self._siblings("partial"):
            if (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)

    def _add(self, path: str, file: HashedFile) -> None:
        if not path.startswith(REPORT_FOLDER):
            self._files[path] = FileSection(bytes=file.bytes, sha256=file.digest())


@dataclass(frozen=True)
class WeightsMark:
    """A position in the weights of a bundle.

    Attributes:
        blobs: the number of complete blobs.
        at: the position in the open blob; None if no blob is open.
        tensors: the entries of the index, by name.
        places: the SHA-256 of each tensor's bytes -> its blob and offset.
    """

    blobs: int
    at: Mark | None
    tensors: dict[str, TensorEntry]
    places: dict[bytes, tuple[int, int]]


class WeightsWriter:
    """Writes tensors into blobs. Only the piece that is being written is in memory.

    Equal bytes (a table or a norm that two targets read in the same form) are stored once: the index has the same
    location for both tensors.
    """

    def __init__(self, writer: BundleWriter) -> None:
        self.finished = False
        self._writer = writer
        self._file: HashedFile | None = None
        self._blobs: list[Blob] = []
        self._tensors: dict[str, TensorEntry] = {}
        self._places: dict[bytes, tuple[int, int]] = {}  # SHA-256 of a tensor's bytes -> its blob and offset

    def add(
        self,
        name: str,
        data: Data,
        layout: Layout = "rows",
        parts: Sequence[SourceRows] = (),
        *,
        shape: tuple[int, ...] | None = None,
        dtype: Dtype = "f32",
        stored_as: Storage | None = None,
    ) -> TensorEntry:
        """Appends a tensor, and returns its entry of the index.

        Args:
            name: the name in the index, by which programs refer to it.
            data: the stored elements in order: an array, or arrays whose elements follow each other. For a layout of
                panels they are packed already (``weights.pack``, or panel by panel).
            layout: see ``weights``.
            parts: the rows of source tensors of which it consists.
            shape: the logical shape; not needed for one array in the layout rows.
            dtype: the elements' type, which the arrays must have.
            stored_as: the format whose blocks ``data`` has, instead of elements of ``dtype``; None for elements.

        Raises:
            ValueError: the name was added before, or data has another type or size than ``shape`` and ``dtype``.
        """
        if name in self._tensors or self.finished:
            raise ValueError(f"tensor {name} was added before, or after the weights were finished")
        if shape is None:
            if not isinstance(data, np.ndarray) or layout != "rows":
                raise ValueError(f"tensor {name}: shape is needed for chunks and for layout {layout}")
            shape = data.shape
        size = stored_bytes(shape, layout, dtype, stored_as)
        kind = np.dtype(np.uint8) if stored_as else stored_dtype(dtype, layout)
        file, digest = self._open_blob(), hashlib.sha256()
        before = file.mark()
        file.write(bytes(-file.bytes % ALIGNMENT), needed=size)
        offset = file.bytes
        for chunk in [data] if isinstance(data, np.ndarray) else data:
            if chunk.dtype != kind:
                raise ValueError(f"tensor {name}: a chunk is {chunk.dtype}, not {dtype}")
            data_of = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
            file.write(data_of, needed=size)
            digest.update(data_of)
        if file.bytes - offset != size:
            raise ValueError(f"tensor {name}: {file.bytes - offset} bytes given, {dtype} {shape} {layout} has {size}")
        place = self._places.setdefault(digest.digest(), (len(self._blobs), offset))
        if place != (len(self._blobs), offset):
            file.rewind(before)
        entry = TensorEntry(
            blob=place[0],
            offset=place[1],
            bytes=size,
            dtype=dtype,
            shape=shape,
            layout=layout,
            stored_as=stored_as,
            parts=tuple(parts),
        )
        self._tensors[name] = entry
        if file.bytes >= BLOB_BYTES:
            self._end_blob()
        return entry

    @property
    def blob_paths(self) -> frozenset[str]:
        """The paths of the complete blobs."""
        return frozenset(blob.file for blob in self._blobs)

    def mark(self) -> WeightsMark:
        """Returns the current position, to which ``rewind`` can return."""
        at = None if self._file is None else self._file.mark()
        return WeightsMark(len(self._blobs), at, dict(self._tensors), dict(self._places))

    def rewind(self, mark: WeightsMark) -> None:
        """Removes the tensors that were added since ``mark``, and their bytes in the open blob. A mark may be used
        once.
        """
        if self._file is not None:
            at = mark.at if len(self._blobs) == mark.blobs else None
            self._file.rewind(at or Mark(0, hashlib.sha256()))
        self._tensors, self._places = mark.tensors, mark.places

    def finish(self) -> None:
        """Completes the last blob and writes the index; called by ``BundleWriter.finish_weights``."""
        self.finished = True
        self._end_blob()
        index = WeightsIndex.from_tensors(tuple(self._blobs), dict(sorted(self._tensors.items())))
        self._writer.write_text(INDEX_PATH, index.to_json())

    def close(self) -> None:
        """Closes the open blob, if any. May be called again."""
        if self._file is not None:
            self._file.close()

    def _open_blob(self) -> HashedFile:
        if self._file is None:
            path = blob_path(len(self._blobs))
            self._file = HashedFile(self._writer._folder / path, self._writer.final_path / path)
        return self._file

    def _end_blob(self) -> None:
        if self._file is None:
            return
        file, path = self._file, blob_path(len(self._blobs))
        file.sync()
        file.close()
        self._file = None
        self._blobs.append(Blob(file=path, bytes=file.bytes))
        self._writer._add(path, file)


def blob_path(index: int) -> str:
    """Returns the path of a blob in the bundle."""
    return f"weights/weights-{index:05d}.bin"


def _lock(folder: Path) -> int | None:
    """Returns a descriptor that holds the lock on ``folder``; None if another process holds it, or if the folder is
    gone.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
