"""The interface of all runs of a model: values by name, and the tensors that compute them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from enginewright.runtime.shared.contracts import FloatArray

from .probes import Call, Piece, Probe
from .values import ValueName, Values

Role = Literal["weight", "bias"]


@dataclass(frozen=True)
class Tensor:
    """A tensor that a module's call computes with, as float32, in whatever format it is stored.

    Attributes:
        path: the module's path.
        role: the tensor's role in the module.
        name: the tensor's name in the run.
        sources: the source tensors, with the rows in them, that it was made of; as text.
        read: returns its values: [N, K] for a product's weight, [E, N, K] for experts.
    """

    path: str
    role: Role
    name: str
    sources: tuple[str, ...]
    read: Callable[[], FloatArray] = field(repr=False, compare=False)

    def __str__(self) -> str:
        origins = ", ".join(s for s in self.sources if s != self.name)
        return f"{self.name} (of {origins})" if origins else self.name


class Run(Protocol):
    """A run of a model: transformers' own, a Program at some stage, or a target of a bundle."""

    @property
    def name(self) -> str: ...

    @property
    def leaves(self) -> frozenset[str]:
        """Paths of modules that have none in them."""
        ...

    @property
    def value_names(self) -> Collection[ValueName]:
        """Names the values that the run can record."""
        ...

    def values(self, sequences: Sequence[torch.Tensor], given: Values | None = None) -> Values:
        """The values of sequences of token ids [S], in the order of execution.

        ``given``: values to continue with instead of what was computed there; see ``Recording``.
        """
        ...

    def tensors(self, path: str) -> list[Tensor]:
        """The weights of the module at ``path``, as float32."""
        ...


class TracedRun(Run, Protocol):
    """A run that has a program: calls, and probes among them."""

    @property
    def calls(self) -> list[Call]: ...

    @property
    def probes(self) -> list[Probe]: ...

    def describe(self, call: Call) -> str:
        """A call in a line: "step 17 linear (model.layers.1.mlp.down_proj)"."""
        ...

    def tensors_of(self, call: Call) -> list[Tensor]:
        """The weights of a call, as float32; those of a fused product are cut into each module's rows."""
        ...


@dataclass(frozen=True)
class Stored:
    """A weight of a call before it is cut: its name, role, the parts that its rows are of, and how it is read.

    ``parts``: source tensor, first and last row, and how many rows of the weight these make, in order; 0: they are
    mixed into those of the part before.
    """

    role: Role
    name: str
    parts: tuple[tuple[str, int, int, int], ...]
    read: Callable[[], FloatArray]


def cut(call: Call, stored: Sequence[Stored]) -> list[Tensor]:
    """Each weight of a call, a product's by the linears that it is made of."""
    pieces = call.pieces if len(call.pieces) > 1 else (None,)
    path = call.pieces[0].path if call.pieces else call.owner or next(iter(call.where), "")
    return [_cut(weight, piece, path) for weight in stored for piece in pieces]


def _cut(weight: Stored, piece: Piece | None, path: str) -> Tensor:
    if piece is None:
        whole = tuple(f"{name}[{first}:{last}]" for name, first, last, _ in weight.parts)
        return Tensor(path, weight.role, weight.name, whole, weight.read)
    start, stop = piece.start, piece.stop

    def read() -> FloatArray:
        return weight.read()[start:stop]

    sources: list[str] = []
    at, inside = 0, False
    for name, first, last, size in weight.parts:
        low, high = max(start - at, 0), min(stop - at, size)
        inside = low < high if size else inside
        if inside:
            source_rows = (first + low, first + high) if size == last - first else (first, last)
            sources.append(f"{name}[{source_rows[0]}:{source_rows[1]}]")
        at += size
    return Tensor(piece.path, weight.role, f"{weight.name}[{start}:{stop}]", tuple(sources), read)


def dequantized(values: FloatArray, scales: FloatArray, offsets: FloatArray | None, group: int) -> FloatArray:
    """value * scale + offset: [.., K] with [.., groups]; ``group`` 0 is all of K."""
    size = values.shape[-1]
    width = group or size

    def spread(factors: FloatArray) -> FloatArray:
        return np.repeat(factors.astype(np.float32), width, axis=-1)[..., :size]

    result: FloatArray = values.astype(np.float32) * spread(scales)
    return result if offsets is None else result + spread(offsets)
