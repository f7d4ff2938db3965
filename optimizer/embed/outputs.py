"""The files that vectors are written to: an array of numpy, lines of JSON, or a table in Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginewright.runtime.bundle.output_folder import bundle_around
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import CapacityError, MissingDependencyError, RequestError
from enginewright.runtime.shared.replaced_file import replacing

_ROWS = 4096
"""The number of rows that are written at a time."""


def _write_npy(path: Path, texts: Iterable[str], vectors: FloatArray) -> None:
    with path.open("wb") as file:
        np.save(file, vectors)


def _write_jsonl(path: Path, texts: Iterable[str], vectors: FloatArray) -> None:
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for text, vector in zip(texts, vectors, strict=True):
            file.write(encode({"text": text, "embedding": vector.tolist()}) + b"\n")


def _write_parquet(path: Path, texts: Iterable[str], vectors: FloatArray) -> None:
    pyarrow, parquet = _parquet()
    kind = pyarrow.list_(pyarrow.float32(), vectors.shape[1])
    schema = pyarrow.schema([("text", pyarrow.string()), ("embedding", kind)])
    with parquet.ParquetWriter(path, schema) as writer:
        for begin, part in _parts(texts):
            rows = np.ascontiguousarray(vectors[begin : begin + len(part)])
            embeddings = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), type=kind)
            writer.write_table(pyarrow.Table.from_arrays([pyarrow.array(part), embeddings], schema=schema))


def _parts(texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Divides texts into parts. Yields the index of the first text of each part, and its texts."""
    left, begin = iter(texts), 0
    while part := list(islice(left, _ROWS)):
        yield begin, part
        begin += len(part)


def _parquet() -> tuple[Any, Any]:
    """Returns the modules pyarrow and pyarrow.parquet. Raises MissingDependencyError."""
    with MissingDependencyError.of(("pyarrow",), "Parquet", "parquet", "write a .npy or .jsonl file"):
        import pyarrow
        from pyarrow import parquet
    return pyarrow, parquet


_WRITERS: Mapping[str, Callable[[Path, Iterable[str], FloatArray], None]] = {
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
"""End of an output's name -> the function that writes the format."""


def check_output(path: Path) -> None:
    """Checks that vectors can be written to a file at ``path``.

    Raises:
        RequestError: its name doesn't end with .npy, .jsonl or .parquet, its folder is missing, or it is in a bundle.
        MissingDependencyError: its name ends with .parquet, and pyarrow isn't installed.
    """
    if path.suffix.lower() not in _WRITERS:
        hint = f"Name a file that ends with {', '.join(_WRITERS)}."
        raise RequestError(f"output: {path}: its name doesn't say what it is", hint=hint)
    if not path.parent.is_dir():
        raise RequestError(f"output: {path}: there is no folder {path.parent}", hint="Make it first.")
    if (bundle := bundle_around(Path(os.path.realpath(path)))) is not None:
        raise RequestError(f"output: {path}: it would be a file of the bundle {bundle}", hint="Write it elsewhere.")
    if path.suffix.lower() == ".parquet":
        _parquet()


def write_vectors(path: Path, texts: Iterable[str], vectors: FloatArray) -> None:
    """Writes a row for each text to a temporary file next to ``path``, and then renames it to ``path``.

    Args:
        path: the output; the end of its name decides the format.
        texts: the texts, which .npy leaves out.
        vectors: their vectors, [n, E].

    Raises CapacityError if it can't be written.
    """
    try:
        with replacing(path) as unfinished:
            _WRITERS[path.suffix.lower()](unfinished, texts, vectors)
    except OSError as e:
        raise CapacityError(f"{path}: it can't be written: {e.strerror or e}", hint="Write to another disk.") from e
