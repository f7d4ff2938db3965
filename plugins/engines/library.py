"""Loads TensorRT and TensorRT-RTX: checks of their requirements, engines, and contexts that run them.

Only this module loads the libraries, when a target is opened. Both have the same Python interface (``api.py``). Errors
that the library logs become part of our errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from enginewright.plugins.doctor.checks import choose_gpu, gpu_problem
from enginewright.plugins.engines.runtime_cache import FOLDER, RuntimeCache
from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.executors.kept_files import cache_file
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, MissingDependencyError, TargetError

from ..gpu.cuda_driver import Cuda, Device, InstalledGpu, load_cuda
from .api import ContextApi, EngineApi
from .checks import FLAVOURS, Flavour, library_problem
from .section import TensorRtSection

_NUMPY: Mapping[str, np.dtype[Any]] = {
    **{of.tensorrt: of.numpy for of in DTYPES.values() if of.tensorrt},
    "INT4": np.dtype(ml_dtypes.int4),
    "FP4": np.dtype(ml_dtypes.float4_e2m1fn),
    "E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""The library's names of types -> the types of our arrays. Weights of less than 8 bits are copied to the GPU as they
are stored.
"""

_MOST_SAID = 400  # characters of what the library logged, in an error
_OF_PLUGINS = re.compile(r"plugin|creator", re.IGNORECASE)


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine. A size of -1 isn't fixed."""

    name: str
    is_input: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Library:
    """A loaded library, and the GPU that it uses.

    Attributes:
        flavour: the description of the library.
        version: the library's version.
        gpu: a GPU for which the engines were built.
    """

    def __init__(self, flavour: Flavour, module: ModuleType, cuda: Cuda, gpu: InstalledGpu) -> None:
        self.flavour = flavour
        self.version = str(module.__version__)
        self.gpu = gpu
        self._module = module
        self._cuda = cuda
        self._log = _logger(module)
        self._runtime = module.Runtime(self._log)

    def open_device(self) -> Device:
        """Opens the GPU for the calling thread."""
        return self._cuda.open(self.gpu)

    def load_engine(self, path: Path, sha256: str = "") -> Engine:
        """Deserializes a plan on the GPU of the calling thread.

        Args:
            path: the plan's file.
            sha256: its expected hash; "" if the manifest has none.

        Raises:
            TargetError: the plan needs unknown plugins, which are named.
            BundleError: the library rejects the plan, for the reason in the message.
        """
        try:
            with open_regular(path) as file:
                data = file.read()
        except OSError as e:
            raise BundleError(f"{path}: cannot be read: {e.strerror}", hint="Check the file's permissions.") from e
        api = self._runtime.deserialize_cuda_engine(data)
        if api is None:
            message = self.said()
            if _OF_PLUGINS.search(message):
                raise TargetError(
                    f"{path}: {self.flavour.name} {self.version} here lacks a plugin that this engine has{message}",
                    hint="Build it again on this machine: `optimize build` registers Enginewright's plugins.",
                )
            raise BundleError(
                f"{path}: {self.flavour.name} {self.version} can't load this engine on {self.gpu.name} "
                f"({self.gpu.capability}){message}",
                hint="Run `optimize verify` on the bundle: it finds files that were damaged; or export it again.",
            )
        return Engine(self, api, path, sha256)

    def said(self) -> str:
        """Returns the errors that the library logged since the last call, as ": ..."; "" if there are none."""
        errors: list[str] = self._log.errors
        text = " ".join(" ".join(errors).split())
        errors.clear()
        return f": {text[:_MOST_SAID]}" if text else ""

    def context_config(self, engine: EngineApi, *, captured: bool = False) -> Any:
        """Returns a configuration for an engine's contexts, whose scratch memory we allocate.

        By default TensorRT-RTX captures CUDA graphs itself. It first runs a general kernel, while it compiles one for
        the shape, so only the library knows when to capture. With ``captured``, for work that we capture in a graph, it
        doesn't capture, and compiles before the run.
        """
        config = engine.create_runtime_config()
        strategy = self._module.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(strategy)
        if self.captures_itself:
            strategies = self._module.CudaGraphStrategy
            config.cuda_graph_strategy = strategies.DISABLED if captured else strategies.WHOLE_GRAPH_CAPTURE
        if captured and hasattr(self._module, "DynamicShapesKernelSpecializationStrategy"):
            eager = self._module.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = eager
        return config

    def runtime_cache(self, engine: EngineApi, sha256: str) -> RuntimeCache | None:
        """Returns the file cache of an engine's compiled kernels; None if the library compiles none at run time.

        ``sha256`` is the hash of the engine's plan.
        """
        config = engine.create_runtime_config()
        if not hasattr(config, "create_runtime_cache"):
            return None
        return RuntimeCache(
            cache_file(FOLDER, self.version, self.gpu.name, self.gpu.capability, sha256) if sha256 else None, config
        )

    @property
    def captures_itself(self) -> bool:
        """True if the library makes CUDA graphs itself."""
        return hasattr(self._module, "CudaGraphStrategy")

    @property
    def tells_capturable(self) -> bool:
        """True if the library's contexts report if a run can be captured."""
        return hasattr(self._module.IExecutionContext, "is_stream_capturable")

    def is_input(self, mode: Any) -> bool:
        """Returns True if a tensor's mode is that of an input."""
        return bool(mode == self._module.TensorIOMode.INPUT)


