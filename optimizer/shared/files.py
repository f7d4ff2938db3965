"""Writes output files under temporary names next to the final ones, and renames them; hashes files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from enginewright.runtime.bundle.manifest import REPORT_FOLDER, FileSection
from enginewright.runtime.bundle.output_folder import bundle_around
from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.shared.errors import BundleError, EnginewrightError
from enginewright.runtime.shared.replaced_file import replacing


def write_output(path: Path, text: str, error: type[EnginewrightError] = BundleError) -> None:
    """Writes ``text`` in UTF-8, replacing a file under a temporary name. A path that isn't a regular file, such as a
    pipe, is written to directly.

    Raises ``error`` if the path can't be written, or is in a bundle outside of report/; nothing has changed then.
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
        with replacing(place) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as e:  # ValueError: a zero in the name
        why = e.strerror if isinstance(e, OSError) else e
        hint = "Name a file in it." if isinstance(e, IsADirectoryError) else "Write to another folder."
        raise error(f"{os.fspath(path)!r} cannot be written: {why}", hint=hint) from e


def hash_file(path: Path) -> FileSection:
    """Returns a file's size and hash. Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileSection(bytes=file.tell(), sha256=digest.hexdigest())
