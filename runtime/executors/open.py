"""Chooses the target of a bundle to run, and opens its executor with a KV cache that fits into the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from ..bundle.reader import DECODE, Bundle, Load
from ..bundle.trust import require_trust
from ..kv_cache.kinds.base import numbers_found_as
from ..kv_cache.kinds.table import cache_block_bytes, kind_of
from ..kv_cache.pool_plan import PoolPlan, enough_for_windows, plan_offload, plan_pools
from ..scheduler.limits import SchedulerConfig
from ..shared.contracts import CacheGroup
from ..shared.errors import BundleError, CapacityError, RequestError, shown
from ..shared.targets import OWN, Halves
from .base import Executor
from .static_shapes import StaticShapes, padding_blocks
from .target import ExecutorArguments, Opening, Placement, ServedTarget

LEAST_CONTEXT = 2
"""The fewest tokens of a request: one token of the prompt and one new token."""


TARGETS = Halves("serve.target", ServedTarget)
"""The serving half of each target, by name, in the order in which targets are shown to users."""


def running() -> tuple[str, ...]:
    """Returns the names of Enginewright's targets that this installation can run, in order of preference."""
    return tuple(name for name in OWN if runs_here(name))


def runs_here(name: str) -> bool:
    """Returns True if this installation can run the target ``name``, on a machine that meets its requirements."""
    return name in TARGETS and TARGETS[name].opening is not None


def exact_targets(bundle: Bundle) -> frozenset[str]:
    """Returns the names of a bundle's targets on which a request's tokens depend only on the request."""
    return frozenset(name for name in _ready(bundle) if _opening(name).exact(bundle, name))


def takes(name: str, field: str) -> bool:
    """Returns True if the target ``name`` uses the field ``field`` of `Placement`."""
    return runs_here(name) and field in _opening(name).takes


def carried_code(target: str) -> str | None:
    """Returns the kind of code that a bundle contains for a target, in the plural; None if it contains data only."""
    return TARGETS[target].carries if target in TARGETS else None


def _opening(name: str) -> Opening:
    opening = TARGETS[name].opening
    assert opening is not None  # choose_target has seen to it
    return opening


def choose_target(bundle: Bundle, target: str | None) -> str:
    """Returns the target to run: ``target``, or the first ready one of `running()` whose code is trusted if it is None.

    Raises BundleError if it isn't ready or can't run here; TrustError if it contains code and the bundle isn't trusted.
    """
    if target is None:
        ready = _ready(bundle)
        may = ready if bundle.trust is not None else [name for name in ready if carried_code(name) is None]
        target = next(iter(may or ready), None) or next(iter(bundle.targets), next(iter(OWN)))
    bundle.target(target)
    if not runs_here(target):
        raise BundleError(
            f"{bundle.path}: this Enginewright can't run target {target!r}",
            hint=f"Use target {' or '.join(running())}.",
        )
    check_code(bundle, target)
    return target


def check_code(bundle: Bundle, target: str) -> None:
    """Raises TrustError if a target carries code, and the bundle isn't trusted; see ``trust.require_trust``."""
    code = carried_code(target)
    others = () if code is None else tuple(name for name in _ready(bundle) if carried_code(name) is None)
    require_trust(bundle, target, code, others)


def _ready(bundle: Bundle) -> list[str]:
    """Returns the bundle's targets that are ready and can run here. Packages of other targets aren't imported."""
    ready = [name for name in OWN if name in bundle.targets and bundle.targets[name].state == "ready"]
    return [name for name in ready if runs_here(name)]


def variants_of(bundle: Bundle, target: str) -> tuple[str | None, ...]:
    """Returns the values of ``Placement.variant`` for a target; None alone without variants. Raises BundleError."""
    return _opening(target).variants(bundle, target)