class Engine:
    """A deserialized engine.

    Attributes:
        path: the path of its plan.
        tensors: the inputs and outputs by name.
        profiles: the number of optimization profiles.
        scratch_bytes: the bytes of GPU memory that a context needs while it runs, in any profile.
        contexts: the number of contexts that were created.
        shape_changes: the number of times that a context was bound to other sizes than before.
    """

    def __init__(self, library: Library, api: EngineApi, path: Path, sha256: str = "") -> None:
        self.path = path
        self.profiles = api.num_optimization_profiles
        self.scratch_bytes = api.device_memory_size_v2
        self.tensors: dict[str, Tensor] = {}
        for index in range(api.num_io_tensors):
            name = api.get_tensor_name(index)
            kind = api.get_tensor_dtype(name).name
            if kind not in _NUMPY:
                raise BundleError(f"{path}: tensor {name} has the type {kind}", hint="Export the bundle again.")
            sizes = api.get_tensor_shape(name)
            shape = tuple(int(sizes[i]) for i in range(len(sizes)))
            is_input = library.is_input(api.get_tensor_mode(name))
            self.tensors[name] = Tensor(name, is_input, _NUMPY[kind], shape)
        self.contexts = self.shape_changes = 0
        self._library = library
        self._api = api
        self._cache = library.runtime_cache(api, sha256)

    def context(self, profile: int, device: Device, scratch: int, *, captured: bool = False) -> Context:
        """Creates a context for one optimization profile.

        Args:
            profile: the profile's index.
            device: the GPU.
            scratch: the address of scratch memory, which other contexts may use between runs.
            captured: True if its work is captured in a graph of ours.

        Raises:
            CapacityError: there is too little memory.
            EnginewrightError: the library can't create the context.
        """
        config = self._library.context_config(self._api, captured=captured)
        if self._cache is not None:
            self._cache.use(config)
        api: ContextApi | None = self._api.create_execution_context(config)
        self.contexts += 1
        if api is None:
            raise EnginewrightError(
                f"{self.path}: {self._library.flavour.name} makes no context for it{self._library.said()}",
                hint="Free memory of the GPU, or pass less memory for the caches.",
            )
        api.set_device_memory(scratch, self.scratch_bytes)
        context = Context(self, api, device)
        context.check(api.set_optimization_profile_async(profile, device.stream), f"profile {profile}")
        return context

    @property
    def runtime_cache(self) -> str:
        """A note if compiled kernels were found in a file; "" if the library stores none."""
        return "" if self._cache is None else self._cache.state

    def close(self) -> None:
        """Destroys the engine, whose contexts must be closed before. Stores the kernels that the library compiled."""
        if self._cache is not None:
            self._cache.save()
            self._cache = None
        del self._api

    def refuse(self, what: str) -> EnginewrightError:
        """Returns the error for a call that the library rejected; ``what`` describes the call."""
        return EnginewrightError(
            f"{self.path}: {self._library.flavour.name} {self._library.version} refuses {what}{self._library.said()}",
            hint="Run `optimize verify` on the bundle, and report this with `optimize doctor --json`.",
        )


