"""Uses jaxlib's PJRT without jax: its CPU client or a plugin's, with arrays that aren't copied, and compiled modules.

Importing jaxlib's extension module imports neither jax nor torch. Its interface is private and changes between minor
versions. So only this module uses it, and ``jaxlib`` must have a tested version.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from enginewright.runtime.shared.errors import BundleError, CapacityError, MissingDependencyError, TargetError

from ...steps.host_arrays import Array, capsule_of
from ..kernels.library import handlers_library

TESTED = "0.10"
"""The minor version of jaxlib for which this module is written."""

INSTALL = "Install it with: pip install 'enginewright[stablehlo]'"

PLUGINS_PACKAGE = "jax_plugins"
"""The namespace in which packages with PJRT plugins install a module, with the plugin's library next to it."""

_HOST = 1, 0
"""DLPack's device type and number of the CPU."""

_ENVIRONMENT = threading.Lock()


def load_jaxlib() -> ModuleType:
    """Imports jaxlib's extension module. Raises MissingDependencyError if it isn't installed or has an untested
    version.
    """
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError as e:
        raise MissingDependencyError("jaxlib, which target 'stablehlo' runs on, is not installed", hint=INSTALL) from e
    if not is_tested(version):
        raise MissingDependencyError(
            f"target 'stablehlo' runs on jaxlib {TESTED}, whose interface it was tested with, "
            f"and {version} is installed",
            hint=f"Install that one: pip install 'jaxlib=={TESTED}.*'",
        )
    try:
        with _quiet():
            return import_module("jaxlib._jax")
    except ImportError as e:
        raise MissingDependencyError(f"jaxlib {version} can't be loaded: {e}", hint=INSTALL) from e


def load_stablehlo() -> ModuleType:
    """Imports jaxlib's functions for StableHLO modules. Raises the errors of ``load_jaxlib``."""
    load_jaxlib()
    return import_module("jaxlib.mlir._mlir_libs._stablehlo")


def is_tested(version: str) -> bool:
    """Returns True if this module was tested with this version of jaxlib."""
    return version.split(".")[:2] == TESTED.split(".")


def plugins() -> dict[str, Path]:
    """Returns the installed PJRT plugins, name -> library, without loading or running them."""
    libraries_by_name: dict[str, Path] = {}
    try:
        spec = util.find_spec(PLUGINS_PACKAGE)
    except (ImportError, ValueError):
        spec = None
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for folder in sorted(Path(root).iterdir()) if Path(root).is_dir() else ():
            libraries = sorted(folder.glob("*.so"))
            if libraries:
                libraries_by_name[folder.name] = libraries[0]
    return libraries_by_name


