"""Weights that training has changed: tensors of a recovery, in place of expressions over the source's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from enginewright.runtime.shared.errors import PassError

from .weights import COMPUTED, Cast, InPlaceOf, WeightExpr, WeightStore


@dataclass(frozen=True)
class Recovered(InPlaceOf):
    """A float32 tensor in place of ``base``, with the provenance of its rows.

    Attributes:
        name: the name of the weight in the program that was trained.
        digest: the digest of its bits, by which two are compared; "" during training.
        read: returns the tensor.
    """

    name: str
    digest: str
    read: Callable[[], torch.Tensor] = field(compare=False, repr=False)

    def evaluate(self) -> torch.Tensor:
        value = self.read()
        if tuple(value.shape) != self.shape or value.dtype != torch.float32:
            raise PassError(f"recovered {self.name}: {value.dtype} {tuple(value.shape)} for a weight {self.shape}")
        return value

    def describe(self) -> str:
        return f"recovered({self.base.describe()}{f', {self.digest[:8]}' if self.digest else ''})"


class RecoveredWeights(ABC):
    """A source of trained tensors for a program's weights: the training that is running, or a finished recovery."""

    @abstractmethod
    def replacing(self, weights: Mapping[str, WeightExpr]) -> dict[str, Recovered]:
        """Returns the trained tensor for each of ``weights``, by name.

        Raises SourceError if these aren't the trained weights: a name, a shape or the provenance of rows differs.
        """


def before_training(weights: WeightStore) -> WeightStore:
    """Returns the weights with the source's numbers in place of trained ones.

    A pass uses them to make the same choices as before training.
    """
    store = weights.copy()
    for name in store:
        store.change(name, _untrained(store[name]))
    return store


def _untrained(value: Any) -> Any:
    if isinstance(value, Recovered):
        base = value.base
        return base if base.dtype == torch.float32 else Cast(base, torch.float32)
    if isinstance(value, tuple):
        return tuple(_untrained(one) for one in value)
    if not isinstance(value, WeightExpr):
        return value
    expression: Any = value  # all of them are dataclasses
    values = {f.name: getattr(value, f.name) for f in fields(expression) if f.init}
    return replace(expression, **{name: _untrained(one) for name, one in values.items()})


def trainable_weights(weights: WeightStore) -> dict[str, tuple[str, ...]]:
    """Returns the weights that training changes: the first name of each -> all names of equal expressions (tied
    weights).

    These are all float tensors of the checkpoint: matrices, tables, norms and biases. Computed values, such as rotary
    frequencies, and integers aren't trained.
    """
    names: dict[WeightExpr, list[str]] = {}
    for name in weights:
        expr = weights[name]
        computed = all(part.source.startswith(COMPUTED) for part in expr.parts())
        if expr.dtype.is_floating_point and not computed:
            names.setdefault(expr, []).append(name)
    return {same[0]: tuple(same) for same in names.values()}
