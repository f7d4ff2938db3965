"""The values of a model that can be compared between runs, named by their modules, and the record of a run's values.

A name is the path of a module and the kind of the value. A value has a row for each token, [T, N], whatever shape it
has in a run. The same names are used for transformers' modules, a Program at any stage, and the steps of a bundle. A
value that a fused kernel keeps in registers can't be recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from enginewright.passes.ir.provenance import layer_path
from enginewright.passes.ir.value_name import ValueName
from enginewright.runtime.shared.contracts import FloatArray


def layer_number(path: str) -> int | None:
    """Returns the number of the layer of a module, such as 3 for "model.layers.3.mlp"; None outside layers."""
    layer = layer_path(path)
    return int(layer.rpartition(".")[2]) if layer else None


def in_layers(path: str, layers: Collection[int] | None) -> bool:
    """Returns True if the module or tensor at ``path`` is in one of ``layers``; always True if ``layers`` is None."""
    return layers is None or layer_number(path) in layers


Values = Mapping[ValueName, FloatArray]
"""The values [T, N] by name, in the order of execution."""


Parts = Literal["rows", "experts"]
Used = dict[tuple[str, Parts], npt.NDArray[np.bool_]]
"""Module -> True for each row of an embedding, or each expert, that a token of a run used."""


def not_covered(used: Used) -> list[str]:
    """Returns a line for each module with rows or experts that no token of a run used."""
    lines = []
    for (path, what), mask in used.items():
        left = np.flatnonzero(~mask)
        if len(left):
            some = f" ({', '.join(map(str, left))})" if len(left) <= _LISTED else ""
            verb = "has" if what == "rows" else "went to"
            lines.append(f"{path}: {len(left):,} of {len(mask):,} {what}{some}, which no token {verb}")
    return lines


_LISTED = 8
"""The most indices of rows or experts that a line lists."""


def leaves_of(paths: Iterable[str]) -> frozenset[str]:
    """Returns the paths that are the parent of no other path: the modules without modules in them."""
    modules = set(paths) - {""}
    inner = {".".join(path.split(".")[:i]) for path in modules for i in range(1, path.count(".") + 1)}
    return frozenset(modules - inner)


class Recording:
    """The values that a run computed, and the given values with which it continues instead.

    Args:
        tokens: T, the number of tokens of the run.
        given: the values to continue with. A value that is computed from given ones shows only the errors of its own
            computation.
        scales: the factors [N] by which the run has scaled the channels of a value on purpose; recorded values are
            divided by them.
        without: the names of values whose channels have unknown factors; they aren't recorded.
    """

    def __init__(
        self,
        tokens: int,
        given: Values | None = None,
        scales: Mapping[ValueName, FloatArray] | None = None,
        without: Collection[ValueName] = (),
    ) -> None:
        self.tokens = tokens
        self.values: dict[ValueName, FloatArray] = {}
        self.used: Used = {}
        self.given = given or {}
        self._scales = scales or {}
        self._dropped: set[ValueName] = set(without)

    def see(self, name: ValueName, rows: FloatArray, tokens: np.ndarray | None = None) -> FloatArray | None:
        """Records the rows of a value.

        Args:
            name: the name of the value.
            rows: [t, N].
            tokens: the numbers of the rows' tokens in the run; None for all tokens.

        Returns:
            the rows to continue with, [t, N]; None to continue with ``rows``.
        """
        if name in self._dropped:
            return None
        if tokens is None:
            tokens = np.arange(self.tokens)
        scale = self._scales.get(name)
        whole = self.values.get(name)
        if whole is None:
            whole = self.values[name] = np.full((self.tokens, rows.shape[1]), np.nan, np.float32)
        if whole.shape[1] != rows.shape[1]:
            self.drop(name)
            return None
        whole[tokens] = rows if scale is None else rows / scale
        return self.instead(name, rows.shape[1], tokens)

    def instead(self, name: ValueName, width: int, tokens: np.ndarray | None = None) -> FloatArray | None:
        """Returns the given rows [t, ``width``] that replace a value; None if no values are given for it.

        ``tokens``: the tokens of the rows; None for all.
        """
        replacement = self.given.get(name)
        if name in self._dropped or replacement is None or replacement.shape != (self.tokens, width):
            return None
        some = replacement if tokens is None else replacement[tokens]
        scale = self._scales.get(name)
        return some if scale is None else some * scale

    def use(self, path: str, what: Parts, which: np.ndarray, size: int) -> None:
        """Records which rows of a table, or experts of a module, the run used.

        Args:
            path: the module.
            what: "rows" or "experts".
            which: their indices.
            size: the number of all of them.
        """
        self.used.setdefault((path, what), np.zeros(size, np.bool_))[which] = True

    def drop(self, name: ValueName) -> None:
        """Drops a value that is computed more than once in a run, so that its name is ambiguous."""
        self._dropped.add(name)
        self.values.pop(name, None)


def token_axis(shape: Sequence[object], tokens: object) -> int | None:
    """Returns the axis of a shape that has the size ``tokens``; None if there is none, or more than one."""
    axes = [i for i, size in enumerate(shape) if size == tokens]
    return axes[0] if len(axes) == 1 else None


def batch_axis(shape: Sequence[int], tokens: int) -> int | None:
    """Returns the axis of tokens in a module's value for one sequence: [1, T, ..], [1, N, T, D] or [T, ..]; None
    without one.
    """
    places = (1, 2, 0) if len(shape) > 2 and shape[0] == 1 else (0,)
    return next((axis for axis in places if axis < len(shape) and shape[axis] == tokens), None)


def to_rows(value: torch.Tensor, axis: int) -> FloatArray:
    """Returns a value [.., T, ..] with its tokens along ``axis`` as rows [T, N], a copy."""
    moved = value.detach().movedim(axis, 0)
    rows: FloatArray = moved.reshape(moved.shape[0], -1).to(torch.float32, copy=True).numpy()
    return rows


def from_rows(rows: FloatArray, like: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns rows [T, N] in the shape and type of ``like``, whose tokens are along ``axis``."""
    moved = like.movedim(axis, 0)
    value = torch.from_numpy(rows).reshape(moved.shape).to(like.dtype)
    return value.movedim(0, axis).contiguous()