class Pjrt:
    """A PJRT client with one device.

    Args:
        provider: "cpu", or the name of an installed plugin.
        threads: the number of threads of the CPU's kernels.

    Raises:
        MissingDependencyError: jaxlib isn't installed or has another version.
        TargetError: there is no such plugin, or it doesn't start.
    """

    def __init__(self, provider: str, threads: int) -> None:
        self._api = load_jaxlib()
        self.version = metadata.version("jaxlib")
        self.provider = provider
        with _quiet(), _threads(threads):
            self._client = self._open(provider)
        self._devices = self._client.local_devices()[:1]
        if not self._devices:
            raise TargetError(f"provider: {provider!r} has no device here", hint='Take "cpu".')

    def _open(self, provider: str) -> Any:
        if provider == "cpu":
            return self._api.get_tfrt_cpu_client(asynchronous=True)
        there = plugins()
        if provider not in there:
            raise TargetError(
                f"provider: there is no PJRT plugin {provider!r} installed; there is {', '.join(('cpu', *there))}",
                hint="Install the package that brings it (one with a module in jax_plugins), or take one of these.",
            )
        try:
            if not self._api.pjrt_plugin_loaded(provider):
                self._api.load_pjrt_plugin(provider, str(there[provider]), c_api=None)
            if not self._api.pjrt_plugin_initialized(provider):
                self._api.initialize_pjrt_plugin(provider)
            return self._api.get_c_api_client(provider, {})
        except (self._api.JaxRuntimeError, RuntimeError) as e:
            raise TargetError(
                f"provider: PJRT plugin {provider!r} ({there[provider].name}) doesn't start: {e}",
                hint='Look whether its device and driver are there, or take provider "cpu".',
            ) from e

    def compile(self, artifact: bytes, name: str) -> Any:
        """Compiles an artifact and returns the executable.

        Raises BundleError for an invalid module, CapacityError if there is too little memory.
        """
        try:
            return self._client.compile_and_load(artifact, self._api.DeviceList(tuple(self._devices)))
        except (self._api.JaxRuntimeError, RuntimeError, ValueError) as e:
            if "RESOURCE_EXHAUSTED" in str(e):
                raise CapacityError(f"{name}: there is no memory to compile it: {e}", hint="Free some.") from e
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise BundleError(
                f"{name}: jaxlib {self.version} can't compile it: {first}",
                hint="If the file was altered, copy the bundle again; else export the model again with this version.",
            ) from e

    def serialize(self, executable: Any) -> bytes:
        """Returns a compiled module as bytes; b"" if the client doesn't support it."""
        try:
            data: bytes = executable.serialize()
            return data
        except (self._api.JaxRuntimeError, RuntimeError):
            return b""

    def deserialize(self, data: bytes) -> Any:
        """Loads the bytes of ``serialize``; returns None if they are invalid or of another version. They run as code,
        so they must be trusted.
        """
        try:
            return self._client.deserialize_executable(data, self._api.DeviceList(tuple(self._devices)), None)
        except (self._api.JaxRuntimeError, RuntimeError, ValueError):
            return None

    def register(self, handlers: Sequence[str]) -> None:
        """Registers our functions with these names, so that modules can call them.

        Raises TargetError for a provider other than the CPU, or an unknown function; MissingDependencyError if the
        library isn't built.
        """
        if not handlers:
            return
        if self.provider != "cpu":
            raise TargetError(
                f"provider: the bundle's modules call our kernels, which run on a CPU, and not on {self.provider!r}",
                hint='Take "cpu", or export without kernels in [stablehlo] of the recipe.',
            )
        library = ctypes.CDLL(str(handlers_library()))
        for name in handlers:
            if name in self._api.custom_call_targets("Host"):
                continue
            if not name.startswith("enginewright_") or not hasattr(library, name):
                raise TargetError(
                    f"the bundle's modules call {name!r}, which this version of enginewright doesn't have",
                    hint="Run it with the version that exported it, or export the model again.",
                )
            function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            self._api.register_custom_call_target(name, _capsule(function), "Host", api_version=1)

    def view(self, array: Array, *, donated: bool = False) -> Any:
        """Returns a buffer on the memory of an aligned array (``aligned``).

        ``donated``: the next run may write to it. For that, PJRT has to be asked for a copy, which it doesn't make;
        callers check that by the address.
        """
        copy = True if donated else None
        return self._api.dlpack_managed_tensor_to_buffer(capsule_of(array), self._devices[0], None, copy)

    def run(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        """Runs a module and returns the buffers of its results.

        Raises BundleError if the module calls our kernels with invalid arguments, CapacityError if there is too little
        memory.
        """
        try:
            results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
            results[0][0].block_until_ready()
        except self._api.JaxRuntimeError as e:
            if "INVALID_ARGUMENT: enginewright: " in str(e):
                hint = "If its file was altered, copy the bundle again; else report this."
                raise BundleError(f"step: XLA can't run its module: {e}", hint=hint) from e
            raise CapacityError(f"step: XLA can't run it: {e}", hint="Pass less memory, or a smaller context.") from e
        return [of_devices[0] for of_devices in results]

    def address(self, buffer: Any) -> int:
        """Returns a buffer's address."""
        pointer: int = buffer.unsafe_buffer_pointer()
        return pointer

    def array(self, buffer: Any) -> Array:
        """Returns the contents of a buffer; on the CPU a view of its memory."""
        return np.from_dlpack(_Shared(self._api.buffer_to_dlpack_managed_tensor(buffer)))


class _Shared:
    """A wrapper of a buffer that ``np.from_dlpack`` accepts."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


def _capsule(function: ctypes.c_void_p) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(function, None, None)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """A context in which the environment variable is set from which XLA's CPU client takes its number of threads."""
    with _ENVIRONMENT:
        before = os.environ.get("NPROC")
        os.environ["NPROC"] = str(count)
        try:
            yield
        finally:
            if before is None:
                del os.environ["NPROC"]
            else:
                os.environ["NPROC"] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which lines that the library writes to stderr are hidden."""
    before = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
