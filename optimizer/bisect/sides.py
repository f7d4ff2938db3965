"""What the ways of computing a model have in common here: values at points, and the tensors that they are made with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from enginewright.plugins.shared.contracts import FloatArray

from .points import Point, Values
from .taps import Call, Tap

Role = Literal["weight", "bias"]


@dataclass(frozen=True)
class Tensor:
    """What a module's call computes with, as float32, whatever it is stored in.

    Attributes:
        path: the module.
        role: which of the module's tensors.
        name: what the side calls it.
        sources: the tensors, and rows in them, of the source that it was made of; as text.
        read: its values; a product's weight is [N, K], of experts [E, N, K].
    """

    path: str
    role: Role
    name: str
    sources: tuple[str, ...]
    read: Callable[[], FloatArray] = field(repr=False, compare=False)

    def __str__(self) -> str:
        made = ", ".join(s for s in self.sources if s != self.name)
        return f"{self.name} (of {made})" if made else self.name


class Side(Protocol):
    """A way of computing a model: transformers' own, a Program at some stage, or a target of a bundle."""

    @property
    def name(self) -> str: ...

    @property
    def leaves(self) -> frozenset[str]:
        """Paths of modules that have none in them."""
        ...

    @property
    def points(self) -> Collection[Point]:
        """What it may have values at."""
        ...

    def run(self, sequences: Sequence[torch.Tensor], given: Values | None = None) -> Values:
        """The values at the side's points, of sequences of token ids [S], in the order of execution.

        ``given``: values to go on with at points instead of what was computed there; see ``Recording``.
        """
        ...

    def tensors(self, path: str) -> list[Tensor]:
        """What the module at ``path`` computes with."""
        ...


class Calls(Side, Protocol):
    """A side that has a program: calls, and where its points are among them."""

    @property
    def calls(self) -> list[Call]: ...

    @property
    def taps(self) -> list[Tap]: ...

    def describe(self, call: Call) -> str:
        """A call in a line: "step 17 linear (model.layers.1.mlp.down_proj)"."""
        ...

    def tensors_of(self, call: Call) -> list[Tensor]:
        """What a call computes with; of a fused product each module's rows by themselves."""
        ...
