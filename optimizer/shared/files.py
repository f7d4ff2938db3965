"""Files: those that a user asked for are written beside their names, then renamed; a bundle's are hashed or added."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from enginewright.runtime.bundle.hashed_file import HashedFile, sync_folder, writing
from enginewright.runtime.bundle.manifest import REPORT_FOLDER, FileSection, TargetManifest, target_manifest_path
from enginewright.runtime.bundle.output_folder import bundle_around
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, EnginewrightError
from enginewright.runtime.shared.progress import Progress, ProgressEvent


def write_output(path: Path, text: str, error: type[EnginewrightError] = BundleError) -> None:
    """Writes ``text`` in UTF-8, in place of the file that is there. What isn't a regular file (a pipe) is written to.

    Raises ``error`` if it can't be written, or lies in a bundle, outside of report/: then nothing has changed.
    """
    try:
        place = Path(os.path.realpath(path))
        bundle = bundle_around(place)
        if bundle is not None and not place.relative_to(bundle).as_posix().startswith(REPORT_FOLDER):
            raise error(
                f"{path}: it would be a file of the bundle {bundle}", hint="Write it beside the bundle instead."
            )
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        unfinished = place.with_name(f".{place.name[:200]}.{uuid.uuid4().hex[:12]}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, place)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as e:  # ValueError: a zero in the name
        why = e.strerror if isinstance(e, OSError) else e
        hint = "Name a file in it." if isinstance(e, IsADirectoryError) else "Write to another folder."
        raise error(f"{os.fspath(path)!r} cannot be written: {why}", hint=hint) from e


def hash_files(bundle: Bundle, progress: Progress) -> int:
    """Hashes every file that a bundle lists, telling the bytes done; returns how many bytes these are.

    Raises BundleError naming a file that was altered.
    """
    total, done = sum(f.bytes for f in bundle.files.values()), 0

    def hashed(size: int) -> None:
        nonlocal done
        done += size
        progress(ProgressEvent("hash", done, total))

    bundle.verify_hashes(hashed)
    return total


def add_file(folder: Path, stem: str, suffix: str, data: bytes) -> tuple[str, FileSection]:
    """Writes a file of a target's folder under a name of its own, STEM-HASHsuffix, so that what is there stays what its
    manifest says. Gives the name."""
    unfinished = folder / f".{stem}.{os.getpid()}.partial"
    file = _written(unfinished, folder / f"{stem}{suffix}", data)
    name = f"{stem}-{file.sha256[:12]}{suffix}"
    with writing(folder / name, len(data)):
        os.replace(unfinished, folder / name)
    return name, file


def replace_manifest(root: Path, target: str, manifest: TargetManifest) -> None:
    """Of a target of the bundle ``root``, at once."""
    path = root / target_manifest_path(target)
    text = manifest.to_json()
    TargetManifest.from_json(text, source=str(path))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _written(unfinished, path, text.encode())
    with writing(path, len(text)):
        os.replace(unfinished, path)
        sync_folder(path.parent)


def _written(unfinished: Path, shown: Path, data: bytes) -> FileSection:
    """Nothing is left of it if that fails."""
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
