"""Which of a bundle's targets runs, and its executor with a cache that fits into a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.steps.linear_io import LinearIo, Variant

from ..bundle.buckets import BucketPlan
from ..bundle.reader import Bundle, Load
from ..bundle.trust import require_trust
from ..kv_cache.cache_groups import default_budget, enough_for_windows, plan_pools
from ..scheduler.limits import SchedulerConfig
from ..shared.contracts import CacheGroup
from ..shared.errors import BundleError, CapacityError, RequestError
from ..shared.extensions import Extensible
from .base import Executor
from .requirements import (
    Check,
    check_cpu,
    check_cuda,
    check_onnx,
    check_stablehlo,
    check_tensorrt,
    check_torch_tensorrt,
    check_tvm,
)
from .static_shapes import StaticShapes, padding_blocks

LEAST_CONTEXT = 2
"""A prompt of one token, and one more."""


@dataclass(frozen=True)
class Placement:
    """What a target runs on.

    Attributes:
        threads: of kernels on the CPU; 0 takes as many as there are cores.
        isa: the cpu target's instruction set; None takes the best there is.
        provider: the onnx target's execution provider; None takes "cpu".
        variant: of the onnx target's file; None takes the fastest that there is for the provider.
        load: of the cpu target's weights.
    """

    threads: int = 0
    isa: str | None = None
    provider: str | None = None
    variant: Variant | None = None
    load: Load = "map"


@dataclass(frozen=True)
class Asked:
    """What an executor is made for: see ``make_executor``."""

    bundle: Bundle
    target: str
    blocks: Mapping[str, int]
    context: int
    placement: Placement
    plan: BucketPlan | None


@dataclass(frozen=True)
class Opening:
    """How a target is opened. What it needs is imported when it is.

    Attributes:
        groups: cache groups for requests of up to so many tokens.
        make: the executor.
        most_context: tokens that a request may have at most, if that is fewer than the model has.
        memory: bytes for the caches by default.
        memory_of, groups_of: the same where it hangs on what the target runs on; None: on nothing. The former hangs on
            the context too.
        slots: whether a request takes a block of its whole context.
        gives_back: whether its executor takes shared blocks (see ``ExecutorCaps``), where requests take blocks.
        takes: fields of ``Placement`` that mean something to it, apart from ``threads``.
    """

    groups: Callable[[Bundle, str, int], tuple[CacheGroup, ...]]
    make: Callable[[Asked], Executor]
    most_context: Callable[[Bundle, str], int] = lambda bundle, target: bundle.model.context_length
    memory: Callable[[Bundle, str], int] = lambda bundle, target: default_budget()
    memory_of: Callable[[Bundle, str, Placement, int], int] | None = None
    groups_of: Callable[[Bundle, str, int, Placement], tuple[CacheGroup, ...]] | None = None
    slots: Callable[[Bundle, str], bool] = lambda bundle, target: False
    gives_back: bool = False
    takes: tuple[str, ...] = ()


def _program_groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    return tuple(g.to_group() for g in bundle.program(target).cache_groups)


def _make_cpu(asked: Asked) -> Executor:
    from .cpu_blocks import CpuExecutor

    placement = asked.placement
    return CpuExecutor(
        asked.bundle,
        asked.blocks,
        threads=placement.threads,
        isa=placement.isa,
        plan=asked.plan,
        load=placement.load,
    )


def _onnx_groups(
    bundle: Bundle, target: str, context: int, placement: Placement = Placement()
) -> tuple[CacheGroup, ...]:
    from .onnx_slots import slot_capacity, slot_groups, variant_io

    io = variant_io(bundle, target, placement.provider or "cpu", placement.variant)
    return slot_groups(io, slot_capacity(context))


def _make_onnx(asked: Asked) -> Executor:
    from .onnx_slots import OnnxExecutor, slot_capacity

    return OnnxExecutor(
        asked.bundle,
        asked.blocks,
        slot_capacity(asked.context),
        threads=asked.placement.threads,
        provider=asked.placement.provider or "cpu",
        target=asked.target,
        variant=asked.placement.variant,
    )


def _onnx_memory(bundle: Bundle, target: str, placement: Placement, context: int) -> int:
    from .onnx_slots import device_budget

    return device_budget(bundle, target, placement.provider or "cpu", placement.variant)


def _has_slots(bundle: Bundle, target: str) -> bool:
    section = bundle.target(target).section(TensorRtSection)
    return section is not None and section.form == "whole" and section.paged is None


def _engine_groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    from .tensorrt_blocks import packed_groups
    from .tensorrt_slots import slot_groups_of

    return slot_groups_of(bundle, target) if _has_slots(bundle, target) else packed_groups(bundle, target)


def _engine_context(bundle: Bundle, target: str) -> int:
    from .tensorrt_blocks import packed_context
    from .tensorrt_slots import slot_capacity_of

    return slot_capacity_of(bundle, target) - 1 if _has_slots(bundle, target) else packed_context(bundle, target)


def _gpu_budget(bundle: Bundle, target: str) -> int:
    from .tensorrt_slots import gpu_budget

    return gpu_budget(bundle, target)


def _make_engine(asked: Asked) -> Executor:
    from .tensorrt_blocks import PackedExecutor
    from .tensorrt_slots import TensorRtExecutor

    bundle, target, threads = asked.bundle, asked.target, asked.placement.threads
    if _has_slots(bundle, target):
        return TensorRtExecutor(bundle, asked.blocks, target=target, threads=threads)
    return PackedExecutor(bundle, asked.blocks, asked.context, target=target, threads=threads)


def _make_cuda(asked: Asked) -> Executor:
    from .cuda_blocks import CudaExecutor

    return CudaExecutor(asked.bundle, asked.blocks, asked.context, target=asked.target)


def _cuda_budget(bundle: Bundle, target: str, placement: Placement, context: int) -> int:
    from .cuda_blocks import cuda_budget

    return cuda_budget(bundle, target, context)


def _make_tvm(asked: Asked) -> Executor:
    from .tvm_blocks import TvmExecutor

    return TvmExecutor(asked.bundle, asked.blocks, threads=asked.placement.threads, target=asked.target)


def _stablehlo_groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    from .stablehlo_slots import slot_groups, stablehlo_section

    return slot_groups(stablehlo_section(bundle, target), context)


def _stablehlo_context(bundle: Bundle, target: str) -> int:
    from .stablehlo_slots import stablehlo_section

    return stablehlo_section(bundle, target).lengths[-1] - 1


def _make_stablehlo(asked: Asked) -> Executor:
    from .stablehlo_slots import StableHloExecutor

    placement = asked.placement
    return StableHloExecutor(
        asked.bundle,
        asked.blocks,
        asked.context,
        threads=placement.threads,
        provider=placement.provider,
        target=asked.target,
        load=placement.load,
    )


_CPU = Opening(_program_groups, _make_cpu, gives_back=True, takes=("isa", "load"))
_ONNX = Opening(
    _onnx_groups,
    _make_onnx,
    groups_of=_onnx_groups,
    memory_of=_onnx_memory,
    slots=lambda bundle, target: True,
    takes=("provider", "variant"),
)
_CUDA = Opening(_program_groups, _make_cuda, memory_of=_cuda_budget, gives_back=True)
_TVM = Opening(_program_groups, _make_tvm, gives_back=True)
_ENGINES = Opening(_engine_groups, _make_engine, _engine_context, memory=_gpu_budget, slots=_has_slots, gives_back=True)

_STABLEHLO = Opening(
    _stablehlo_groups,
    _make_stablehlo,
    most_context=_stablehlo_context,
    slots=lambda bundle, target: True,
    takes=("provider", "load"),
)


@dataclass(frozen=True)
class RuntimeTarget:
    """The runtime's half of a target; the compiler's is in ``optimizer/emit/targets.py``.

    Attributes:
        requirements: what it needs of a machine, for ``optimize doctor``.
        opening: how the runtime opens it; None if other programs run it.
        carries: what code a bundle has for it, in the plural; None: none, its files are data. A target that carries
            code is opened only where the caller trusts the bundle.
    """

    requirements: Check
    opening: Opening | None = None
    carries: str | None = "programs"


_OWN = {
    "cpu": RuntimeTarget(check_cpu, _CPU, None),
    "onnx": RuntimeTarget(check_onnx, _ONNX, None),
    "tensorrt-rtx": RuntimeTarget(check_tensorrt("rtx"), _ENGINES, "TensorRT engines"),
    "tensorrt": RuntimeTarget(check_tensorrt("tensorrt"), _ENGINES, "TensorRT engines and compiled kernels"),
    "cuda": RuntimeTarget(check_cuda, _CUDA, "compiled kernels"),
    "stablehlo": RuntimeTarget(check_stablehlo, _STABLEHLO, "modules that become machine code"),
    "torch-tensorrt": RuntimeTarget(check_torch_tensorrt, None, "programs"),
    "tvm": RuntimeTarget(check_tvm, _TVM, "compiled libraries"),
}

TARGETS = Extensible(_OWN, "enginewright.runtime_targets", RuntimeTarget)
"""All targets that there are, in the order in which they are shown; those of other packages come last."""

ORDER = tuple(name for name, target in _OWN.items() if target.opening is not None)
"""Targets that run here. By default it is the first of them that the bundle has."""


def runs_here(name: str) -> bool:
    """Whether the runtime can open a target of that name, on a machine that has what it needs."""
    return name in TARGETS and TARGETS[name].opening is not None


def takes(name: str, field: str) -> bool:
    """Whether a field of ``Placement`` means something to a target."""
    return runs_here(name) and field in _opening(name).takes


def carried_code(target: str) -> str | None:
    """What code a bundle has for a target, in the plural; None: none, or nothing here knows the target."""
    return TARGETS[target].carries if target in TARGETS else None


def _opening(name: str) -> Opening:
    opening = TARGETS[name].opening
    assert opening is not None  # choose_target has seen to it
    return opening


def choose_target(bundle: Bundle, target: str | None) -> str:
    """``target`` if it is ready and runs here; of None, the first of ``ORDER`` that does, and may.

    Raises BundleError; TrustError where the target carries code that may not run.
    """
    if target is None:
        ready = [name for name in ORDER if name in bundle.targets and bundle.targets[name].state == "ready"]
        may = ready if bundle.trust is not None else [name for name in ready if carried_code(name) is None]
        target = next(iter(may or ready), None) or next(iter(bundle.targets), ORDER[0])
    bundle.target(target)
    if not runs_here(target):
        raise BundleError(
            f"{bundle.path}: this Enginewright can't run target {target!r}", hint=f"Use target {' or '.join(ORDER)}."
        )
    check_code(bundle, target)
    return target


def check_code(bundle: Bundle, target: str) -> None:
    """Raises TrustError if a target carries code, and the bundle isn't trusted; see ``trust.require_trust``."""
    others = (name for name in ORDER if name in bundle.targets and bundle.targets[name].state == "ready")
    require_trust(bundle, target, carried_code(target), tuple(name for name in others if carried_code(name) is None))


