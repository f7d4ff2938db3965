"""TVM's small runtime, and libraries that were compiled by TVM: neither torch nor TVM's compiler is loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.plugins.shared.errors import BundleError, MissingDependencyError

INSTALL = "Install it with: pip install 'enginewright[tvm]'"
_MISSING = object()
_RUNTIME = "libtvm_runtime.so"
_CPU, _POOLED = 1, 2
"""TVM's numbers of a kind of device, and of memory that is taken again."""


def tvm_version() -> str | None:
    """Of the installed TVM; None if there is none."""
    try:
        return metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def load_runtime() -> ModuleType:
    """TVM's functions (``tvm_ffi``), with its runtime's. Raises MissingDependencyError."""
    spec = util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations or util.find_spec("tvm_ffi") is None:
        raise MissingDependencyError("TVM (apache-tvm) is not installed", hint=INSTALL)
    tvm_ffi = _import_without_torch()
    found = list(Path(spec.submodule_search_locations[0]).rglob(_RUNTIME))
    try:
        ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
    except (OSError, IndexError) as e:
        raise MissingDependencyError(f"TVM's runtime doesn't load: {e}", hint=f"{INSTALL} --force-reinstall") from e
    return tvm_ffi


def _import_without_torch() -> ModuleType:
    """tvm_ffi imports torch where that is installed, for tensors of its own, which nobody here has."""
    torch = sys.modules.get("torch", _MISSING)
    if torch is _MISSING:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import fails
    try:
        return importlib.import_module("tvm_ffi")
    finally:
        if torch is _MISSING:
            del sys.modules["torch"]


class Library:
    """A compiled library in TVM's virtual machine.

    Raises BundleError if it isn't one, or not of this version of TVM; MissingDependencyError without TVM.
    """

    def __init__(self, path: Path, threads: int) -> None:
        ffi = load_runtime()
        if threads:
            ffi.get_global_func("runtime.config_threadpool")(1, threads)
        try:
            self._machine = ffi.load_module(str(path))["vm_load_executable"]()
            self._machine["vm_initialization"](_CPU, 0, _POOLED)
        except (RuntimeError, AttributeError, ValueError) as e:
            raise BundleError(f"{path}: TVM can't load it: {e}", hint="Export the bundle again.") from e

    def function(self, name: str) -> Any:
        return self._machine[name]


def tensor(array: npt.NDArray[Any]) -> Any:
    """An array as TVM sees it, of one dimension or as it is; the memory stays the array's, which must stay alive."""
    ffi = load_runtime()
    if not array.flags.writeable:  # nobody writes to weights, but DLPack can't say so
        array = (
            np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data))
            .view(array.dtype)
            .reshape(array.shape)
        )
    return ffi.from_dlpack(array)
