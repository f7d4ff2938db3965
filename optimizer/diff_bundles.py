"""``optimize diff``: compares two bundles byte by byte, and lists the files, fields and weights that differ.

Two exports of one input must be equal. Files in report/ (times, measurements) aren't part of a bundle, and aren't
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.runtime.bundle.manifest import REPORT_FOLDER
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, open_regular, read_regular
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.json_document import parse_json
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

MOST_DETAILS = 20
"""The most differences of a file that are listed one by one. The others are only counted."""

_CHUNK_BYTES = 4 << 20
_SHOWN = 60
"""The most characters of a value that are shown."""


@dataclass(frozen=True)
class FileDifference:
    """A file that differs between two bundles.

    Attributes:
        path: its path in the bundle.
        bytes_a, bytes_b: its sizes; None where it is missing.
        details: for JSON, each differing field with both values; for blobs, each differing weight; else the first
            differing byte.
    """

    path: str
    bytes_a: int | None
    bytes_b: int | None
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class BundleDiff:
    """The result of ``diff_bundles``.

    Attributes:
        a, b: the paths of the bundles.
        files: the number of files that are in at least one bundle.
        bytes: the bytes of A that were compared.
        differences: the files that differ.
    """

    a: str
    b: str
    files: int
    bytes: int
    differences: tuple[FileDifference, ...]

    @property
    def equal(self) -> bool:
        """Returns True if all files are equal, apart from those in report/."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json``."""
        return {"equal": self.equal} | asdict(self)


def diff_bundles(a: str | Path, b: str | Path, *, progress: Progress = silent) -> BundleDiff:
    """Compares all files of two bundles except those in report/, even files that their manifests don't list.

    Hashes aren't checked, so two bundles with the same damage are equal. ``verify`` finds damage.

    Args:
        a, b: bundles.
        progress: called with the stage "compare", in bytes.

    Raises:
        BundleError: one isn't a bundle, or a file can't be read.
    """
    bundles = (Bundle.open(a), Bundle.open(b))
    sizes = [_files(bundle.path) for bundle in bundles]
    paths = sorted(sizes[0].keys() | sizes[1].keys())
    both = [path for path in paths if path in sizes[0] and path in sizes[1]]
    total, done, unequal = sum(sizes[0][path] for path in both), 0, dict[str, int | None]()
    for path in both:
        if (at := _first_difference(*(bundle.path / path for bundle in bundles))) is not None:
            unequal[path] = at
        done += sizes[0][path]
        progress(ProgressEvent("compare", done, total, path))
    differences = tuple(
        FileDifference(
            path,
            sizes[0].get(path),
            sizes[1].get(path),
            _details(*bundles, path, unequal) if path in unequal else (),
        )
        for path in paths
        if path in unequal or path not in both
    )
    return BundleDiff(str(a), str(b), len(paths), total, differences)


def _files(folder: Path) -> dict[str, int]:
    """Returns path -> size of the files in a bundle, without those in report/."""
    sizes = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(REPORT_FOLDER):
            sizes[name] = path.stat().st_size
    return sizes


def _first_difference(a: Path, b: Path) -> int | None:
    """Returns the offset of the first byte that differs; None for equal files.

    If one file is the beginning of the other, it is the length of the shorter one.
    """
    at = 0
    try:
        with open_regular(a) as one, open_regular(b) as other:
            while True:
                x, y = one.read(_CHUNK_BYTES), other.read(_CHUNK_BYTES)
                if x != y:
                    shorter = min(len(x), len(y))
                    unlike = np.flatnonzero(np.frombuffer(x, np.uint8, shorter) != np.frombuffer(y, np.uint8, shorter))
                    return at + (int(unlike[0]) if len(unlike) else shorter)
                if not x:
                    return None
                at += len(x)
    except OSError as e:
        raise BundleError(f"{e.filename}: cannot be read: {e.strerror}", hint="Check the file's permissions.") from e


def _details(a: Bundle, b: Bundle, path: str, unequal: Mapping[str, int | None]) -> tuple[str, ...]:
    """Returns the differences of the file ``path``, at most MOST_DETAILS.

    ``unequal``: path of a differing file -> offset of its first differing byte.
    """
    if path in {blob.file for blob in a.index.blobs}:
        details = list(_weights(a, b, path))
    elif path.endswith(".json"):
        details = [f for f in _fields(_document(a.path / path), _document(b.path / path), "") if f[:7] != "sha256:"]
    else:
        details = []
    if len(details) > MOST_DETAILS:
        return (*details[:MOST_DETAILS], f"and {len(details) - MOST_DETAILS:,} more")
    return tuple(details) or (f"from byte {unequal[path]:,} on",)


def _document(path: Path) -> Any:
    """Returns a JSON file's value, or a description of its error."""
    try:
        return parse_json(read_regular(path, most=MOST_TEXT_BYTES))
    except ValueError as e:
        return f"not JSON: {e}"


def _fields(a: Any, b: Any, field: str) -> Iterator[str]:
    """Yields a line for every field whose values differ, or that one side lacks."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            name = f"{field}.{key}" if field else key
            if key not in a or key not in b:
                yield f"{name}: only in {'A' if key in a else 'B'}"
            else:
                yield from _fields(a[key], b[key], name)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _fields(x, y, f"{field}.{i}")
    elif a != b or type(a) is not type(b):
        yield f"{field or 'all'}: A {_shown(a)}, B {_shown(b)}"


def _weights(a: Bundle, b: Bundle, path: str) -> Iterator[str]:
    """Yields the weights in a blob of A that B stores in the same form with other bytes. ``path``: the blob's file."""
    for name, entry in a.index.tensors.items():
        other = b.index.tensors.get(name)
        if other is None or a.index.blobs[entry.blob].file != path:
            continue
        if (entry.dtype, entry.shape, entry.layout) == (other.dtype, other.shape, other.layout):
            x, y = (bundle.weight(name).reshape(-1).view(np.uint8) for bundle in (a, b))
            chunks = range(0, len(x), _CHUNK_BYTES)
            count = sum(int(np.count_nonzero(x[i : i + _CHUNK_BYTES] != y[i : i + _CHUNK_BYTES])) for i in chunks)
            if count:
                yield f"{name}: {count:,} of {entry.bytes:,} bytes"


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= _SHOWN:
        return text
    if isinstance(value, (dict, list)):
        return f"{len(value):,} {'fields' if isinstance(value, dict) else 'items'}"
    return f"{text[:_SHOWN]}..."
