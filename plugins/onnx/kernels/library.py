"""Finds the library of our operators for onnxruntime."""

from __future__ import annotations

from pathlib import Path

from enginewright.runtime.shared.errors import MissingDependencyError

from .. import kernels as package  # its path: modules and what is built may lie in two folders

NAME = "libenginewright_onnxruntime.so"
MOST_THREADS = 1024
"""The most threads of a session that its operators use."""


def find_operators() -> Path | None:
    """Returns the library's path, for ``SessionOptions.register_custom_ops_library``; None if it isn't built."""
    return next((path for folder in package.__path__ if (path := Path(folder) / NAME).is_file()), None)


def operators_library() -> Path:
    """Returns the library's path. Raises MissingDependencyError if it isn't built."""
    library = find_operators()
    if library is None:
        raise MissingDependencyError(
            f"{NAME}, the operators for onnxruntime, is missing beside {__name__}",
            hint="Install enginewright with pip; in a source tree, run: cmake -B build && cmake --build build",
        )
    return library