def variants_of(bundle: Bundle, target: str) -> tuple[Variant | None, ...]:
    """What ``Placement.variant`` may be for a target; None alone where there are no two. Raises BundleError."""
    io = bundle.target(target).section(LinearIo)
    return io.variants if io is not None and len(io.variants) > 1 else (None,)


def context_of(bundle: Bundle, context: int | None, target: str | None = None) -> int:
    """Most tokens of a request: the context of the model, or of the target's engines, or less if that is asked for.

    Raises CapacityError if more is asked for, RequestError if it is too little for any request.
    """
    most, maker = bundle.model.context_length, "the bundle was"
    if target is not None and (own := _opening(target).most_context(bundle, target)) < most:
        most, maker = own, f"the engines of target {target!r} were"
    if context is None:
        return most
    if context > most:
        raise CapacityError(
            f"context: {context} tokens are more than the {most} that {maker} made for",
            hint=f"Ask for {most} or fewer, or export the model with a longer context.",
        )
    if context < min(LEAST_CONTEXT, most):
        raise RequestError(f"context: {context} is out of range", hint=f"It must be from {LEAST_CONTEXT} to {most}.")
    return context


def target_groups(
    bundle: Bundle, target: str, context: int, placement: Placement = Placement()
) -> tuple[CacheGroup, ...]:
    """The cache groups of a target, for requests of up to ``context`` tokens. Raises BundleError."""
    opening = _opening(target)
    if opening.groups_of is not None:
        return opening.groups_of(bundle, target, context, placement)
    return opening.groups(bundle, target, context)


