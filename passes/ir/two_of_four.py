"""Weights of which at most two of every four neighbours along K aren't zero.

``TwoOfFour`` keeps the two with the largest scores when it is evaluated. ``Sparsified`` has values that a pass has
chosen. ``is_two_of_four`` returns True for expressions of this form, which some targets store compressed. Rounding,
scaling and clipping a weight keep its zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from enginewright.runtime.shared.errors import PassError

from .chosen_codes import ChosenCodes
from .clipped import Clipped
from .kept import keep
from .quantized import QuantizedValues
from .scaled import Factors, Scaled
from .weights import Cast, Concat, InPlaceOf, Slice, WeightExpr

QUAD = 4
"""The number of neighbours along K of which ``KEPT`` are kept."""

KEPT = 2


def best_two(scores: torch.Tensor) -> torch.Tensor:
    """Returns a mask [.., K] that is True for the two largest of every four scores. Among equal scores the first
    win.
    """
    quads = scores.unflatten(-1, (-1, QUAD))
    order = torch.sort(quads, dim=-1, descending=True, stable=True).indices[..., :KEPT]
    mask = torch.zeros(quads.shape, dtype=torch.bool).scatter_(-1, order, True)
    return mask.flatten(-2)


def scores_of(weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Returns |W| times the importance [K] of its columns, or |W| if that is None. Zeros get the lowest scores of all.

    Sun et al. 2023, https://arxiv.org/abs/2306.11695: the importance of a column is the norm of its inputs.
    """
    size = weight.float().abs()
    if importance is None:
        return size
    least = float(importance.max()) * 1e-6 or 1.0  # a column that no token uses is judged by its weights alone
    return size * importance.clamp(min=least)


@dataclass(frozen=True)
class TwoOfFour(InPlaceOf):
    """``base`` [N, K] with the two best of every four neighbours unchanged, bit for bit, and zeros in place of the
    others.

    The best have the largest |W| times ``importance`` [1, K]; if that is None, the largest |W|. A weight that already
    has the form is unchanged.
    """

    importance: Factors | None = None

    def __post_init__(self) -> None:
        if len(self.base.shape) != 2 or self.base.shape[1] % QUAD or not self.base.dtype.is_floating_point:
            raise PassError(f"two of every four of a weight {self.base.dtype} {self.base.shape}")

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def evaluate(self) -> torch.Tensor:
        value = self.base.evaluate()
        importance = None if self.importance is None else self.importance.values[0]
        return torch.where(best_two(scores_of(value, importance)), value, torch.zeros((), dtype=value.dtype))

    def describe(self) -> str:
        by = "" if self.importance is None else f", {self.importance.label} {self.importance.digest[:8]}"
        return f"two_of_four({self.base.describe()}{by})"


@dataclass(frozen=True)
class Sparsified(InPlaceOf):
    """Float32 values in place of ``base`` [N, K], of which at most two of every four neighbours along K aren't zero.

    Two are equal if their bits are. ``read`` returns the values, ``digest`` is the digest of their bits.
    """

    digest: str
    read: Callable[[], torch.Tensor] = field(compare=False, repr=False)

    @staticmethod
    def from_values(base: WeightExpr, values: torch.Tensor, file: Path | None = None) -> Sparsified:
        """Returns an expression of ``values`` in place of ``base``, stored in ``file``; in memory if it is None.

        The file is read each time that the values are needed. Raises CapacityError naming the file if it can't be
        written.
        """
        digest, read = keep([values.float()], file)
        return Sparsified(base, digest, lambda: read()[0])

    def evaluate(self) -> torch.Tensor:
        return self.read()

    def describe(self) -> str:
        return f"sparsified({self.base.describe()}, {self.digest[:8]})"


def is_two_of_four(expr: WeightExpr) -> bool:
    """Returns True if a weight's expression ensures that at most two of every four neighbours along its last axis
    aren't 0.
    """
    match expr:
        case TwoOfFour() | Sparsified():
            return True
        case Concat() if expr.dim != len(expr.shape) - 1:
            return all(is_two_of_four(base) for base in expr.bases)
        case Slice() if expr.dim != len(expr.shape) - 1:
            return is_two_of_four(expr.base)
        case QuantizedValues() | ChosenCodes() | Clipped():  # an offset makes zeros something else
            code_format = expr.format
            return not code_format.offsets and is_two_of_four(expr.base)
        case Cast() | Scaled():
            return is_two_of_four(expr.base)
        case _:
            return False
