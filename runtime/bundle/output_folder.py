"""Rules for output folders: where a folder may be written, and which existing files it may replace."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..shared.errors import BundleError, EnginewrightError
from . import MANIFEST_PATH
from .manifest import (
    REPORT_FOLDER,
    FileSection,
    Manifest,
    TargetManifest,
    check_own_hash,
    target_folder,
    target_manifest_path,
)
from .regular_file import MOST_JSON_BYTES, open_regular, read_regular
from .tokenizer_files import TOKENIZER_FOLDER

_REPORTS = frozenset(f"{REPORT_FOLDER}{name}" for name in ("report.json", "diffs.json", "report.html", "recipe.toml"))
"""The files in the folder of reports that an export writes. No manifest lists them."""

_PLACES = re.compile(rf"(?:weights/|{TOKENIZER_FOLDER}).+|model(?:\.[a-z0-9]+)?\.onnx")
"""The paths outside of targets' folders at which an export writes files.

Files elsewhere must have their listed hash.
"""

_LEFT_BY_BUILD = re.compile(r"targets/[^/]+/\.[^/]+\.\d+\.partial")
"""The folders that a killed ``optimize build`` leaves."""

Inputs = Mapping[str, str | os.PathLike[str] | None]
"""The inputs of an output: the option's name -> its file or folder."""


def output_place(output: str | os.PathLike[str], inputs: Inputs, error: type[EnginewrightError] = BundleError) -> Path:
    """Returns the absolute path of a folder to write, with the links of its parents resolved.

    Raises ``error`` if the path is the root, the current folder or a parent of it, a link, or isn't UTF-8. Raises it
    also if an input is inside the output, or the output inside an input folder.

    Args:
        output: the path that the user gave.
        inputs: option -> path of each input, None if it isn't used.
        error: the type of the error.
    """
    text = os.fspath(output)
    try:
        place = _resolved(text)
        here = Path(os.path.realpath(os.curdir))
        with suppress(FileNotFoundError):
            os.lstat(place)
    except ValueError as e:  # of str.encode, or for a zero in the name
        raise error(f"output: {text!r} isn't a file name in UTF-8", hint="Choose another name.") from e
    except OSError as e:
        raise error(f"output: {text!r} cannot be written: {e.strerror}", hint="Choose another path.") from e
    if place == place.parent:
        raise error(f"output: {place} is the root folder", hint="Name a new folder, such as ./model.bundle.")
    if place.is_symlink():
        raise error(
            f"output: {place} is a link to {os.readlink(place)}",
            hint="Pass the folder that it leads to, or remove the link.",
        )
    if place == here or place in here.parents:
        what = "is the current folder" if place == here else "has the current folder in it"
        raise error(f"output: {place} {what}", hint="Name a new folder, such as ./model.bundle.")
    for name, path in inputs.items():
        if path is None or not os.path.lexists(path):
            continue
        source = Path(os.path.realpath(path))
        if source == place or place in source.parents:
            raise error(
                f"output: {name} {os.fspath(path)} lies in {place}, which would be replaced",
                hint="Choose another output, or move what it is made from out of it.",
            )
        if source in place.parents and source.is_dir():
            raise error(
                f"output: {place} lies in {name} {os.fspath(path)}",
                hint=f"Write it beside that folder, such as to {source.parent / place.name}.",
            )
    return place


def why_not_a_bundle(folder: Path) -> str | None:
    """Returns the reason why a new bundle must not replace a folder, as a phrase that follows its name; None if it may.

    It may replace a bundle of any version if nobody has edited the manifests, and every file is listed in a manifest or
    is a report of an export. Listed files may be missing or damaged. But a file at a path that no export writes must
    have the listed hash, because it could belong to the user.
    """
    if folder.is_symlink() or not folder.is_dir():
        return "exists and isn't a bundle: it isn't a folder"
    try:
        text = read_regular(folder / MANIFEST_PATH, most=MOST_JSON_BYTES, within=folder)
        manifest = Manifest.from_json(text)
        check_own_hash(text, MANIFEST_PATH)
    except OSError as e:
        return f"exists and isn't a bundle: {MANIFEST_PATH}: {e.strerror}"
    except BundleError as e:
        return f"exists and isn't a bundle that can be read: {e.message}"
    listed = {path for path, file in manifest.files.items() if _PLACES.fullmatch(path) or _is(folder / path, file)}
    for name in manifest.targets:
        path = target_manifest_path(name)
        try:
            text = read_regular(folder / path, most=MOST_JSON_BYTES, within=folder)
            target = TargetManifest.from_json(text, source=path)
            check_own_hash(text, path)
        except (OSError, BundleError):
            target = TargetManifest()  # then its files are nobody's
        listed |= {path, *(f"{target_folder(name)}/{file}" for file in target.files)}
    there = unlisted_files(folder, listed)
    if foreign := [*there, *(p for p in files_in(folder) if p.startswith(REPORT_FOLDER) and p not in _REPORTS)]:
        return f"is a bundle with files in it that no manifest lists: {shortened(foreign)}"
    shut = [f for f, _, _ in os.walk(folder) if not os.access(f, os.W_OK | os.X_OK)]
    return f"can't be replaced: {shut[0]} may not be written to" if shut else None


def _is(path: Path, listed: FileSection) -> bool:
    """Returns True if the file at ``path`` has the hash of its entry ``listed``."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == listed.sha256
    except OSError:
        return False


def bundle_around(path: Path) -> Path | None:
    """Returns the bundle that contains ``path``, a path without links; None if no bundle does."""
    for folder in path.parents:
        try:
            Manifest.from_json(read_regular(folder / MANIFEST_PATH, most=MOST_JSON_BYTES))
        except (OSError, BundleError):
            continue
        return folder
    return None


def unlisted_files(folder: Path, listed: Collection[str]) -> list[str]:
    """Returns the files in a bundle's folder that aren't in ``listed``, sorted.

    The manifest, files in report/, files left by a killed ``optimize build``, and empty folders are ignored.
    """
    return sorted(
        path
        for path in files_in(folder)
        if path != MANIFEST_PATH
        and path not in listed
        and not path.startswith(REPORT_FOLDER)
        and not _LEFT_BY_BUILD.fullmatch(path)
    )


def shortened(paths: Collection[str], most: int = 3) -> str:
    """Returns the first ``most`` paths for a message, and the number of the others."""
    shown = ", ".join(sorted(paths)[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most:,} more"


def files_in(folder: Path) -> Iterator[str]:
    """Yields the relative paths of all files in a folder; a link to a folder counts as a file."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*files, *links):
            yield Path(parent, name).relative_to(folder).as_posix()


def _resolved(text: str) -> Path:
    """Returns the absolute path for ``text``, with the links of its parents resolved.

    A last part of ".." is resolved too.
    """
    text.encode()
    path = Path(text)
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name
