"""The serving half of a target: what it carries, and how it is opened. Its package has it in ``serve/target.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..bundle.reader import DECODE, Bundle, Load
from ..kv_cache.pool_plan import Offloadable
from ..ranks.partition import Partition
from ..shared.contracts import CacheGroup
from ..shared.memory import default_budget
from .base import Executor


@dataclass(frozen=True)
class Offload:
    """The place of blocks that no layer needs at the moment; see ``plugins/native/offload.h``.

    Attributes:
        folder: the user's own, for a file without a name.
        size: bytes that it may have at most.
        slots: cache group -> blocks that there is memory for, once that is planned.
    """

    folder: str
    size: int
    slots: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """The resources that a target runs on.

    Attributes:
        threads: of kernels on the CPU; 0 takes as many as there are cores.
        isa: the cpu target's instruction set; None takes the best there is.
        provider: the onnx target's execution provider; None takes "cpu".
        variant: one of ``variants_of``; None takes the fastest that there is for the provider.
        load: of the cpu target's weights.
        partition: the ranks that a target runs on: processes, each with a part of the model. Of the cpu target each has
            ``threads`` of its own; 0 shares the cores out.
        rank_timeout: seconds without progress after which a rank counts as lost.
        ray: the address of a Ray cluster on whose machines the ranks are; None: all are on this one.
        offload: the folder that blocks are offloaded to; None: all are in memory.
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


@dataclass(frozen=True)
class ExecutorArguments:
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


@dataclass(frozen=True)
class Opening:
    """The way to open a target. Its requirements are imported only then.

    Attributes:
        make: the executor.
        groups: cache groups for requests of up to so many tokens.
        most_context: tokens that a request may have at most, if that is fewer than the model has.
        memory: bytes for the caches by default.
        memory_of, groups_of: the same where it hangs on what the target runs on; None: on nothing. The former hangs on
            the context too.
        slots: whether a request takes a block of its whole context.
        gives_back: whether its executor takes shared blocks (see ``ExecutorCaps``), where requests take blocks.
        takes: fields of ``Placement`` that mean something to it, apart from ``threads``.
        variants: what ``Placement.variant`` may be.
        offloadable: of a target, its cache groups of which some blocks may wait on a disk, in steps of so many tokens
            and requests.
        entries: whether its executor opens any entry of a bundle; others open ``decode`` alone.
        exact: whether a request's tokens are the same alone and in any batch, and from a cache or fresh.
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
    exact: bool = False


@dataclass(frozen=True)
class ServedTarget:
    """The serving half of a target; the compiler's is ``plugins.emit.target.Target``.

    Attributes:
        opening: how the runtime opens it; None if other programs run it.
        carries: what code a bundle has for it, in the plural; None: none, its files are data. A target that carries
            code is opened only where the caller trusts the bundle.
    """

    opening: Opening | None = None
    carries: str | None = "programs"
