"""Changes a finished bundle: verifies its hashes, adds files to a target, and replaces a target's manifest."""

from __future__ import annotations

import os
from pathlib import Path

from enginewright.runtime.bundle.hashed_file import HashedFile, sync_folder, writing
from enginewright.runtime.bundle.manifest import FileSection, TargetManifest, target_manifest_path
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import Progress, ProgressEvent


def hash_files(bundle: Bundle, progress: Progress) -> int:
    """Verifies the hash of every file that a bundle lists. Returns the number of bytes that were read.

    ``progress`` gets the bytes done. Raises BundleError naming a file that was altered.
    """
    total, done = sum(f.bytes for f in bundle.files.values()), 0

    def hashed(size: int) -> None:
        nonlocal done
        done += size
        progress(ProgressEvent("hash", done, total))

    bundle.verify_hashes(hashed)
    return total


def add_file(folder: Path, stem: str, suffix: str, data: bytes) -> tuple[str, FileSection]:
    """Writes ``data`` to a new file in a target's folder. Returns the file's name and its section of the manifest.

    The name is STEM-HASHsuffix, so that files of the earlier manifest aren't overwritten.
    """
    unfinished = folder / f".{stem}.{os.getpid()}.partial"
    file = _written(unfinished, folder / f"{stem}{suffix}", data)
    name = f"{stem}-{file.sha256[:12]}{suffix}"
    with writing(folder / name, len(data)):
        os.replace(unfinished, folder / name)
    return name, file


def replace_manifest(root: Path, target: str, manifest: TargetManifest) -> None:
    """Replaces the manifest of a target in the bundle ``root``, in one atomic step."""
    path = root / target_manifest_path(target)
    text = manifest.to_json()
    TargetManifest.from_json(text, source=str(path))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _written(unfinished, path, text.encode())
    with writing(path, len(text)):
        os.replace(unfinished, path)
        sync_folder(path.parent)


def _written(unfinished: Path, shown: Path, data: bytes) -> FileSection:
    """Writes and hashes the file ``unfinished``, and removes it if that fails. ``shown`` is its path in errors."""
    unfinished.unlink(missing_ok=True)
    file = HashedFile(unfinished, shown)
    try:
        try:
            file.write(data, needed=len(data))
            file.sync()
        finally:
            file.close()
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return FileSection(bytes=len(data), sha256=file.digest())
