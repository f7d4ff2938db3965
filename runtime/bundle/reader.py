"""Opens a bundle: checks its structure and maps its weights. It runs no code of the bundle and never unpickles."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import re
import shlex
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..shared.contracts import ModelInfo
from ..shared.errors import BundleError, CapacityError, RequestError, TrustError, shown
from ..shared.hidden_taps import with_taps
from ..shared.lowered_program import LoweredProgram, WeightUse
from ..shared.memory import ask_for_huge_pages
from ..shared.panel_layouts import PANEL
from ..shared.records import R
from ..shared.targets import part, sections_of
from . import MANIFEST_PATH
from .buckets import BucketPlan, plan_path
from .hashed_file import HashedBeside
from .hub_id import is_model, near_names, parse_hub_id, shown_path
from .manifest import (
    FileSection,
    Manifest,
    TargetManifest,
    bundle_hash,
    check_own_hash,
    target_folder,
    target_manifest_path,
)
from .output_folder import shortened, unlisted_files
from .regular_file import MOST_JSON_BYTES, MOST_TEXT_BYTES, open_regular, read_regular
from .tokenizer_files import (
    CHAT_TEMPLATE_PATH,
    CHAT_TEMPLATES_FOLDER,
    RESPONSE_TEMPLATE_PATH,
    SPECIAL_TOKENS_PATH,
    TOKENIZER_FOLDER,
    TOKENIZER_PATH,
    TokenizerFiles,
)
from .tokenizer_tables import TABLES_PATH
from .weights import INDEX_PATH, TensorEntry, WeightsIndex, expand, stored_bytes

DECODE = "decode"
"""The entry that answers requests; every target that runs programs has it."""

_OLDER_PROGRAM = "program.json"  # the decode entry of bundles whose programs are older than version 7
"""The file name of the program of the entry ``decode`` in bundles whose programs are older than version 7."""

Load = Literal["map", "read"]
"""The way in which weights get into memory: mapped from their files ("map"), or copied ("read")."""

CODE = "code"
"""The value of ``trust`` that allows the code of any bundle to run."""

_HASH_CHUNK = 1 << 22
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_UNREADABLE = "Check its permissions; if it is damaged, copy or export the bundle again."


def program_path(target: str, entry: str = DECODE) -> str:
    """Returns the path in a bundle of the program of ``entry``."""
    return f"{target_folder(target)}/programs/{entry}.json"


class Bundle:
    """An open bundle, which ``Bundle.open`` has checked.

    Attributes:
        path: its folder.
        hash: "sha256:..." of its manifests, as ``manifest.bundle_hash`` computes it.
        trust: the code that the caller allows to run: "code", the bundle's hash, or None for no code.
        manifest: manifest.json.
        targets: target -> its manifest.
        files: path -> size and hash of every file that a manifest lists.
        index: weights/index.json.
        entries: target -> entry -> its lowered program, for ready targets that have programs.
        buckets: target -> the fixed sizes of its steps, for targets that have some.
        opened: target -> the result of the target's ``check_opened``, for ready targets that define it.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        targets: dict[str, TargetManifest],
        manifests_hash: str = "",
        trust: str | None = None,
    ) -> None:
        self.path = path
        self.hash, self.trust = manifests_hash, trust
        self.manifest = manifest
        self.targets = targets
        self.files: dict[str, FileSection] = dict(manifest.files)
        for name, target in targets.items():
            self.files |= {f"{target_folder(name)}/{file}": section for file, section in target.files.items()}
        self.index = WeightsIndex()
        self.entries: dict[str, dict[str, LoweredProgram]] = {}
        self.buckets: dict[str, BucketPlan] = {}
        self.opened: dict[str, object] = {}
        self._beside: HashedBeside | None = None
        self._blobs: dict[int, npt.NDArray[np.uint8]] = {}
        self._mapped: dict[int, tuple[int, tuple[int, int]]] = {}  # blob -> a descriptor of its file, and its state
        self._copies: dict[tuple[int, int, int], npt.NDArray[np.uint8]] = {}  # blob, offset, size -> in memory

    @classmethod
    def open(cls, path: str | os.PathLike[str], trust: str | None = None) -> Bundle:
        """Opens the bundle in folder ``path``. None of its code runs.

        It checks the manifests and their versions; that every listed file exists with its size, inside the folder; that
        every tensor is within its blob; that the programs are valid, and every weight has the layout that they need.
        Then it calls the ``check_opened`` of each ready target that defines it. Hashes of files are compared later: by
        ``verify_hashes``, and for files with code if ``trust`` is a hash.

        Args:
            path: the bundle's folder.
            trust: the code of the bundle that may run later. None: none of it. "code": all of it. "sha256:...": all of
                it, if the bundle has that hash.

        Raises:
            BundleError: the bundle is invalid. The message names file and field.
            TrustError: the bundle's hash isn't the one in ``trust``.
            RequestError: ``trust`` has another form.
            TargetError: an installed package that declares one of the targets can't be loaded.
        """
        root = Path(path)
        if not os.path.isdir(root) or not os.path.lexists(root / MANIFEST_PATH):
            raise _not_a_bundle(root)
        texts = {MANIFEST_PATH: _read(root, MANIFEST_PATH)}
        manifest = Manifest.from_json(texts[MANIFEST_PATH], source=str(root / MANIFEST_PATH))
        targets = {}
        for name in manifest.targets:
            path_of = target_manifest_path(name)
            texts[path_of] = _read(root, path_of)
            source = str(root / path_of)
            targets[name] = TargetManifest.from_json(texts[path_of], source=source, sections=sections_of(name))
        identity = bundle_hash(texts)
        bundle = cls(root, manifest, targets, identity, _check_trust(trust, identity, root))
        for name in bundle.files:
            bundle._check_file(name)
        bundle.index = bundle._read_index()
        for name, target in targets.items():
            if target.state == "ready" and (paths := bundle._program_paths(name)):
                bundle.entries[name] = {entry: bundle._read_program(path_of) for entry, path_of in paths.items()}
            if plan_path(name) in bundle.files:
                bundle.buckets[name] = bundle._read_plan(name)
            check = getattr(part(name, "section"), "check_opened", None)
            if target.state == "ready" and check is not None:
                bundle.opened[name] = check(bundle, name)
        return bundle

    @property
    def model(self) -> ModelInfo:
        return self.manifest.model.to_info()

    def check_generates(self, command: str) -> None:
        """Raises RequestError if the model computes whole texts, which ``command`` isn't for."""
        if (pooling := self.model.pooling) is not None:
            raise RequestError(
                f"{command}: {self.path} is a model for {pooling.task}, and only models that generate text have times "
                "of prompts and tokens",
                hint="`optimize loadtest --embed` measures a server with an embedding model.",
            )

    def section(self, target: str, kind: type[R], contents: str) -> R:
        """Returns the section of type ``kind`` of a ready target.

        ``contents``: the things that the section describes, for the message. Raises BundleError if there is no such
        target or section, or if the target isn't ready.
        """
        section = self.target(target).section(kind)
        if section is None:
            raise BundleError(f"{self.path}: target {target!r} has no {contents}", hint="Export the bundle again.")
        return section

    def target(self, name: str) -> TargetManifest:
        """Returns the manifest of target ``name``. Raises BundleError if there is none, or if it isn't ready."""
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

    @property
    def programs(self) -> dict[str, LoweredProgram]:
        """Target -> the program of its entry ``decode``, for ready targets that have one."""
        return {name: entries[DECODE] for name, entries in self.entries.items() if DECODE in entries}

    def program(self, name: str, entry: str = DECODE) -> LoweredProgram:
        """Returns the lowered program of an entry. Raises BundleError if target ``name`` isn't ready or has no such
        entry.
        """
        self.target(name)
        program = self.entries.get(name, {}).get(entry)
        if program is None:
            there, path = ", ".join(self.entries.get(name, ())) or "none", self.path / program_path(name, entry)
            raise BundleError(
                f"{path} is not listed in {MANIFEST_PATH} there: the entries are {there}",
                hint="Export the bundle again.",
            )
        return program

    def program_file(self, name: str) -> str:
        """Returns the path, in the bundle, of the program of the entry ``decode`` of target ``name``."""
        return self._program_paths(name).get(DECODE, program_path(name, DECODE))

    def _program_paths(self, name: str) -> dict[str, str]:
        """Returns entry -> the path of its program, for the target ``name``."""
        folder, older = f"{target_folder(name)}/programs/", f"{target_folder(name)}/{_OLDER_PROGRAM}"
        listed = [path for path in self.files if path.startswith(folder) and path.endswith(".json")]
        paths = {path.removeprefix(folder).removesuffix(".json"): path for path in listed}
        return {DECODE: older} | paths if older in self.files else paths

    def read_bytes(self, name: str, *, unaltered: bool = False) -> bytes:
        """Returns the contents of the file ``name``, which a manifest of the bundle must list.

        Raises BundleError if none does. With ``unaltered``, or if the caller trusts the bundle by its hash, raises it
        also if the file's hash differs from the listed one.
        """
        if name not in self.files:
            raise BundleError(f"{self.path / name} is not listed in {MANIFEST_PATH}", hint="Export the bundle again.")
        content = _read(self.path, name)
        checked = unaltered or self.trust not in (None, CODE)
        if checked and hashlib.sha256(content).hexdigest() != self.files[name].sha256:
            raise self._altered(name)
        return content

    def read_head(self, name: str, size: int) -> bytes:
        """Returns the first ``size`` bytes of a listed file, or all of a shorter one."""
        with _open(self.path, name) as file:
            return file.read(size)

    def tokenizer_files(self, *, whole: bool = True) -> TokenizerFiles:
        """Returns the contents of tokenizer/; without tokenizer.json if not ``whole``."""
        names = (TABLES_PATH, CHAT_TEMPLATE_PATH, RESPONSE_TEMPLATE_PATH, SPECIAL_TOKENS_PATH)
        paths = [n for n in self.files if n in names or n.startswith(CHAT_TEMPLATES_FOLDER)]
        if whole and TOKENIZER_PATH in self.files:
            paths.append(TOKENIZER_PATH)
        return TokenizerFiles.from_files({n: self.read_bytes(n) for n in paths})

    def tensor(self, name: str) -> TensorEntry:
        """Returns the index entry of a weight. Raises BundleError if there is no such weight."""
        if name not in self.index.tensors:
            raise BundleError(f"{self.path / INDEX_PATH}: no tensor {name!r}", hint="Export the bundle again.")
        return self.index.tensors[name]

    def weight(self, name: str, load: Load = "map") -> npt.NDArray[np.generic]:
        """Returns a weight as a read-only array of shape ``TensorEntry.stored_shape``.

        A weight with ``stored_as`` is expanded to its type and layout. With ``load="map"`` other weights are mapped:
        call ``check_unchanged`` before each use.

        Raises BundleError if the file was truncated since the bundle was opened, CapacityError if there is no memory.
        """
        entry = self.tensor(name)
        if load == "map":
            data = self._map(entry.blob)[entry.offset : entry.offset + entry.bytes]
        else:
            data = self._copy(entry.blob, entry.offset, entry.bytes)
        if entry.stored_as is not None:
            data = self._expanded(data, entry)
        return data.view(entry.stored_dtype).reshape(entry.stored_shape)

    def part(self, use: WeightUse, load: Load = "map") -> npt.NDArray[np.generic]:
        """Returns the part of a weight that a program uses, as bytes: some rows or some experts if the program is a
        rank's.

        Raises as ``weight`` does.
        """
        if not use.source:
            return self.weight(use.name, load)
        entry = self.tensor(use.source)
        # Rows, or experts; else panels of rows. Blocks aren't in panels until they are expanded.
        alone = len(entry.shape) > 2 or entry.layout in ("rows", "nibbles") or entry.stored_as is not None
        unit = 1 if alone else PANEL
        pieces = -(-entry.shape[0] // unit)
        first, count = use.first // unit, -(-use.shape[0] // unit)
        size = entry.bytes // pieces
        if load == "map":
            data = self._map(entry.blob)[entry.offset + first * size : entry.offset + (first + count) * size]
        else:
            data = self._copy(entry.blob, entry.offset + first * size, count * size)
        if entry.stored_as is not None:
            data = self._expanded(data, entry.model_copy(update={"shape": use.shape}))
        return data

    def _expanded(self, data: npt.NDArray[np.uint8], entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a tensor with ``stored_as``, expanded to its type and layout; read-only."""
        size = stored_bytes(entry.shape, entry.layout, entry.dtype)
        memory = np.frombuffer(self._memory(entry.blob, size), np.uint8, size)
        expand(data, entry, memory)
        memory.flags.writeable = False
        return memory

    def check_unchanged(self) -> None:
        """Raises BundleError if a mapped file of weights was changed or truncated, or if ``hash_weights_beside`` found
        an altered one.

        It must be called before each use: reading past the end of a truncated file ends the process (SIGBUS).
        """
        if self._beside is not None and self._beside.altered is not None:
            raise self._altered(self._beside.altered)
        for blob, (descriptor, before) in self._mapped.items():
            if _state(descriptor) != before:
                raise BundleError(
                    f"{self.path / self.index.blobs[blob].file} was changed while it was in use",
                    hint="Open the bundle again. Replace a bundle by renaming another one into its place, or open it "
                    'with load="read".',
                )

    def hash_weights_beside(self) -> None:
        """Starts a thread of the lowest priority that hashes the weights; ``check_unchanged`` reports what it finds.

        The thread stops when the bundle is freed.
        """
        hashes = {blob.file: self.files[blob.file].sha256 for blob in self.index.blobs}
        self._beside = HashedBeside(self.path, hashes)
        weakref.finalize(self, self._beside.stop)

    def weights_hashed(self, seconds: float | None) -> bool:
        """Waits until ``hash_weights_beside`` has hashed all weights, or for ``seconds`` (None: without limit).

        Returns True if all are hashed. Raises BundleError as ``check_unchanged`` does.
        """
        done = self._beside is not None and self._beside.wait(seconds)
        self.check_unchanged()
        return done

    def verify_hashes(self, progress: Callable[[int], None] | None = None) -> None:
        """Hashes every listed file and the manifests. Raises BundleError naming the first that differs.

        Raises BundleError also if there is a file outside of report/ that no manifest lists. ``progress`` is called
        with the number of bytes hashed since its last call.
        """
        manifests = (MANIFEST_PATH, *map(target_manifest_path, self.targets))
        if unlisted := unlisted_files(self.path, {*self.files, *manifests}):
            hint = "Nothing reads what isn't listed: move it out of the bundle."
            raise BundleError(f"{self.path}: no manifest lists {shortened(unlisted)}", hint=hint)
        for name in manifests:
            check_own_hash(_read(self.path, name), str(self.path / name))
        for name in self.files:
            self._verify_file(name, progress)

    def verify_target(self, target: str) -> None:
        """Hashes the files of a target's folder; raises BundleError naming the first that differs."""
        for name in self.files:
            if name.startswith(f"{target_folder(target)}/"):
                self._verify_file(name)

    def _verify_file(self, name: str, progress: Callable[[int], None] | None = None) -> None:
        digest = hashlib.sha256()
        with _open(self.path, name) as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
                if progress is not None:
                    progress(len(chunk))
        if digest.hexdigest() != self.files[name].sha256:
            raise self._altered(name)

    def _altered(self, name: str) -> BundleError:
        return BundleError(
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
        program = with_taps(LoweredProgram.from_json(self.read_bytes(name), source=str(self.path / name)))
        for use in program.weights:
            entry = self.index.tensors.get(use.name)
            if entry is None:
                raise BundleError(
                    f"{self.path / name}: weight {use.name!r} is not in {INDEX_PATH}", hint="Export the bundle again."
                )
            for field in ("dtype", "shape", "layout"):
                needed, stored = getattr(use, field), getattr(entry, field)
                if needed != stored:
                    raise BundleError(
                        f"{self.path / name}: weight {use.name!r} needs {field} {needed}, {INDEX_PATH} has {stored}",
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
        return BucketPlan.from_json(self.read_bytes(path), source=str(self.path / path), context_length=context)

    def _map(self, blob: int) -> npt.NDArray[np.uint8]:
        if blob not in self._blobs:
            if not self.index.blobs[blob].bytes:
                return np.empty(0, np.uint8)  # nothing can be mapped of it
            with self._open_blob(blob) as file:
                # Of the size that the manifest states, not of the moment's: it is what the tensors lie in.
                mapped = mmap.mmap(file.fileno(), self.index.blobs[blob].bytes, access=mmap.ACCESS_READ)
                ask_for_huge_pages(mapped)
                descriptor = os.dup(file.fileno())
            weakref.finalize(self, os.close, descriptor).atexit = False  # the process's end closes it
            self._mapped[blob] = descriptor, _state(descriptor)
            self._blobs[blob] = np.frombuffer(mapped, np.uint8)
        return self._blobs[blob]

    def _copy(self, blob: int, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if (blob, offset, size) not in self._copies:
            path = self.path / self.index.blobs[blob].file
            memory = self._memory(blob, size)
            with self._open_blob(blob) as file:
                file.seek(offset)
                if file.readinto(memoryview(memory)[:size]) != size:
                    raise BundleError(f"{path}: it was cut off", hint="Copy the bundle again, or export it again.")
            array = np.frombuffer(memory, np.uint8, size)
            array.flags.writeable = False
            self._copies[blob, offset, size] = array
        return self._copies[blob, offset, size]

    def _memory(self, blob: int, size: int) -> mmap.mmap:
        """Allocates memory that begins at a page, so that it is aligned for vector loads. Raises CapacityError."""
        try:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            path = self.path / self.index.blobs[blob].file
            raise CapacityError(f"{path}: no memory for {size:,} bytes of it", hint='Use load="map".') from e
        ask_for_huge_pages(memory)
        return memory

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


def _check_trust(trust: object, found: str, bundle: Path) -> str | None:
    """Returns the value of ``trust`` for a bundle whose hash is ``found``.

    Raises RequestError for an invalid value, TrustError for the hash of another bundle.
    """
    if trust is None or trust == CODE:
        return CODE if trust is not None else None
    if not isinstance(trust, str) or not _HASH.fullmatch(trust):
        raise RequestError(
            f"trust: {shown(trust)} doesn't say what may run",
            hint='It is "code", or the hash that `optimize inspect` shows: "sha256:" and 64 digits, a to f in small '
            "letters.",
        )
    if trust != found:
        raise TrustError(
            f"{bundle}: it is another bundle than {trust}: its hash is {found}",
            hint="It was altered or exported anew since. Look where it comes from before you give the new hash.",
        )
    return trust


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
    """Returns the size and the modification time of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def tuning_path(bundle: Bundle) -> Path:
    """Returns the path of the results of ``optimize tune`` for a bundle, next to its folder."""
    folder = bundle.path.absolute()
    return folder.with_name(f"{folder.name}.tune.json")


def _not_a_bundle(root: Path) -> BundleError:
    """Returns the error for a path that isn't a bundle; its message says what the path is instead."""
    there = os.path.exists(root)
    local = there and is_model(root)
    if local or (not os.path.isdir(root.parent) and parse_hub_id(str(root)) is not None):
        name = (root.resolve() if local else root).name.removesuffix(".gguf")
        return BundleError(
            f"{root} is a model, not a bundle" if local else f"{root} doesn't exist; a model of the Hub isn't a bundle",
            hint=f"Export it first: optimize export {shlex.quote(str(root))} -o {shlex.quote(f'{name}.bundle')}",
        )
    hint = f"Pass a folder that `optimize export` wrote.{near_names(root)}"
    if os.path.isdir(root):
        return BundleError(f"{root} is not a bundle: {root / MANIFEST_PATH} is missing", hint=hint)
    return BundleError(
        f"{root} is a file, not a bundle" if there else f"{shown_path(str(root))} doesn't exist", hint=hint
    )
