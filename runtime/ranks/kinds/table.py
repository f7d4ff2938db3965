"""The table of the kinds of partition, in the order in which the text of a partition names them.

The text "tensor=2,pipeline=2" has two kinds. A number alone, such as "2", is the number of ranks of the first kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import LayerKind, PartitionKind, StepKind
from .pipeline import Pipeline
from .ring import Ring
from .tensor import Tensor

KINDS: dict[str, PartitionKind] = {kind.name: kind for kind in (Tensor(), Pipeline(), Ring())}
"""Name of a kind -> the kind.

If a partition has no kind that divides layers, the first of these that does is used, with one rank; likewise for kinds
that divide steps.
"""


def layer_kinds() -> list[LayerKind]:
    """Returns the kinds that divide layers."""
    return [kind for kind in KINDS.values() if isinstance(kind, LayerKind)]


def step_kinds() -> list[StepKind]:
    """Returns the kinds that divide steps."""
    return [kind for kind in KINDS.values() if isinstance(kind, StepKind)]


def kind_of_collective(op: str) -> PartitionKind | None:
    """Returns the kind whose ranks exchange values by ``op``, among the kinds that ``optimize plan`` considers; else
    None.
    """
    return next((kind for kind in KINDS.values() if not kind.unplanned and op in kind.collectives), None)


def planned_sizes(ranks: int, kinds: Sequence[str] | None = None) -> Iterator[dict[str, int]]:
    """Yields the partitions of ``ranks`` ranks into the kinds of ``kinds``, by default those that ``optimize plan``
    considers.

    The partition with the most ranks of the first kind comes first.
    """
    names = [name for name, kind in KINDS.items() if not kind.unplanned] if kinds is None else kinds
    if not names:
        if ranks == 1:
            yield {}
        return
    for count in range(ranks, 0, -1):
        if ranks % count == 0:
            for others in planned_sizes(ranks // count, names[1:]):
                yield {names[0]: count, **others}
