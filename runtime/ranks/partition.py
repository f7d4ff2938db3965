"""The type of a partition: the number of ranks of each kind among which a model is divided.

The kinds (``kinds/table.py``) are imported when a model is divided, so that importing ``LLM`` doesn't load them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..shared.errors import RequestError

if TYPE_CHECKING:
    from .kinds.base import PartitionKind

MOST_RANKS = 64


@dataclass(frozen=True, init=False)
class Partition:
    """The number of ranks of each kind among which a model is divided: ``Partition(tensor=2, pipeline=2)``.

    Attributes:
        sizes: the ranks of each kind that has more than one, by the kind's name, in the order of ``KINDS``.
    """

    sizes: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        known = tuple((name, sizes.pop(name)) for name in _kinds() if name in sizes) if sizes else ()
        if sizes:
            raise TypeError(f"there is no kind of partition {next(iter(sizes))!r}")
        object.__setattr__(self, "sizes", tuple((name, count) for name, count in known if count != 1))

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return math.prod(count for _, count in self.sizes)

    @property
    def kinds(self) -> dict[PartitionKind, int]:
        """The kinds that have more than one rank, with their numbers of ranks."""
        return {_kinds()[name]: count for name, count in self.sizes}

    @property
    def stages(self) -> int:
        """The number of stages; as many steps are in flight at once."""
        return math.prod(count for kind, count in self.kinds.items() if kind.in_flight)

    @property
    def owners(self) -> int:
        """The number of ranks among which the blocks of a KV cache are divided; 1 if every rank has each block."""
        return math.prod(count for kind, count in self.kinds.items() if kind.owns_blocks)

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Parses ``tensor=2,pipeline=2``, or a number of ranks. Raises RequestError."""
        if text.strip().isdigit():
            text = f"{next(iter(_kinds()))}={text}"
        values: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in _kinds() or not value.strip().isdigit() or name in values:
                known = ", ".join(f"{name}=N" for name in _kinds())
                raise RequestError(f"partition: {part.strip()!r} isn't understood", hint=f"Write {known}.")
            values[name] = int(value)
        parsed = cls(**values)
        if not all(values.values()) or parsed.ranks > MOST_RANKS:
            raise RequestError(f"partition: {text!r} is out of range", hint=f"There are 1 to {MOST_RANKS} ranks.")
        return parsed

    def __str__(self) -> str:
        return ",".join(f"{name}={count}" for name, count in self.sizes) or f"{next(iter(_kinds()))}=1"


def _kinds() -> dict[str, PartitionKind]:
    from .kinds.table import KINDS

    return KINDS
