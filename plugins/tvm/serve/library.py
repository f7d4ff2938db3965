"""Loads TVM's small runtime and compiled libraries. Neither torch nor TVM's compiler is loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import tempfile
import threading
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.errors import BundleError, CapacityError, MissingDependencyError
from enginewright.runtime.shared.hidden_taps import with_tap_outputs
from enginewright.runtime.shared.lowered_program import LoweredProgram

from ...native.executable import RUN_LOOP_FOR_TVM, RUN_STEP_FOR_TVM
from ..section import RUN_STEP, STEP_WITH_TAPS

INSTALL = "Install it with: pip install 'enginewright[tvm]'"
_MISSING = object()
_BIND, _BIG_CORES = "TVM_BIND_THREADS", 1
_RUNTIME = "libtvm_runtime.so"
_LAUNCH = "__TVMBackendParallelLaunch"
"""The symbol in a library that holds the address of TVM's function for parallel loops. TVM sets it when it loads the
library.
"""
_CPU, _POOLED = 1, 2
"""TVM's numbers for the kind of device, and for the kind of allocator that reuses memory."""


def tvm_version() -> str | None:
    """Returns the version of the installed TVM; None if it isn't installed."""
    try:
        return metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def load_runtime() -> ModuleType:
    """Loads TVM's runtime library, and returns the module of its functions (``tvm_ffi``). Raises
    MissingDependencyError.
    """
    spec = util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations or util.find_spec("tvm_ffi") is None:
        raise MissingDependencyError("TVM (apache-tvm) is not installed", hint=INSTALL)
    tvm_ffi = _import_without_torch()
    libraries = list(Path(spec.submodule_search_locations[0]).rglob(_RUNTIME))
    try:
        ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
    except (OSError, IndexError) as e:
        raise MissingDependencyError(f"TVM's runtime doesn't load: {e}", hint=f"{INSTALL} --force-reinstall") from e
    return tvm_ffi


def _import_without_torch() -> ModuleType:
    """Imports tvm_ffi without torch. tvm_ffi would import an installed torch, for tensors that aren't used here."""
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

    It is loaded from a temporary copy, because the system returns an already loaded library for the same path, even if
    the file has changed.

    Args:
        content: the content of the library's file.
        source: the file's path, for messages.
        threads: the number of threads of its loops. None: its loops run through ``RUN_LOOP_FOR_TVM``, and steps may run
            through ``RUN_STEP_FOR_TVM``.

    Raises:
        BundleError: the content isn't a library, or is of another version of TVM.
        MissingDependencyError: TVM is missing.
    """

    def __init__(self, content: bytes, source: Path, threads: int | None) -> None:
        ffi = load_runtime()
        self._threads = threads
        self._pools = threading.local()
        self._configure = ffi.get_global_func("runtime.config_threadpool")
        try:
            with tempfile.TemporaryDirectory(prefix="enginewright-") as folder:
                path = Path(folder, source.name)
                path.write_bytes(content)
                self._machine = ffi.load_module(str(path))["vm_load_executable"]()
                if threads is None:
                    _take_over(ffi, path)
            self._machine["vm_initialization"](_CPU, 0, _POOLED)
        except (RuntimeError, AttributeError, ValueError) as e:
            raise BundleError(f"{source}: TVM can't load it: {e}", hint="Export the bundle again.") from e
        except OSError as e:
            raise CapacityError(
                f"{source}: there is no place for a copy of it: {e.strerror or e}",
                hint="Name a folder with room, from which programs may be run, in the variable TMPDIR.",
            ) from e

    def function(self, name: str) -> Any:
        """Returns one of the library's functions; None if it has none with that name."""
        try:
            return self._machine[name]
        except AttributeError:
            return None

    def program(self, program: LoweredProgram) -> LoweredProgram:
        """Returns the program that the library runs: ``program``, with its taps as outputs if the library has a
        function for them.
        """
        return program if self.function(STEP_WITH_TAPS) is None else with_tap_outputs(program)[0]

    def enter(self) -> None:
        """Creates the calling thread's pool at its first call, since TVM has one for each calling thread.

        TVM's default pool would use half of the cores, and pin each thread to one.
        """
        if self._threads is None or getattr(self._pools, "made", False):
            return
        before = os.environ.get(_BIND)
        os.environ[_BIND] = "0"
        try:
            self._configure(_BIG_CORES, self._threads, [str(i) for i in range(self._threads)])
        finally:
            del os.environ[_BIND]
            if before is not None:
                os.environ[_BIND] = before
        self._pools.made = True


def _take_over(ffi: ModuleType, path: Path) -> None:
    """Replaces a loaded library's functions for steps and for parallel loops by those of the cpu target."""
    run_step = ffi.Function.__from_extern_c__(RUN_STEP_FOR_TVM)
    ffi.register_global_func(RUN_STEP, run_step, override=True)
    try:
        launch = ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), _LAUNCH)
    except ValueError:  # it has no loop for several threads
        return
    launch.value = RUN_LOOP_FOR_TVM


def tensor(array: npt.NDArray[Any]) -> Any:
    """Returns an array as TVM's tensor that shares its memory; the array must stay alive."""
    ffi = load_runtime()
    if not array.flags.writeable:  # nobody writes to weights, but DLPack can't say so
        array = (
            np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data))
            .view(array.dtype)
            .reshape(array.shape)
        )
    return ffi.from_dlpack(array)
