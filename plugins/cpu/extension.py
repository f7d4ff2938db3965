"""Loads the extension module, with a hint in the error if it isn't built."""

from __future__ import annotations

from enginewright.runtime.shared.errors import MissingDependencyError

try:
    from . import _cpu as cpu_extension
except ImportError as e:
    raise MissingDependencyError(
        f"the CPU extension enginewright.plugins.cpu._cpu can't be loaded: {e}",
        hint="Install enginewright with pip; in a source tree, run: cmake -B build && cmake --build build",
    ) from e

__all__ = ["cpu_extension"]
