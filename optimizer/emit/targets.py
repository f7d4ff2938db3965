"""Every target that can be emitted: one entry says all that the compiler knows of it.

The runtime's half, with the same names, is ``TARGETS`` of ``runtime/executors/open.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from enginewright.optimizer.emit.shared.gpus import CUDA_DEFAULT, DEFAULT, KERNELS_FOR, check_kernels, check_suited
from enginewright.optimizer.recipes.gpus import check_formats
from enginewright.passes.formats.weight_format import Storage
from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.extensions import Extensible

from ..recipes.recipe import Recipe
from ..recipes.target_sections import EnginesSection
from .cpu.emitter import CpuEmitter
from .cuda.emitter import CudaEmitter
from .onnx.emitter import OnnxEmitter
from .shared.base import Emitter
from .stablehlo.emitter import StableHloEmitter
from .tensorrt.emitter import TensorRtEmitter
from .tensorrt_rtx.emitter import TensorRtRtxEmitter
from .torch_tensorrt.emitter import TorchTensorRtEmitter, check_machine
from .tvm.emitter import TvmEmitter


@dataclass(frozen=True)
class Target:
    """The compiler's half of a target.

    Attributes:
        emitter: lowers a program and writes the target's files.
        tools: distributions that it is made with, besides those of every export; the manifest has their versions.
        check: of a target that can't be emitted everywhere: raises before any work what would be raised after it.
        gpus: those that it builds for by default; none of a target that isn't built for GPUs.
        check_gpus: raises TargetError for GPUs that it can't be built for.
        narrow_caches: whether its KV cache may have fewer bits than what it computes with.
        caches: if not all of them, those that it may have.
        cache_instructions: those of them that its GPUs must have instructions for.
        floats: what activations are stored in where a recipe doesn't say ([engines] dtype).
        instructions: formats of weights that its GPUs must have instructions for.
    """

    emitter: Emitter
    tools: tuple[str, ...] = ()
    check: Callable[[], None] = lambda: None
    gpus: tuple[str, ...] = ()
    check_gpus: Callable[[Sequence[str]], None] = lambda gpus: None
    narrow_caches: bool = False
    caches: Callable[[EnginesSection], Collection[str]] = lambda engines: ()
    cache_instructions: tuple[str, ...] = ()
    floats: Literal["f16", "bf16"] = "f16"
    instructions: tuple[Storage, ...] = ("int4", "fp8")


_SCALED = ("int8", "fp8")
"""KV caches with a scale for each token and head, by the names of recipes."""

_OWN = {
    "cpu": Target(CpuEmitter(), narrow_caches=True),
    "onnx": Target(OnnxEmitter(), ("onnx",)),
    "tensorrt-rtx": Target(
        TensorRtRtxEmitter(),
        ("onnx", "tensorrt_rtx"),
        gpus=DEFAULT,
        check_gpus=check_suited,
        caches=lambda engines: _SCALED if engines.form == "segments" else (),
    ),
    "tensorrt": Target(
        TensorRtEmitter(),
        ("onnx", "triton"),
        gpus=KERNELS_FOR,
        check_gpus=check_kernels,
        caches=lambda engines: _SCALED if engines.caches != "ordered" else (),
        cache_instructions=("fp8",),
    ),
    "cuda": Target(
        CudaEmitter(),
        ("triton",),
        gpus=CUDA_DEFAULT,
        check_gpus=check_kernels,
        narrow_caches=True,
        floats="bf16",
        instructions=(),
    ),
    "stablehlo": Target(StableHloEmitter(), ("onnx", "jaxlib")),
    "torch-tensorrt": Target(TorchTensorRtEmitter(), ("torch_tensorrt",), check=check_machine),
    "tvm": Target(TvmEmitter(), ("apache-tvm",)),
}

TARGETS = Extensible(_OWN, "enginewright.targets", Target)
"""By the names of recipes and bundles; those of other packages come last."""


def check_storages(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming the GPU that lacks a format of the recipe.

    GPUs that engines can't be built for at all are refused here, too.
    """
    asked = dict(_asked(recipe))
    for target in (TARGETS[name] for name in targets):
        if target.gpus:
            engines = recipe.engines or EnginesSection()
            gpus = engines.gpus or target.gpus
            target.check_gpus(gpus)
            needed = [storage for storage in target.instructions if storage in asked]
            caches = [name for name in target.cache_instructions if name == recipe.kv_cache.dtype]
            check_formats(gpus, (engines.dtype or target.floats, *needed, *caches))


def check_cache(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raises TargetError naming the target that lacks the KV cache that the recipe names.

    A recipe that leaves it open, or says f32, goes with all: they store keys and values as they compute them.
    """
    dtype = recipe.kv_cache.dtype
    engines = recipe.engines or EnginesSection()
    lacking = [name for name in targets if not (TARGETS[name].narrow_caches or dtype in TARGETS[name].caches(engines))]
    if lacking and dtype not in (None, "f32"):
        why = ""
        if dtype in _SCALED and lacking[0] == "tensorrt-rtx":
            why = ": engines of the whole model have none; segments do (form in [engines])"
        if dtype in _SCALED and lacking[0] == "tensorrt":
            why = ': writes that are "ordered" have none (caches in [engines])'
        raise TargetError(
            f"target {lacking[0]}: it has no KV cache of {dtype}, which recipe {recipe.name} asks for (kv_cache.dtype)"
            + why,
            hint="Leave dtype out of [kv_cache], or --kv-cache out, for it; --target cpu has such a cache.",
        )


def _asked(recipe: Recipe) -> Iterable[tuple[Storage, str]]:
    """Every storage of weights that the recipe names, with its key; of several keys the plainest comes last."""
    weights = recipe.weights
    for i, candidate in enumerate(recipe.auto.candidates if recipe.auto is not None else ()):
        yield candidate.storage, f"auto.candidates.{i}"
    for i, override in enumerate(weights.overrides):
        yield override.format.storage, f"weights.overrides.{i}.format"
    if weights.embeddings is not None:
        yield weights.embeddings.storage, "weights.embeddings"
    yield weights.default.storage, "weights.default"
