"""Finds the library of handlers for XLA's custom calls."""

from __future__ import annotations

from pathlib import Path

from enginewright.runtime.shared.errors import MissingDependencyError

from .. import kernels as package  # its path: modules and what is built may lie in two folders

NAME = "libenginewright_xla.so"


def find_handlers() -> Path | None:
    """Returns the library's path; None if it isn't built."""
    return next((path for folder in package.__path__ if (path := Path(folder) / NAME).is_file()), None)


def handlers_library() -> Path:
    """Returns the library's path. Raises MissingDependencyError if it isn't built."""
    library = find_handlers()
    if library is None:
        raise MissingDependencyError(
            f"{NAME}, the handlers for XLA, is missing beside {__name__}",
            hint="Install enginewright with pip; in a source tree, run: cmake -B build && cmake --build build",
        )
    return library