def context_of(bundle: Bundle, context: int | None, target: str | None = None) -> int:
    """Returns the most tokens of a request: ``context``, by default the context of the model or of the target's
    engines.

    Raises CapacityError if ``context`` is more than that default, and RequestError if it is less than `LEAST_CONTEXT`.
    """
    most, maker = bundle.model.context_length, "the bundle was"
    if target is not None and (target_context := _opening(target).most_context(bundle, target)) < most:
        most, maker = target_context, f"the engines of target {target!r} were"
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
    """Returns the cache groups of a target, for requests of up to ``context`` tokens. Raises BundleError."""
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
    entry: str = DECODE,
) -> Executor:
    """Opens the executor of a target.

    Args:
        bundle: the bundle.
        target: a target that `choose_target` returned.
        blocks: number of blocks to allocate for each cache group.
        context: the most tokens of a request.
        placement: the resources to run on.
        entry: name of the bundle's program to run.

    Raises:
        BundleError, CapacityError, MissingDependencyError, TargetError: the executor can't be opened.
        TrustError: the target contains code, and the bundle isn't trusted.
        RequestError: ``placement`` has a value that the target doesn't support.
    """
    check_code(bundle, target)
    if placement.load not in get_args(Load):
        raise RequestError(f"load: {shown(placement.load)} isn't a way to load weights", hint='It is "map" or "read".')
    for field in ("isa", "provider", "variant", "load", "partition", "ray", "offload"):
        value = getattr(placement, field)
        if value != getattr(Placement(), field) and field not in _opening(target).takes:
            owners = " or ".join(repr(name) for name in running() if field in _opening(name).takes)
            value = str(value) if field == "partition" else repr(getattr(value, "folder", value))
            name = "offload_folder" if field == "offload" else field
            raise RequestError(f"{name}: {value} is for target {owners}, not {target!r}", hint="Leave it out.")
    if entry != DECODE and not _opening(target).entries:
        raise RequestError(f"entry: target {target!r} opens {DECODE!r} alone, not {entry!r}", hint="Leave it out.")
    return _opening(target).make(ExecutorArguments(bundle, target, blocks, context, placement, entry))


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
    """Opens an executor as `make_executor` does, with as many blocks as fit into ``memory`` and requests can use.

    Args:
        config: the limits of the scheduler.
        memory: bytes for the KV cache; None takes a quarter of the free memory, or on a GPU most of the memory that the
            weights leave.
        buckets: True to run steps in the fixed sizes of the bundle's buckets, if the target has any.

    Raises CapacityError if not even one block fits, and the errors of `make_executor`.
    """
    groups = target_groups(bundle, target, context, placement)
    sizes = bundle.buckets.get(target) if buckets else None
    padding = padding_blocks(sizes, groups) if sizes is not None else {g.name: 0 for g in groups}
    reserved = sum(cache_block_bytes(g) * padding[g.name] for g in groups)
    slots = _opening(target).slots(bundle, target)
    longest = groups[0].block_size if slots else context
    step_tokens = max(config.prefill_tokens, sizes.most_tokens if sizes is not None else 0)
    gives_back = _opening(target).gives_back and not slots
    owners = placement.partition.owners
    if owners > 1 and any(kind_of(group).fixed for group in groups):
        raise RequestError(
            f"partition: {placement.partition}: keys are divided by tokens, and states of recurrent layers can't be",
            hint="Divide the model by tensor=N or pipeline=N.",
        )
    if config.states_memory is not None and not numbers_found_as("copies", map(kind_of, groups)):
        raise RequestError("states_memory: the model has no recurrent layers", hint="Leave it out.")
    limits = config.max_requests, step_tokens, owners, config.states_memory
    enough = enough_for_windows(groups, *limits) if gives_back else {}
    budget = _default_memory(bundle, target, placement, context) if memory is None else memory
    if placement.offload is None or "offload" not in _opening(target).takes:
        plan = plan_pools(groups, budget, config.max_requests * longest, reserved, enough, owners)
    else:
        plan, placement = _offloaded(bundle, target, groups, placement, config, budget, longest, enough)
    blocks = {name: count + padding[name] for name, count in plan.blocks.items()}
    executor = make_executor(bundle, target, blocks, context, placement)
    return executor if sizes is None else StaticShapes(executor, sizes)


def _offloaded(
    bundle: Bundle,
    target: str,
    groups: tuple[CacheGroup, ...],
    placement: Placement,
    config: SchedulerConfig,
    budget: int,
    longest: int,
    enough: Mapping[str, int],
) -> tuple[PoolPlan, Placement]:
    offload = placement.offload
    assert offload is not None
    if placement.partition.ranks > 1:
        raise RequestError("offload_folder: several ranks keep all blocks in memory", hint="Leave one of the two out.")
    some = _opening(target).offloadable(bundle, target, config.prefill_tokens, config.max_requests)
    if not some:
        raise RequestError(
            "offload_folder: the layers of this bundle look at all keys in each step",
            hint="Leave it out, or export the model with a recipe that has [adaptive_context].",
        )
    plan, slots = plan_offload(groups, budget, offload.size, config.max_requests * longest, some, enough)
    return plan, replace(placement, offload=replace(offload, slots=slots))


def _default_memory(bundle: Bundle, target: str, placement: Placement, context: int) -> int:
    opening = _opening(target)
    if opening.memory_of is None:
        return opening.memory(bundle, target)
    return opening.memory_of(bundle, target, placement, context)
