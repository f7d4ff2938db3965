"""The interface of all runs of a model: values by name, and the tensors that compute them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from enginewright.passes.ir.calls import Call, Piece
from enginewright.passes.ir.value_name import ValueName
from enginewright.runtime.shared.contracts import FloatArray

from .probes import Probe
from .values import Values

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
    """A run of a model: by transformers, by a Program at some stage, or by a target of a bundle."""

    @property
    def name(self) -> str: ...

    @property
    def leaves(self) -> frozenset[str]:
        """The paths of the modules without modules in them."""
        ...

    @property
    def value_names(self) -> Collection[ValueName]:
        """The names of the values that the run can record."""
        ...

    def values(self, sequences: Sequence[torch.Tensor], given: Values | None = None) -> Values:
        """Returns the values of sequences of token ids [S], in the order of execution. ``given`` are values to continue
        with; see ``Recording``.
        """
        ...

    def tensors(self, path: str) -> list[Tensor]:
        """Returns the weights of the module at ``path``, as float32."""
        ...


class TracedRun(Run, Protocol):
    """A run of a program with calls, and with probes of them."""

    @property
    def calls(self) -> list[Call]: ...

    @property
    def probes(self) -> list[Probe]: ...

    def describe(self, call: Call) -> str:
        """Returns a line about a call: "step 17 linear (model.layers.1.mlp.down_proj)"."""
        ...

    def tensors_of(self, call: Call) -> list[Tensor]:
        """Returns the weights of a call, as float32; a fused product's weight is divided into the rows of each
        module.
        """
        ...


def tensors_at(run: TracedRun, path: str) -> list[Tensor]:
    """Returns the weights of the module at a path, as float32, by the calls that stand for the module."""
    weights = [tensor for call in run.calls if path in call.where for tensor in run.tensors_of(call)]
    return [tensor for tensor in weights if tensor.path == path]


@dataclass(frozen=True)
class Stored:
    """A weight of a call.

    Attributes:
        role: weight or bias.
        name: the name of the weight in the run.
        parts: the source tensor, its first row, the row after its last one, and the number of rows of the weight that
            these make, in order. The number is 0 for rows that are mixed into those of the part before.
        read: returns the values, as float32.
    """

    role: Role
    name: str
    parts: tuple[tuple[str, int, int, int], ...]
    read: Callable[[], FloatArray]


def cut(call: Call, stored: Sequence[Stored]) -> list[Tensor]:
    """Returns the tensors of a call's weights; the weight of a fused product gives a tensor for each linear."""
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