def make_executor(
    bundle: Bundle,
    target: str,
    blocks: Mapping[str, int],
    context: int,
    placement: Placement = Placement(),
    plan: BucketPlan | None = None,
) -> Executor:
    """The executor of a target that ``choose_target`` gave, with so many blocks, for ``context`` tokens of a request.

    ``plan``: the target's buckets, if its steps will have their sizes; the cpu target has a program for each.

    Raises:
        BundleError, CapacityError, MissingDependencyError, TargetError: what the executor raises.
        TrustError: the target carries code that may not run.
        RequestError: ``placement`` names what the target doesn't have.
    """
    check_code(bundle, target)
    if placement.load not in get_args(Load):
        raise RequestError(f"load: {placement.load!r} isn't a way to load weights", hint='It is "map" or "read".')
    for field in ("isa", "provider", "variant", "load"):
        said = getattr(placement, field)
        if said != getattr(Placement(), field) and field not in _opening(target).takes:
            owners = " or ".join(repr(name) for name in ORDER if field in _opening(name).takes)
            raise RequestError(f"{field}: {said!r} is for target {owners}, not {target!r}", hint="Leave it out.")
    return _opening(target).make(Asked(bundle, target, blocks, context, placement, plan))


def open_executor(
    bundle: Bundle,
    target: str,
    context: int,
    placement: Placement,
    config: SchedulerConfig,
    *,
    memory: int | None,
    buckets: bool,
) -> Executor:
    """As ``make_executor``, with as many blocks as ``memory`` bytes hold, and no more than a scheduler's requests need.

    ``memory``: None takes a quarter of what is free, or on a GPU most of what the weights leave there.
    ``buckets``: where the target has sizes of steps, its steps have those.

    Raises CapacityError if the memory holds no block, and what ``make_executor`` raises.
    """
    groups = target_groups(bundle, target, context, placement)
    sizes = bundle.buckets.get(target) if buckets else None
    padding = padding_blocks(sizes, groups) if sizes is not None else {g.name: 0 for g in groups}
    reserved = sum(g.bytes_per_block * padding[g.name] for g in groups)
    slots = _opening(target).slots(bundle, target)
    longest = groups[0].block_size if slots else context
    step_tokens = max(config.prefill_tokens, sizes.most_tokens if sizes is not None else 0)
    gives_back = _opening(target).gives_back and not slots
    enough = enough_for_windows(groups, config.max_requests, step_tokens) if gives_back else {}
    budget = _default_memory(bundle, target, placement, context) if memory is None else memory
    plan = plan_pools(groups, budget, config.max_requests * longest, reserved, enough)
    blocks = {name: count + padding[name] for name, count in plan.blocks.items()}
    executor = make_executor(bundle, target, blocks, context, placement, sizes)
    return executor if sizes is None else StaticShapes(executor, sizes)


def _default_memory(bundle: Bundle, target: str, placement: Placement, context: int) -> int:
    opening = _opening(target)
    if opening.memory_of is None:
        return opening.memory(bundle, target)
    return opening.memory_of(bundle, target, placement, context)
