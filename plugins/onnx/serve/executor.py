"""The executor of the onnx target, which runs a file of ONNX operators in the linear form by onnxruntime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from enginewright.plugins.doctor.checks import gpu_problem
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.memory import default_budget

from ...gpu.cuda_driver import Cuda, cache_budget, load_cuda
from ...steps.linear_io import LinearIo, linear_io
from ...steps.slot_executor import SlotExecutor
from ...steps.slot_steps import SlotSteps
from ..kernels.library import find_operators, operators_library
from .session import PROVIDERS, find_provider, load_onnxruntime, open_session
from .slot_caches import SlotCaches

FREE_SHARE = 0.5
"""The caches' default share of the GPU memory that weights leave. onnxruntime uses the rest as steps need it."""


def device_budget(bundle: Bundle, target: str, provider: str, variant: str | None = None) -> int:
    """Returns the default bytes for the caches, from the free memory of the provider's device.

    Raises RequestError for an unknown provider, TargetError if its driver is missing, CapacityError if no memory is
    left.
    """
    known = PROVIDERS.get(provider)
    if known is None or known.device != "cuda":
        return default_budget()
    cuda = load_cuda()
    if (problem := gpu_problem(cuda.gpus, "the driver shows none", ())) is not None:
        raise problem.error()
    with ThreadPoolExecutor(1) as thread:  # a device belongs to the thread that opened it
        free = thread.submit(_free_bytes, cuda).result()
    variant = variant_io(bundle, target, provider, variant).variant
    if variant in ("f16", "bf16"):
        weights = sum(t.bytes for name, t in bundle.index.tensors.items() if f".onnx.{variant}" in name)
    else:
        stored = bundle.index.stored_once().items()
        weights = sum(t.bytes for name, t in stored if ".onnx" in name and not NARROW_WEIGHT.search(name))
    return cache_budget(cuda.gpus[0].name, free, "the weights", weights, FREE_SHARE)


def _free_bytes(cuda: Cuda) -> int:
    with closing(cuda.open(cuda.gpus[0])) as device:
        return device.free_bytes()


NARROW_WEIGHT = re.compile(r"\.onnx\.(b?f16)")
"""The pattern of the names of weights in the 16-bit variant."""


class OnnxExecutor(SlotExecutor):
    """The executor of the onnx target. Its blocks are slots, and a step has either prompts or decodes.

    The decodes of a step run together if their slots are near each other. Prompts run one by one, or padded together if
    little padding is needed.

    Args:
        bundle: a bundle with a ready target of the linear form.
        blocks: the number of slots to allocate for each cache group, the same for all.
        capacity: the positions of a slot (C); unused rows write to the last one. See ``slot_capacity``.
        threads: the number of threads of the kernels on the CPU; 0 means one for each core.
        provider: one of ``session.PROVIDERS``.
        target: the target's name.
        variant: the variant of the target's file; None means the fastest for the provider.

    Raises:
        BundleError: the bundle has no such target or variant, or its file is damaged.
        MissingDependencyError: onnxruntime, the provider or the variant's library is missing, or too old.
        CapacityError: there isn't enough memory for the slots.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        capacity: int,
        *,
        threads: int = 0,
        provider: str = "cpu",
        target: str = "onnx",
        variant: str | None = None,
    ) -> None:
        io = variant_io(bundle, target, provider, variant)
        super().__init__(bundle, target, blocks, slot_groups(io, capacity), threads)
        self._variant = io.variant
        self._module = load_onnxruntime(io.onnxruntime)
        self._provider = find_provider(provider, self._module)
        if io.file not in bundle.files:
            raise BundleError(
                f"{bundle.path / io.file} is not listed in manifest.json", hint="Export the bundle again."
            )
        path = bundle.path / io.file
        self._caches = SlotCaches(
            open_session(
                path,
                self._provider,
                self._threads,
                self._module,
                io.accuracy_level,
                operators_library() if io.variant == "kernels" else None,
            ),
            io,
            path,
            slots=self._count,
            capacity=capacity,
            vocab=bundle.model.vocab_size,
            device=self._provider.device,
            module=self._module,
        )
        together = io.variant not in ("contrib", "kernels")
        self._steps = SlotSteps(self._caches, self.cache_groups, self._count, self._threads, chunks_together=together)

    def describe(self) -> dict[str, str | int]:
        return {
            "target": self._target,
            "onnxruntime": str(self._module.__version__),
            "provider": self._provider.full_name,
            "variant": self._variant,
            "threads": self._threads,
        }


def variant_io(bundle: Bundle, target: str, provider: str, variant: str | None) -> LinearIo:
    """Returns the target's section for the variant to run. None chooses the fastest: our kernels on a CPU, 16 bits with
    CUDA.

    Raises BundleError if the target has no such variant.
    """
    io = linear_io(bundle, target)
    if variant is None:
        variant = io.fastest(operators=find_operators() is not None) if provider == "cpu" else io.variant
        variant = io.narrow.dtype if provider == "cuda" and io.narrow is not None else variant
    if variant not in io.variants:
        raise BundleError(
            f"{bundle.path}: target {target!r} has no variant {variant!r}; it has {', '.join(io.variants)}",
            hint="Leave the variant out, or export the bundle with it.",
        )
    return io.of_variant(variant)


def slot_capacity(context: int) -> int:
    """Returns the positions that a slot needs for requests of up to ``context`` tokens."""
    return context + 1


def slot_groups(io: LinearIo, capacity: int) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of the file, with slots of ``capacity`` positions as their blocks."""
    return tuple(group.to_group(capacity) for group in io.cache_groups)
