"""The values of a model that can be compared between runs, named by provenance, and how a run records them.

A name is a module's path and which of its values is meant. A value has a row for each token, [T, N], whatever shape a
run has it in. The same name is found in transformers' modules, in a Program at any stage, and in the steps of a
bundle; a value that a fusion keeps in registers isn't there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from enginewright.passes.ir.provenance import layer_path
from enginewright.runtime.shared.contracts import FloatArray

What = Literal["input", "output", "query", "key", "value", "context", "logits"]
"""``input`` and ``output`` are those of a module without modules in it: a linear, a norm, an activation, an embedding.
``query``, ``key`` and ``value`` are what attention gets (after any rotation), ``context`` is what it gives."""

_PLAIN: Mapping[What, str] = {
    "input": "input of",
    "output": "output of",
    "query": "query, as attention gets it, of",
    "key": "key, as attention gets it, of",
    "value": "value, as attention gets it, of",
    "context": "what attention gives in",
}


@dataclass(frozen=True, order=True)
class ValueName:
    """``what`` of the module at ``path``."""

    path: str
    what: What

    def __str__(self) -> str:
        return "logits" if self.what == "logits" else f"{_PLAIN[self.what]} {self.path}"

    @property
    def layer(self) -> str:
        """The path of the layer that it is in, such as "model.layers.3"; "" outside of them."""
        return layer_path(self.path)


LOGITS = ValueName("", "logits")


def layer_number(path: str) -> int | None:
    """3 of "model.layers.3.mlp"; None outside of layers."""
    layer = layer_path(path)
    return int(layer.rpartition(".")[2]) if layer else None


def in_layers(path: str, layers: Collection[int] | None) -> bool:
    """Returns True if a module or tensor, by its path, is in one of these layers; None means all of the model."""
    return layers is None or layer_number(path) in layers


Values = Mapping[ValueName, FloatArray]
"""The values [T, N] by name, in the order of execution."""


Parts = Literal["rows", "experts"]
Used = dict[tuple[str, Parts], npt.NDArray[np.bool_]]
"""A module that a token uses a part of -> which rows of an embedding, or which experts, were used in a run."""


def not_covered(used: Used) -> list[str]:
    """The rows and experts that no token of a run has used, in words."""
    lines = []
    for (path, what), mask in used.items():
        left = np.flatnonzero(~mask)
        if len(left):
            some = f" ({', '.join(map(str, left))})" if len(left) <= _LISTED else ""
            verb = "has" if what == "rows" else "went to"
            lines.append(f"{path}: {len(left):,} of {len(mask):,} {what}{some}, which no token {verb}")
    return lines


_LISTED = 8
"""Numbers of rows or experts that are listed."""


def leaves_of(paths: Iterable[str]) -> frozenset[str]:
    """The leaves of some module paths: those that aren't the parent of another one."""
    modules = set(paths) - {""}
    inner = {".".join(path.split(".")[:i]) for path in modules for i in range(1, path.count(".") + 1)}
    return frozenset(modules - inner)


class Recording:
    """The values that a run computed, and those that it was given to continue with instead.

    Args:
        tokens: T of the whole run.
        given: values to continue with. So each value shows what was computed since the values before it, not what
            had gone wrong there.
        scales: [N] of values whose channels the run has scaled on purpose; values here are without that.
        without: values whose channels have unknown scales.
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
        """Notes the value of some tokens (their numbers in the run; None: all), [t, N].

        Returns what to continue with, if it is another.
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
        """The replacement of a value for some tokens, [t, ``width``]; None: the run keeps its own."""
        replacement = self.given.get(name)
        if name in self._dropped or replacement is None or replacement.shape != (self.tokens, width):
            return None
        some = replacement if tokens is None else replacement[tokens]
        scale = self._scales.get(name)
        return some if scale is None else some * scale

    def use(self, path: str, what: Parts, which: np.ndarray, size: int) -> None:
        """Notes which rows or experts of a module, of ``size``, tokens of the run have."""
        self.used.setdefault((path, what), np.zeros(size, np.bool_))[which] = True

    def drop(self, name: ValueName) -> None:
        """The value is computed more than once in a run, so it is ambiguous."""
        self._dropped.add(name)
        self.values.pop(name, None)


def token_axis(shape: Sequence[object], tokens: object) -> int | None:
    """The axis of ``shape`` that has a place for each token; None if there is none, or it is unclear which."""
    axes = [i for i, size in enumerate(shape) if size == tokens]
    return axes[0] if len(axes) == 1 else None


def batch_axis(shape: Sequence[int], tokens: int) -> int | None:
    """The axis of tokens in a value of a module that runs one sequence: [1, T, ..], [1, N, T, D], or [T, ..]."""
    places = (1, 2, 0) if len(shape) > 2 and shape[0] == 1 else (0,)
    return next((axis for axis in places if axis < len(shape) and shape[axis] == tokens), None)


def to_rows(value: torch.Tensor, axis: int) -> FloatArray:
    """[.., T, ..] -> [T, N], a copy."""
    moved = value.detach().movedim(axis, 0)
    rows: FloatArray = moved.reshape(moved.shape[0], -1).to(torch.float32, copy=True).numpy()
    return rows


def from_rows(rows: FloatArray, like: torch.Tensor, axis: int) -> torch.Tensor:
    """The reverse: [T, N] in the shape and type of ``like``, with its tokens along ``axis``."""
    moved = like.movedim(axis, 0)
    value = torch.from_numpy(rows).reshape(moved.shape).to(like.dtype)
    return value.movedim(0, axis).contiguous()
