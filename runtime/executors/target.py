"""The serving half of a target: how its executor is opened. Each target's package defines it in ``serve/target.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ..bundle.reader import DECODE, Bundle, Load
from ..kv_cache.pool_plan import Offloadable
from ..ranks.partition import Partition
from ..shared.contracts import CacheGroup
from ..shared.memory import default_budget
from .base import Executor


@dataclass(frozen=True)
class Offload:
    """The file for KV blocks that no layer reads at the moment; ``plugins/native/offload.h`` describes it.

    Attributes:
        folder: folder of the user, in which a file without a name is made.
        size: the most bytes of the file.
        slots: number of blocks in memory for each cache group; empty until it is planned.
    """

    folder: str
    size: int
    slots: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """The resources that a target runs on.

    Attributes:
        threads: threads of the kernels on the CPU; 0 takes one for each core.
        isa: instruction set of the cpu target; None takes the best one that the processor has.
        provider: execution provider of the onnx target; None takes "cpu".
        variant: one of `variants_of`; None takes the fastest for the provider.
        load: "map" or "read", the way the cpu target loads weights.
        partition: the ranks that a target runs on: processes with a part of the model each. On the cpu target, each
            rank has ``threads`` threads; 0 divides the cores among them.
        rank_timeout: seconds without progress after which a rank counts as lost.
        ray: address of a Ray cluster whose machines run the ranks; None runs all ranks on this machine.
        offload: the file for KV blocks outside memory; None keeps all blocks in memory.
    """

    threads: int = 0
    isa: str | None = None
    provider: str | None = None
    variant: str | None = None
    load: Load = "map"
    partition: Partition = field(default_factory=Partition)
    rank_timeout: float = 30.0
    ray: str | None = None
    offload: Offload | None = None


class ExecutorArguments(msgspec.Struct, frozen=True):
    """The arguments of ``make_executor``."""

    bundle: Bundle
    target: str
    blocks: Mapping[str, int]
    context: int
    placement: Placement
    entry: str = DECODE


def program_groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of a target's lowered program."""
    return bundle.program(target).cache_groups


class Opening(msgspec.Struct, frozen=True):
    """The functions that open a target. The packages that the target needs are imported only when they are called.

    Attributes:
        make: opens the executor.
        groups: returns the cache groups for requests of up to a number of tokens.
        most_context: returns the most tokens of a request, if the target has a limit below the model's.
        memory: returns the default number of bytes for the KV cache.
        memory_of: replaces ``memory`` if the number depends on the placement and the context.
        groups_of: replaces ``groups`` if the groups depend on the placement.
        slots: returns True if each request has one block with room for its whole context.
        gives_back: True if requests may release blocks while they run, such as those before a sliding window. Then the
            pool of a window is only as large as the windows of all requests.
        takes: fields of `Placement` that the target uses, apart from ``threads``.
        variants: returns the possible values of ``Placement.variant``.
        offloadable: returns the part of each cache group that may be moved to a disk, given the most tokens and the
            most requests of a step.
        entries: True if the executor runs any program of a bundle; False if it runs "decode" alone.
        exact: returns True if a request's tokens are the same alone and in any batch, with a cached prefix and without.
    """

    make: Callable[[ExecutorArguments], Executor]
    groups: Callable[[Bundle, str, int], tuple[CacheGroup, ...]] = program_groups
    most_context: Callable[[Bundle, str], int] = lambda bundle, target: bundle.model.context_length
    memory: Callable[[Bundle, str], int] = lambda bundle, target: default_budget()
    memory_of: Callable[[Bundle, str, Placement, int], int] | None = None
    groups_of: Callable[[Bundle, str, int, Placement], tuple[CacheGroup, ...]] | None = None
    slots: Callable[[Bundle, str], bool] = lambda bundle, target: False
    gives_back: bool = False
    takes: tuple[str, ...] = ()
    offloadable: Callable[[Bundle, str, int, int], Mapping[str, Offloadable]] = lambda *asked: {}
    variants: Callable[[Bundle, str], tuple[str | None, ...]] = lambda bundle, target: (None,)
    entries: bool = False
    exact: Callable[[Bundle, str], bool] = lambda bundle, target: False


class ServedTarget(msgspec.Struct, frozen=True):
    """The serving half of a target; ``plugins.emit.target.Target`` is the compiling half.

    Attributes:
        opening: the functions that open the target; None if other programs run it.
        carries: kind of code that a bundle contains for the target, in the plural; None if its files are data. A target
            with code is opened only if the caller trusts the bundle.
    """

    opening: Opening | None = None
    carries: str | None = "programs"
