"""Base classes of the kinds of partitions: rules to cut ops, division of caches, collectives and their cost.

A ``LayerKind`` divides the work of each layer among ranks, a ``StepKind`` divides the steps into stages. A new kind is
a module in this folder and a row of ``KINDS`` in ``table``. The parser of partitions, ``optimize plan`` and the core
(``runtime/ranks/cut.py``) read that table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from ...shared.errors import RequestError
from ...shared.lowered_program import Buffer, LoweredProgram, Operand, Step
from .views import Slice


class Axis(msgspec.Struct, frozen=True):
    """The axis along which a step can be cut.

    Attributes:
        count: the number of indices.
        inputs, outputs: for each operand, the part that belongs to an index; None if a rank needs the whole operand.
        unit: the number of indices that must stay together, because weights are stored in panels.
    """

    count: int
    inputs: tuple[Slice | None, ...]
    outputs: tuple[Slice | None, ...]
    unit: int = 1


Rule = Callable[[Step], Axis | None]
"""A function that returns the axis along which a step of an op is divided; None if every rank computes the whole
step.
"""


class Heads(msgspec.Struct):
    """The query heads of each rank, and the key/value heads that they read.

    Attributes:
        group: the number of query heads per key/value head.
        query: the first query head of each rank, then the number of query heads.
        key_value: the range of key/value heads in each rank's cache, with an exclusive end.
    """

    group: int
    query: tuple[int, ...]
    key_value: tuple[tuple[int, int], ...]


class Stage(msgspec.Struct, frozen=True):
    """The steps of one stage, the values that it receives from the previous stage, and the values that it sends to the
    next.
    """

    program: LoweredProgram
    received: tuple[Operand, ...] = ()
    sent: tuple[Operand, ...] = ()


class Place(msgspec.Struct, frozen=True):
    """The position of a stage among the ranks: stage number ``stage`` of ``stages``, with ``count`` ranks each."""

    stage: int
    stages: int
    count: int

    @property
    def first(self) -> int:
        """The number of the first rank that computes the stage."""
        return (self.stages - 1 - self.stage) * self.count

    @property
    def region(self) -> int:
        """The number of the memory region that the ranks of this stage share."""
        return 1 + self.stage


class Arrivals(NamedTuple):
    """The rows that a rank receives in a collective.

    Attributes:
        meeting: the ranks that wait for each other.
        row_bytes: rank -> bytes of a row that it contributes.
    """

    meeting: Sequence[int]
    row_bytes: Mapping[int, float]


class PartitionKind(ABC):
    """A way to divide a model among ranks.

    Attributes:
        name: the name in a partition: ``tensor`` in "tensor=2".
        collectives: the ops by which its ranks exchange values.
        alike: the name of a kind that divides weights in the same way; "" if there is none.
        combines: False if it can't be combined with another kind.
        unplanned: the reason why ``optimize plan`` doesn't consider it; "" if it does.
        owns_blocks: True if each block of a KV cache belongs to one rank.
        in_flight: True if the number of steps in flight is the number of its ranks.
    """

    name: ClassVar[str]
    collectives: ClassVar[tuple[str, ...]] = ()
    alike: ClassVar[str] = ""
    combines: ClassVar[bool] = True
    unplanned: ClassVar[str] = ""
    owns_blocks: ClassVar[bool] = False
    in_flight: ClassVar[bool] = False

    def check(self, partition: str, ranks: int, count: int) -> None:
        """Raises RequestError if this kind can't be combined with others, but a partition does so.

        Args:
            partition: the partition as text.
            ranks: the number of all ranks.
            count: the number of ranks of this kind.
        """
        if not self.combines and 1 < count < ranks:
            same = f", which cuts weights as {self.alike}={ranks} does" if self.alike else ""
            raise RequestError(
                f"partition: {partition}: {self.name} doesn't go together with another way to cut a model",
                hint=f"Use {self.name}={ranks}{same}.",
            )

    def arrivals(self, step: Step, ranks: range, rank: int, element: Callable[[Operand], float]) -> Arrivals | None:
        """Returns the rows that ``rank`` receives in a step of one of ``collectives``; None if it only sends.

        ``optimize plan`` uses it.

        Args:
            ranks: the ranks of the stage.
            element: returns the bytes that one element of an operand takes on the link.
        """
        return None


class LayerKind(PartitionKind):
    """A kind that divides each layer. The default divides nothing: every rank computes every step, with a whole cache.

    Attributes:
        rules: op -> the rule to cut it; every rank computes other ops whole.
        repeated: ops that have a rule, but of which every rank still computes all indices.
        divides_experts: True if each rank has some of the experts.
    """

    rules: ClassVar[Mapping[str, Rule]] = {}
    repeated: ClassVar[frozenset[str]] = frozenset()
    divides_experts: ClassVar[bool] = False

    def heads(self, step: Step, have: int, ranks: int) -> Heads:
        """Returns the heads of each rank for an attention step with ``have`` key/value heads. Raises RequestError."""
        queries = step.inputs[0].shape[1].constant
        return Heads(queries // have, (0,) * ranks + (queries,), ((0, have),) * ranks)

    def cache_attrs(self, rank: int, ranks: int) -> dict[str, Any]:
        """Returns the attributes that a rank adds to the steps that use its cache."""
        return {}

    def attention(self, heads: Heads, first: int, rank: int, ranks: int) -> tuple[str, dict[str, Any]]:
        """Returns (op, attributes) of a rank's attention: the op to use, and the attributes to add.

        Args:
            heads: the division of the heads.
            first: the rank's first query head.
            rank: the rank.
            ranks: the number of ranks.
        """
        return "paged_attention", {}


class StepKind(PartitionKind):
    """A kind that divides the steps into consecutive stages."""

    @abstractmethod
    def stages(self, program: LoweredProgram, count: int) -> list[Stage]:
        """Returns ``count`` stages, the first layers first. Raises RequestError if there are too few places to cut."""

    @abstractmethod
    def receive(self, stage: Stage, place: Place) -> tuple[Step, list[Buffer]] | None:
        """Returns the step that receives the previous stage's values, and the buffers for them; None at the first
        stage.
        """

    @abstractmethod
    def send(self, stage: Stage, place: Place, cuts: Sequence[tuple[int, int]]) -> tuple[Step, list[Buffer]] | None:
        """Returns the step that sends a stage's values to the next one, and its buffers; None at the last stage.

        ``cuts``: the range of columns of each value that this rank sends.
        """

    def finish(self, program: LoweredProgram, programs: Sequence[LoweredProgram]) -> LoweredProgram:
        """Completes a rank's program with facts from the programs of all ranks, and returns it."""
        return program
