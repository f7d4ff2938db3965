"""An unfinished output: the vectors so far, in a file next to the output, from which the next run continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import CapacityError, RequestError

_MOST_HEAD = 1 << 16


class Unfinished:
    """The file OUT.part: a line of JSON with ``made_from``, then float32 rows in little-endian order.

    Args:
        output: the output's path.
        made_from: everything that the vectors depend on: the file of texts, the bundle and the options.

    Attributes:
        path: the path of the file.
        rows: the number of whole vectors in it. An incomplete last one is removed.

    Raises RequestError if an existing file is of other texts, another bundle or other options.
    """

    def __init__(self, output: Path, made_from: dict[str, Any]) -> None:
        self.path = output.with_name(f"{output.name}.part")
        self._head = msgspec.json.encode(made_from) + b"\n"
        self._width = 0
        self.rows = 0
        if self.path.exists():
            self._find()

    def _find(self) -> None:
        try:
            with open_regular(self.path) as file:
                head = file.readline(_MOST_HEAD)
                size = os.fstat(file.fileno()).st_size
        except OSError as e:
            raise RequestError(f"{self.path}: it can't be read: {e.strerror}", hint="Remove it.") from e
        if head != self._head:
            raise RequestError(
                f"{self.path}: it is of other texts, another bundle or other options",
                hint="Remove it to begin anew, or write to another output.",
            )
        self._bytes = size - len(head)

    def begin(self, width: int) -> None:
        """Opens the file to append vectors of ``width`` numbers. Raises CapacityError if it can't be written."""
        self._width = width
        self.rows = getattr(self, "_bytes", 0) // (4 * width)
        try:
            self._file = self.path.open("r+b" if self.path.exists() else "w+b")
            self._file.truncate(len(self._head) + self.rows * 4 * width)
            self._file.write(self._head)
            self._file.seek(0, os.SEEK_END)
        except OSError as e:
            raise self._unwritable(e) from e

    def add(self, vectors: FloatArray) -> None:
        """Appends vectors, [n, E]. Raises CapacityError if they can't be written."""
        try:
            self._file.write(vectors.astype("<f4", copy=False).tobytes())
            self._file.flush()
        except OSError as e:
            raise self._unwritable(e) from e
        self.rows += len(vectors)

    def vectors(self) -> FloatArray:
        """Returns all vectors, [n, E], as a map of the file."""
        shape = (self.rows, self._width)
        return np.memmap(self.path, "<f4", "r", len(self._head), shape)

    def close(self) -> None:
        """Closes the file, which stays."""
        self._file.close()

    def remove(self) -> None:
        """Removes the file, once its vectors are in the output."""
        self.path.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> CapacityError:
        return CapacityError(f"{self.path}: it can't be written: {error.strerror}", hint="Write to another disk.")