class Context:
    """An execution context: after sizes and addresses are set, it can run any number of times."""

    def __init__(self, engine: Engine, api: ContextApi, device: Device) -> None:
        self._engine = engine
        self._api = api
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def capturable(self) -> bool:
        """True if a run can be captured in a CUDA graph. TensorRT-RTX can't be captured while it compiles kernels."""
        check = getattr(self._api, "is_stream_capturable", None)
        return check is None or bool(check(self._device.stream))

    def close(self) -> None:
        """Destroys the context, which must not be running."""
        del self._api

    def bind(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Sets the sizes of the inputs and the addresses of tensors.

        Raises EnginewrightError for sizes that the profile doesn't allow.
        """
        free = {name: shape for name, shape in shapes.items() if -1 in self._engine.tensors[name].shape}
        self._engine.shape_changes += self._shapes not in ({}, free)
        self._shapes = free
        for name, shape in free.items():
            self.check(self._api.set_input_shape(name, shape), f"shape {list(shape)} of {name}")
        self.place(addresses)
        missing = self._api.infer_shapes()
        self.check(not missing, f"a step: it isn't given {', '.join(missing)}")

    def place(self, addresses: Mapping[str, int]) -> None:
        """Sets the addresses of tensors; other tensors keep theirs."""
        for name, address in addresses.items():
            self.check(self._api.set_tensor_address(name, address), f"the address of {name}")

    def __call__(self) -> None:
        """Enqueues a run on the device's stream."""
        self.check(self._api.execute_async_v3(self._device.stream), "a step")

    def check(self, accepted: bool, what: str) -> None:
        """Raises EnginewrightError naming the call ``what`` if the library didn't accept it (``accepted`` is False)."""
        if not accepted:
            raise self._engine.refuse(what)


def describe_engines(engines: Collection[Engine]) -> dict[str, str | int]:
    """Returns facts about all these engines together for ``LLM.info``, by name."""
    caches = ", ".join(dict.fromkeys(engine.runtime_cache for engine in engines))
    notes: dict[str, str | int] = {
        "contexts": sum(engine.contexts for engine in engines),
        "shape_changes": sum(engine.shape_changes for engine in engines),
        "scratch_bytes": max(engine.scratch_bytes for engine in engines),
    }
    return notes | ({"runtime_cache": caches} if caches else {})


def open_library(section: TensorRtSection, where: str) -> Library:
    """Returns the library that runs a target's engines, after checking the library, the driver and the GPU.

    Args:
        section: the engines' section of the target's manifest.
        where: the target, for errors.

    Raises:
        MissingDependencyError: the library isn't installed, or can't be loaded.
        TargetError: the library has another version, or there is no driver, no GPU, or no GPU for which the engines
            were built. The message has the found and the needed ones.
    """
    flavour = FLAVOURS[section.flavour]
    if util.find_spec(flavour.module) is None:
        _raise(library_problem(flavour, None, section.version), where)
    install = flavour.install.format(version=f"=={section.version}" if section.version else "")
    try:
        module = import_module(flavour.module)
    except (ImportError, OSError) as e:  # its own libraries are missing
        raise MissingDependencyError(
            f"{where}: {flavour.name} is installed and doesn't load: {e}",
            hint=f"Install it anew: {install}",
        ) from e
    _raise(library_problem(flavour, str(module.__version__), section.version), where)
    cuda = load_cuda()
    _raise(gpu_problem(cuda.gpus, "the driver shows none", section.compute_capabilities), where)
    gpu = choose_gpu(cuda.gpus, section.compute_capabilities)
    assert gpu is not None
    return Library(flavour, module, cuda, gpu)


def check_tensors(engine: Engine, inputs: Sequence[str], outputs: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raises BundleError unless an engine has exactly these inputs and outputs. The message names missing and surplus
    ones.

    Args:
        engine: the engine.
        inputs, outputs: the names.
        optional: inputs that the engine may lack.
    """
    names = {True: set[str](), False: set[str]()}
    for tensor in engine.tensors.values():
        names[tensor.is_input].add(tensor.name)
    missing = (set(inputs) - names[True]) | (set(outputs) - names[False])
    wrong = (names[True] - set(inputs) - set(optional)) | (names[False] - set(outputs))
    if missing or wrong:
        what = [f"lacks {', '.join(sorted(missing))}"] if missing else []
        what += [f"has {', '.join(sorted(wrong))} of which it says nothing"] if wrong else []
        raise BundleError(
            f"{engine.path}: not what the target's manifest says: it {' and '.join(what)}",
            hint="Export the bundle again.",
        )


def _raise(problem: Any, where: str) -> None:
    if problem is not None:
        error: EnginewrightError = problem.error()
        raise error.reworded(f"{where}: {error.message}", hint=error.hint)


@cache
def _logger(module: ModuleType) -> Any:
    """Returns an ``ILogger`` that stores errors. There is one for the process, as the library uses only its first
    logger.

    Its class is defined in this function because its base class exists only after the library is loaded.
    """
    errors: list[str] = []

    def start(self: Any) -> None:
        module.ILogger.__init__(self)

    def log(self: Any, severity: Any, msg: str) -> None:
        if severity <= module.ILogger.ERROR:
            errors.append(msg)

    return type("_Logger", (module.ILogger,), {"__init__": start, "log": log, "errors": errors})()
