"""The base classes of kinds of partitions: rules for the axes of ops, division of caches, collectives, their cost.

``LayerKind`` divides the work of each layer among ranks, ``StepKind`` the steps among stages of ranks. A new kind is a
module here and a row of ``KINDS`` in ``table``: partitions as users write them, ``optimize plan`` and the core
(``runtime/ranks/cut.py``) ask the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...shared.errors import RequestError
from ...shared.lowered_program import Buffer, LoweredProgram, Operand, Step
from .views import Slice


@dataclass(frozen=True)
class Axis:
    """The axis along which a step can be cut.

    Attributes:
        count: indices along it.
        inputs, outputs: the part of each operand that goes with some indices; None is needed whole.
        unit: indices that are computed together, as weights are stored in panels.
    """

    count: int
    inputs: tuple[Slice | None, ...]
    outputs: tuple[Slice | None, ...]
    unit: int = 1


Rule = Callable[[Step], Axis | None]
"""Returns the axis along which a step of an op is cut; None if every rank computes it whole."""


@dataclass
class Heads:
    """Query heads, and the key/value heads that they read, by rank.

    Attributes:
        group: query heads of a key/value head.
        query: the first query head of each rank, and the number of all.
        key_value: the key/value heads that each rank's cache has, from the first to behind the last.
    """

    group: int
    query: tuple[int, ...]
    key_value: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Stage:
    """The steps of one stage, what it gets from the one before, and what it hands on."""

    program: LoweredProgram
    received: tuple[Operand, ...] = ()
    sent: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Place:
    """One stage's place among the ranks."""

    stage: int
    stages: int
    count: int

    @property
    def first(self) -> int:
        """Its first rank."""
        return (self.stages - 1 - self.stage) * self.count

    @property
    def region(self) -> int:
        """The number of the memory region that its ranks share."""
        return 1 + self.stage


class Arrivals(NamedTuple):
    """The rows that a rank receives in a collective.

    Attributes:
        meeting: the ranks that wait for each other.
        row_bytes: bytes of a row that each of the ranks gives.
    """

    meeting: Sequence[int]
    row_bytes: Mapping[int, float]


class PartitionKind(ABC):
    """A way to share a model among ranks.

    Attributes:
        name: as partitions are written: ``tensor`` in "tensor=2".
        collectives: the ops by which its ranks exchange values.
        alike: the name of the kind that cuts weights in the same way; "" if none does.
        combines: False if it doesn't go together with another kind.
        unplanned: the reason why ``optimize plan`` doesn't plan it; "" if it does.
        owns_blocks: True if each block of a KV cache is one rank's.
        in_flight: True if as many steps are in flight as it has ranks.
    """

    name: ClassVar[str]
    collectives: ClassVar[tuple[str, ...]] = ()
    alike: ClassVar[str] = ""
    combines: ClassVar[bool] = True
    unplanned: ClassVar[str] = ""
    owns_blocks: ClassVar[bool] = False
    in_flight: ClassVar[bool] = False

    def check(self, partition: str, ranks: int, count: int) -> None:
        """Raises RequestError if ``count`` of the ``ranks`` of a partition are of this kind, and it has to be alone."""
        if not self.combines and 1 < count < ranks:
            same = f", which cuts weights as {self.alike}={ranks} does" if self.alike else ""
            raise RequestError(
                f"partition: {partition}: {self.name} doesn't go together with another way to cut a model",
                hint=f"Use {self.name}={ranks}{same}.",
            )

    def arrivals(self, step: Step, ranks: range, rank: int, element: Callable[[Operand], float]) -> Arrivals | None:
        """Returns what a rank gets in one of ``collectives``, for ``optimize plan``; None if it only gives.

        Args:
            ranks: those of its stage.
            element: the bytes of an element of an operand on the link.
        """
        return None


class LayerKind(PartitionKind):
    """Divides each layer. The default divides nothing: every rank computes every step, with a whole cache.

    Attributes:
        rules: an op -> its rule; an op that isn't there is computed whole by every rank.
        repeated: ops with a rule of which every rank computes all indices all the same.
        divides_experts: True if each rank has some of the experts.
    """

    rules: ClassVar[Mapping[str, Rule]] = {}
    repeated: ClassVar[frozenset[str]] = frozenset()
    divides_experts: ClassVar[bool] = False

    def heads(self, step: Step, have: int, ranks: int) -> Heads:
        """Returns the heads of each rank in an attention over ``have`` key/value heads. Raises RequestError."""
        queries = step.inputs[0].shape[1].constant
        return Heads(queries // have, (0,) * ranks + (queries,), ((0, have),) * ranks)

    def cache_attrs(self, rank: int, ranks: int) -> dict[str, Any]:
        """Returns the attributes of a step that writes to a rank's cache, beside its own."""
        return {}

    def attention(self, heads: Heads, first: int, rank: int, ranks: int) -> tuple[str, dict[str, Any]]:
        """Returns the op, and attributes, of a rank's attention that begins with query head ``first``."""
        return "paged_attention", {}


class StepKind(PartitionKind):
    """Divides the steps into stages, one behind the other."""

    @abstractmethod
    def stages(self, program: LoweredProgram, count: int) -> list[Stage]:
        """Returns the stages, the first layers first. Raises RequestError if there are more than places to cut at."""

    @abstractmethod
    def receive(self, stage: Stage, place: Place) -> tuple[Step, list[Buffer]] | None:
        """Returns the step that takes what the stage before hands on, and the buffers between; None at the first."""

    @abstractmethod
    def send(self, stage: Stage, place: Place, cuts: Sequence[tuple[int, int]]) -> tuple[Step, list[Buffer]] | None:
        """Returns the step that hands on a rank's columns ``cuts`` of each value; None at the last stage."""

    def finish(self, program: LoweredProgram, programs: Sequence[LoweredProgram]) -> LoweredProgram:
        """Completes a rank's program by those of all ranks."""
        return program
