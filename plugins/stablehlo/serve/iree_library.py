"""Runs modules that IREE compiled, on the CPU, with arrays that aren't copied.

It loads neither IREE's compiler nor jaxlib. Modules run only with the runtime of the version that compiled them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module, util
from types import ModuleType
from typing import Any

import numpy as np

from enginewright.plugins.doctor.checks import Problem
from enginewright.plugins.steps.x86_levels import best_level
from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.trust import read_code
from enginewright.runtime.shared.errors import BundleError, CapacityError, MissingDependencyError, TargetError

from ...doctor.machine import iree_version
from ...native.processor import processor_features
from ...steps.host_arrays import Array, capsule_of
from ..section import IreeSection, ModuleSection, StableHloSection
from .doctor import iree_level_problem, iree_problem

INSTALL = "Install it with: pip install 'enginewright[iree]'"
PROVIDER = "iree"
"""The name of IREE's runtime for ``--provider``."""

_LOCK = threading.Lock()
_drivers: dict[str, tuple[Any, int]] = {}
"""IREE's driver and the number of its threads, by the driver's name. IREE has one thread pool in a process."""


def load_iree() -> ModuleType:
    """Imports IREE's runtime. Raises MissingDependencyError."""
    if iree_version() is None or util.find_spec("iree.runtime") is None:
        raise MissingDependencyError("IREE's runtime (iree-base-runtime) is not installed", hint=INSTALL)
    try:
        return import_module("iree.runtime")
    except (ImportError, OSError) as e:
        raise MissingDependencyError(f"IREE's runtime doesn't load: {e}", hint=f"{INSTALL} --force-reinstall") from e


class Iree:
    """A client of IREE's runtime on the CPU. Implements ``executor.ModuleClient``.

    Args:
        section: the target's section.
        threads: the number of threads of the kernels; the first client of a process sets it for all.

    Raises:
        MissingDependencyError: the runtime isn't installed.
        TargetError: the bundle has no modules for IREE, or only for other processors or another version.
    """

    def __init__(self, section: StableHloSection, threads: int) -> None:
        self._api = load_iree()
        compiled = check_section(section)
        level = best_level(compiled.levels, processor_features())
        if level is None:
            raise _refused(iree_level_problem(compiled))
        self._level = level
        self._device, self._threads = _device(self._api, threads)
        self._instance = self._api.VmInstance()
        self._library = self._api.create_hal_module(self._instance, self._device)
        self._loaded = 0

    def describe(self) -> dict[str, str | int]:
        return {
            "iree": iree_version() or "",
            "provider": PROVIDER,
            "level": f"x86-64-{self._level}",
            "threads": self._threads,
            "loaded": self._loaded,
        }

    def load(self, bundle: Bundle, target: str, module: ModuleSection) -> Any:
        """Loads a module and returns its executable. Raises BundleError for a file that was altered or isn't IREE's."""
        name = f"{target_folder(target)}/{module.compiled(self._level)}"
        content = read_code(bundle, name)
        try:
            loaded = self._api.VmModule.copy_buffer(self._instance, content)
            context = self._api.VmContext(self._instance, [self._library, loaded])
            function = loaded.lookup_function("main")
        except (RuntimeError, ValueError, LookupError) as e:
            raise BundleError(
                f"{bundle.path / name}: IREE {iree_version()} can't load it: {_first_line(e)}",
                hint="Export the bundle again.",
            ) from e
        if function is None:
            raise BundleError(f"{bundle.path / name}: it has no function main", hint="Export the bundle again.")
        self._loaded += 1
        return context, function

    def view(self, array: Array, *, donated: bool = False) -> Any:
        """Returns a buffer on the memory of an aligned array (``aligned``).

        A module writes to it if its arguments say so (``tf.aliasing_output``); the buffer can then be used again.
        """
        return self._device.from_dlpack_capsule(capsule_of(array))

    def run(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        """Runs a module and returns the buffers of its results. Raises CapacityError if there is too little memory."""
        context, function = executable
        inputs, results = self._api.VmVariantList(len(arguments)), self._api.VmVariantList(1)
        for argument in arguments:
            inputs.push_ref(argument.ref)
        try:
            context.invoke(function, inputs, results)
        except (RuntimeError, ValueError, LookupError, MemoryError) as e:
            raise CapacityError(
                f"step: IREE can't run it: {_first_line(e)}", hint="Pass less memory, or a smaller context."
            ) from e
        return [results.get_as_object(i, self._api.HalBufferView) for i in range(len(results))]

    def array(self, buffer: Any) -> Array:
        """Returns the contents of a buffer of floats, as a view of its memory."""
        view: Array = buffer.map().asarray(buffer.shape, np.dtype(np.float32))
        return view

    def address(self, buffer: Any) -> int:
        """Returns the address of a buffer of floats."""
        return self.array(buffer).ctypes.data


def check_section(section: StableHloSection) -> IreeSection:
    """Returns the facts about IREE's modules. Raises TargetError if there are none, or if the installed version
    differs.
    """
    if section.iree is None or not section.iree.levels:
        raise TargetError(
            "provider: the bundle has no modules that IREE's runtime runs",
            hint='Export it with iree = ["v3"] in [stablehlo] of the recipe, or take provider "cpu".',
        )
    if problem := iree_problem(section.iree, iree_version()):
        raise _refused(problem)
    return section.iree


def _refused(problem: Problem) -> TargetError:
    return TargetError(f"target stablehlo: {problem.message}", hint=problem.hint)


def _device(api: ModuleType, threads: int) -> tuple[Any, int]:
    """Returns a device, and the number of its threads. The first call in a process sets that number for all."""
    with _LOCK:
        if PROVIDER not in _drivers:
            api.flags.parse_flags(f"--task_topology_group_count={threads}")
            _drivers[PROVIDER] = api.get_driver("local-task"), threads
        driver, had = _drivers[PROVIDER]
    return driver.create_default_device(), had


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
