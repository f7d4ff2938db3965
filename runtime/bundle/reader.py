"""Opens a bundle: checks its structure and maps its weights. Reads no weight, runs no code, never unpickles."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import shlex
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from enginewright.plugins.shared.contracts import ModelInfo
from enginewright.plugins.shared.errors import BundleError, CapacityError
from enginewright.plugins.shared.lowered_program import LoweredProgram

from .buckets import Bucket, BucketPlan, plan_path
from .manifest import (
    MANIFEST_PATH,
    FileSection,
    Manifest,
    TargetManifest,
    check_own_hash,
    target_folder,
    target_manifest_path,
)
from .output_folder import shortened, unlisted_files
from .regular_file import MOST_JSON_BYTES, MOST_TEXT_BYTES, open_regular, read_regular
from .segments import SegmentSchedule, segments_path
from .tensorrt_plan import HEADER_BYTES, PlanHeader, check_plan
from .tensorrt_section import TensorRtSection
from .tokenizer_files import (
    CHAT_TEMPLATE_PATH,
    CHAT_TEMPLATES_FOLDER,
    SPECIAL_TOKENS_PATH,
    TOKENIZER_FOLDER,
    TOKENIZER_PATH,
    TokenizerFiles,
)
from .weights import INDEX_PATH, TensorEntry, WeightsIndex

PROGRAM_FILE = "program.json"
"""The lowered program in the folder of a target that starts from one."""

Load = Literal["map", "read"]
"""How weights get into memory: mapped from their files, or copied."""

_HASH_CHUNK = 1 << 22
_UNREADABLE = "Check its permissions; if it is damaged, copy or export the bundle again."


class Bundle:
    """An open bundle. ``Bundle.open`` checks it; the attributes are as they are on disk.

    Attributes:
        path: its folder.
        manifest: manifest.json.
        targets: target -> its manifest.
        files: every file that a manifest lists, with its size and hash.
        index: weights/index.json.
        programs: target name -> its lowered program, for targets that have one and are ready.
        buckets: target name -> the fixed sizes of its steps, for targets that have some.
        segments: target name -> the schedule of its segments, for targets that have some and are ready.
    """

    def __init__(self, path: Path, manifest: Manifest, targets: dict[str, TargetManifest]) -> None:
        self.path = path
        self.manifest = manifest
        self.targets = targets
        self.files: dict[str, FileSection] = dict(manifest.files)
        for name, target in targets.items():
            self.files |= {f"{target_folder(name)}/{file}": section for file, section in target.files.items()}
        self.index = WeightsIndex()
        self.programs: dict[str, LoweredProgram] = {}
        self.buckets: dict[str, BucketPlan] = {}
        self.segments: dict[str, SegmentSchedule] = {}
        self._blobs: dict[int, npt.NDArray[np.uint8]] = {}
        self._mapped: dict[int, tuple[int, tuple[int, int]]] = {}  # blob -> a descriptor of its file, and its state
        self._copies: dict[tuple[int, int, int], npt.NDArray[np.uint8]] = {}  # blob, offset, size -> in memory

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Opens the bundle in folder ``path``.

        Checks the manifest and its version, that every listed file is there with its size and lies in the folder, that
        every tensor lies in its blob, that the programs are valid and find every weight in the layout they need, and
        that the engines' headers are what their target's manifest says.
        Hashes are checked by ``verify_hashes`` only.

        Raises:
            BundleError: names the file and the field that is wrong.
        """
        root = Path(path)
        if not root.is_dir() or not os.path.lexists(root / MANIFEST_PATH):
            raise _not_a_bundle(root)
        manifest = Manifest.from_json(_read(root, MANIFEST_PATH), source=str(root / MANIFEST_PATH))
        targets = {}
        for name in manifest.targets:
            path_of = target_manifest_path(name)
            targets[name] = TargetManifest.from_json(_read(root, path_of), source=str(root / path_of))
        bundle = cls(root, manifest, targets)
        for name in bundle.files:
            bundle._check_file(name)
        bundle.index = bundle._read_index()
        for name, target in targets.items():
            program_path = f"{target_folder(name)}/{PROGRAM_FILE}"
            if target.state == "ready" and program_path in bundle.files:
                bundle.programs[name] = bundle._read_program(program_path)
            if plan_path(name) in bundle.files:
                bundle.buckets[name] = bundle._read_plan(name)
            if target.tensorrt is not None and target.state == "ready":
                bundle._check_engines(name, target.tensorrt)
                if target.tensorrt.form == "segments":
                    bundle.segments[name] = bundle._read_segments(name, target.tensorrt)
        return bundle

    @property
    def model(self) -> ModelInfo:
        return self.manifest.model.to_info()

    def target(self, name: str) -> TargetManifest:
        """The ready target ``name``; raises BundleError if it isn't there or must be built first."""
        target = self.targets.get(name)
        if target is None:
            there = ", ".join(sorted(self.targets)) or "none"
            raise BundleError(
                f"{self.path}: the bundle has no target {name!r}; it has {there}",
                hint=f"Take one of these, or export the model again with --target {name}.",
            )
        if target.state != "ready":
            raise BundleError(
                f"{self.path}: target {name!r} is not built; it needs {target.needs or 'its device'}",
                hint=f"Run `optimize build {self.path}` there.",
            )
        return target

    def program(self, name: str) -> LoweredProgram:
        """The lowered program of target ``name``; raises BundleError if the target is not ready or has none."""
        self.target(name)
        if name not in self.programs:
            raise BundleError(
                f"{self.path / target_folder(name) / PROGRAM_FILE} is not listed in {MANIFEST_PATH} there",
                hint="Export the bundle again.",
            )
        return self.programs[name]

    def bucket_program(self, target: str, bucket: Bucket) -> LoweredProgram:
        """The program of one of ``buckets[target]``; raises BundleError if it is damaged."""
        return self._read_program(f"{target_folder(target)}/{bucket.file}")

    def read_bytes(self, name: str) -> bytes:
        """The contents of a listed file; raises BundleError if it isn't listed."""
        if name not in self.files:
            raise BundleError(f"{self.path / name} is not listed in {MANIFEST_PATH}", hint="Export the bundle again.")
        return _read(self.path, name)

    def tokenizer_files(self) -> TokenizerFiles:
        """The contents of tokenizer/."""
        names = (TOKENIZER_PATH, CHAT_TEMPLATE_PATH, SPECIAL_TOKENS_PATH)
        wanted = [n for n in self.files if n in names or n.startswith(CHAT_TEMPLATES_FOLDER)]
        return TokenizerFiles.from_files({n: self.read_bytes(n) for n in wanted})

    def tensor(self, name: str) -> TensorEntry:
        """Where a weight lies; raises BundleError if there is none of that name."""
        if name not in self.index.tensors:
            raise BundleError(f"{self.path / INDEX_PATH}: no tensor {name!r}", hint="Export the bundle again.")
        return self.index.tensors[name]

    def weight(self, name: str, load: Load = "map") -> npt.NDArray[np.generic]:
        """A weight, read-only: of shape ``TensorEntry.stored_shape``; mapped (see ``check_unchanged``), or copied.

        Raises BundleError if its file was cut off since the bundle was opened, CapacityError without memory for it.
        """
        entry = self.tensor(name)
        if load == "map":
            data = self._map(entry.blob)[entry.offset : entry.offset + entry.bytes]
        else:
            data = self._copy(entry.blob, entry.offset, entry.bytes)
        return data.view(entry.stored_dtype).reshape(entry.stored_shape)

    def check_unchanged(self) -> None:
        """Raises BundleError if a file of weights that is mapped was written to or cut off since.

        Between two calls nothing is noticed: reading behind the end of a file that was cut off is a SIGBUS.
        """
        for blob, (descriptor, before) in self._mapped.items():
            if _state(descriptor) != before:
                raise BundleError(
                    f"{self.path / self.index.blobs[blob].file} was changed while it was in use",
                    hint="Open the bundle again. Replace a bundle by renaming another one into its place, or open it "
                    'with load="read".',
                )

    def verify_hashes(self, progress: Callable[[int], None] | None = None) -> None:
        """Hashes every listed file, and the manifests; raises BundleError naming the first that differs.

        Raises it too for files that no manifest lists, outside of report/.

        ``progress`` is called with the number of bytes hashed since the last call.
        """
        manifests = (MANIFEST_PATH, *map(target_manifest_path, self.targets))
        if unlisted := unlisted_files(self.path, {*self.files, *manifests}):
            hint = "Nothing reads what isn't listed: move it out of the bundle."
            raise BundleError(f"{self.path}: no manifest lists {shortened(unlisted)}", hint=hint)
        for name in manifests:
            check_own_hash(_read(self.path, name), str(self.path / name))
        for name, expected in self.files.items():
            digest = hashlib.sha256()
            with _open(self.path, name) as file:
                while chunk := file.read(_HASH_CHUNK):
                    digest.update(chunk)
                    if progress is not None:
                        progress(len(chunk))
            if digest.hexdigest() != expected.sha256:
                raise BundleError(
                    f"{self.path / name}: SHA-256 is not the one in {MANIFEST_PATH}; the file was altered",
                    hint="Copy the bundle again, or export it again.",
                )

    def _check_file(self, name: str) -> None:
        path, expected = self.path / name, self.files[name].bytes
        try:
            size = path.stat().st_size
        except OSError as e:
            raise BundleError(f"{path}: {e.strerror}", hint="Copy the bundle again, or export it again.") from e
        if not path.is_file() or not path.resolve().is_relative_to(self.path.resolve()):
            raise BundleError(f"{path} isn't a file of this bundle", hint="Copy the bundle again, or export it again.")
        if size != expected:
            raise BundleError(
                f"{path}: {size:,} bytes, files.{name}.bytes in {MANIFEST_PATH} is {expected:,}",
                hint="The file was cut off or altered: copy the bundle again, or export it again.",
            )

    def _read_index(self) -> WeightsIndex:
        if INDEX_PATH not in self.files:
            return WeightsIndex()
        index = WeightsIndex.from_json(self.read_bytes(INDEX_PATH), source=str(self.path / INDEX_PATH))
        for i, blob in enumerate(index.blobs):
            listed = self.files.get(blob.file)
            if listed is None or listed.bytes != blob.bytes:
                raise BundleError(
                    f"{self.path / INDEX_PATH}: blobs.{i}: {blob.file} with {blob.bytes} bytes is not what "
                    f"{MANIFEST_PATH} lists",
                    hint="Export the bundle again.",
                )
        return index

    def _read_program(self, name: str) -> LoweredProgram:
        program = LoweredProgram.from_json(self.read_bytes(name), source=str(self.path / name))
        for use in program.weights:
            entry = self.index.tensors.get(use.name)
            if entry is None:
                raise BundleError(
                    f"{self.path / name}: weight {use.name!r} is not in {INDEX_PATH}", hint="Export the bundle again."
                )
            for field in ("dtype", "shape", "layout"):
                wanted, found = getattr(use, field), getattr(entry, field)
                if wanted != found:
                    raise BundleError(
                        f"{self.path / name}: weight {use.name!r} needs {field} {wanted}, {INDEX_PATH} has {found}",
                        hint="Export the bundle again.",
                    )
        if (problem := self.manifest.model.disagreement(program)) is not None:
            raise BundleError(
                f"{self.path / MANIFEST_PATH}: {name} is of another model: {problem}",
                hint="One of the two was altered: copy the bundle again, or export it again.",
            )
        return program

    def _read_plan(self, target: str) -> BucketPlan:
        path = plan_path(target)
        context = self.manifest.model.context_length
        plan = BucketPlan.from_json(self.read_bytes(path), source=str(self.path / path), context_length=context)
        for bucket in plan.buckets:
            if (file := f"{target_folder(target)}/{bucket.file}") not in self.files:
                raise BundleError(
                    f"{self.path / path}: the program {file} of a bucket is not listed in {MANIFEST_PATH} there",
                    hint="Export the bundle again.",
                )
        return plan

    def _check_engines(self, target: str, section: TensorRtSection) -> None:
        source = self.path / target_manifest_path(target)
        if not section.engines:
            raise BundleError(f"{source}: tensorrt.engines: there is none", hint="Export the bundle again.")
        for i, engine in enumerate(section.engines):
            name = f"{target_folder(target)}/{engine.file}"
            if self.files.get(name) != FileSection(bytes=engine.bytes, sha256=engine.sha256):
                raise BundleError(
                    f"{source}: tensorrt.engines.{i}: {engine.file} is not listed in files with these bytes and sha256",
                    hint="Export the bundle again.",
                )
            if section.flavour != "rtx":
                continue  # TensorRT's own plans have another header, which isn't known here
            with _open(self.path, name) as file:
                header = PlanHeader.parse(file.read(HEADER_BYTES), str(self.path / name))
            check_plan(
                header,
                str(self.path / name),
                size=engine.bytes,
                version=section.version,
                compute_capabilities=section.compute_capabilities,
            )

    def _read_segments(self, target: str, section: TensorRtSection) -> SegmentSchedule:
        path = segments_path(target)
        source = str(self.path / path)
        schedule = SegmentSchedule.from_json(self.read_bytes(path), source=source)
        schedule.check_engines(section, source)
        schedule.check_files(target, self.files, source)
        schedule.check_weights(self.index, source)
        return schedule

    def _map(self, blob: int) -> npt.NDArray[np.uint8]:
        if blob not in self._blobs:
            if not self.index.blobs[blob].bytes:
                return np.empty(0, np.uint8)  # nothing can be mapped of it
            with self._open_blob(blob) as file:
                # Of the size that the manifest states, not of the moment's: it is what the tensors lie in.
                mapped = mmap.mmap(file.fileno(), self.index.blobs[blob].bytes, access=mmap.ACCESS_READ)
                descriptor = os.dup(file.fileno())
            weakref.finalize(self, os.close, descriptor).atexit = False  # the process's end closes it
            self._mapped[blob] = descriptor, _state(descriptor)
            self._blobs[blob] = np.frombuffer(mapped, np.uint8)
        return self._blobs[blob]

    def _copy(self, blob: int, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if (blob, offset, size) not in self._copies:
            path = self.path / self.index.blobs[blob].file
            try:
                memory = mmap.mmap(-1, max(size, 1))  # at a page's beginning: vector loads want 64 bytes
            except OSError as e:
                raise CapacityError(f"{path}: no memory for {size:,} bytes of it", hint='Use load="map".') from e
            with self._open_blob(blob) as file:
                file.seek(offset)
                if file.readinto(memoryview(memory)[:size]) != size:
                    raise BundleError(f"{path}: it was cut off", hint="Copy the bundle again, or export it again.")
            array = np.frombuffer(memory, np.uint8, size)
            array.flags.writeable = False
            self._copies[blob, offset, size] = array
        return self._copies[blob, offset, size]

    def _open_blob(self, blob: int) -> io.BufferedReader:
        listed = self.index.blobs[blob]
        file = _open(self.path, listed.file)
        if (size := os.fstat(file.fileno()).st_size) != listed.bytes:
            file.close()
            raise BundleError(
                f"{self.path / listed.file}: {size:,} bytes, and it had {listed.bytes:,} when the bundle was opened",
                hint="Open the bundle again. Replace a bundle by renaming another one into its place.",
            )
        return file


def _open(root: Path, name: str) -> io.BufferedReader:
    try:
        return open_regular(root / name, within=root)
    except OSError as e:
        raise BundleError(f"{root / name}: cannot be read: {e.strerror}", hint=_UNREADABLE) from e


def _read(root: Path, name: str) -> bytes:
    most = MOST_TEXT_BYTES if name.startswith(TOKENIZER_FOLDER) else MOST_JSON_BYTES
    try:
        return read_regular(root / name, most=most, within=root)
    except OSError as e:
        raise BundleError(f"{root / name}: cannot be read: {e.strerror}", hint=_UNREADABLE) from e


def _state(descriptor: int) -> tuple[int, int]:
    """Size and time of the last write."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def tuning_path(bundle: Bundle) -> Path:
    """Where what ``optimize tune`` found for a bundle is kept: beside its folder."""
    folder = bundle.path.absolute()
    return folder.with_name(f"{folder.name}.tune.json")


def _not_a_bundle(root: Path) -> BundleError:
    """What is there instead; a model must be exported first."""
    model = root.suffix == ".gguf" if root.is_file() else (root / "config.json").is_file()
    if model:
        name = root.resolve().name.removesuffix(".gguf")
        return BundleError(
            f"{root} is a model, not a bundle",
            hint=f"Export it first: optimize export {shlex.quote(str(root))} -o {shlex.quote(f'{name}.bundle')}",
        )
    hint = "Pass a folder that `optimize export` wrote."
    if root.is_dir():
        return BundleError(f"{root} is not a bundle: {root / MANIFEST_PATH} is missing", hint=hint)
    return BundleError(f"{root} is a file, not a bundle" if root.exists() else f"{root} doesn't exist", hint=hint)
