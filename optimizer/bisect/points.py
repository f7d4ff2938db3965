"""Points: places of a model, named by provenance, at which two ways of computing it can be compared.

A point is a module's path and what of it is meant. Its value has a row for each token, [T, N], whatever shape a side
has it in. The same point is found in transformers' modules, in a Program at any stage, and in the steps of a bundle;
where a fusion leaves no trace of a value, the point is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from enginewright.passes.ir.provenance import layer_path
from enginewright.plugins.shared.contracts import FloatArray

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
class Point:
    """``what`` of the module at ``path``."""

    path: str
    what: What

    def __str__(self) -> str:
        return "logits" if self.what == "logits" else f"{_PLAIN[self.what]} {self.path}"

    @property
    def layer(self) -> str:
        """The path of the layer that it is in, such as "model.layers.3"; "" outside of them."""
        return layer_path(self.path)


LOGITS = Point("", "logits")


def layer_number(path: str) -> int | None:
    """3 of "model.layers.3.mlp"; None outside of layers."""
    found = layer_path(path)
    return int(found.rpartition(".")[2]) if found else None


def in_layers(path: str, layers: Collection[int] | None) -> bool:
    """Whether a module, or a tensor by its name, is in one of these layers; None: all are meant."""
    return layers is None or layer_number(path) in layers


Values = Mapping[Point, FloatArray]
"""A value [T, N] at each point, in the order of execution."""


Parts = Literal["rows", "experts"]
Used = dict[tuple[str, Parts], npt.NDArray[np.bool_]]
"""A module that a token uses a part of -> which rows of an embedding, or which experts, were used in a run."""


def not_covered(used: Used) -> list[str]:
    """What no token of a run has used, in words."""
    found = []
    for (path, what), mask in used.items():
        left = np.flatnonzero(~mask)
        if len(left):
            some = f" ({', '.join(map(str, left))})" if len(left) <= _LISTED else ""
            verb = "has" if what == "rows" else "went to"
            found.append(f"{path}: {len(left):,} of {len(mask):,} {what}{some}, which no token {verb}")
    return found


_LISTED = 8
"""Numbers of rows or experts that are listed."""


def leaves_of(paths: Iterable[str]) -> frozenset[str]:
    """Those of some module paths that no other one lies in."""
    found = set(paths) - {""}
    inner = {".".join(path.split(".")[:i]) for path in found for i in range(1, path.count(".") + 1)}
    return frozenset(found - inner)


class Recording:
    """What a side computed at its points, and what it was given to go on with instead.

    Args:
        tokens: T of the whole run.
        given: values to go on with. So each value tells of what was computed since the points before it, not of what
            had gone wrong there.
        scales: [N] of points whose channels the side has scaled on purpose; values here are without that.
        without: points whose channels are scaled by nobody knows what.
    """

    def __init__(
        self,
        tokens: int,
        given: Values | None = None,
        scales: Mapping[Point, FloatArray] | None = None,
        without: Collection[Point] = (),
    ) -> None:
        self.tokens = tokens
        self.values: dict[Point, FloatArray] = {}
        self.used: Used = {}
        self.given = given or {}
        self._scales = scales or {}
        self._dropped: set[Point] = set(without)

    def see(self, point: Point, rows: FloatArray, tokens: np.ndarray | None = None) -> FloatArray | None:
        """Notes the value of some tokens (their numbers in the run; None: all), [t, N].

        Returns what to go on with, if it is another.
        """
        if point in self._dropped:
            return None
        if tokens is None:
            tokens = np.arange(self.tokens)
        scale = self._scales.get(point)
        whole = self.values.get(point)
        if whole is None:
            whole = self.values[point] = np.full((self.tokens, rows.shape[1]), np.nan, np.float32)
        if whole.shape[1] != rows.shape[1]:
            self.drop(point)
            return None
        whole[tokens] = rows if scale is None else rows / scale
        return self.instead(point, rows.shape[1], tokens)

    def instead(self, point: Point, width: int, tokens: np.ndarray | None = None) -> FloatArray | None:
        """What some tokens are to go on with at a point whose values have ``width`` columns, [t, N]; None: its own."""
        given = self.given.get(point)
        if point in self._dropped or given is None or given.shape != (self.tokens, width):
            return None
        some = given if tokens is None else given[tokens]
        scale = self._scales.get(point)
        return some if scale is None else some * scale

    def use(self, path: str, what: Parts, which: np.ndarray, size: int) -> None:
        """Notes which rows or experts of a module, of ``size``, tokens of the run have."""
        self.used.setdefault((path, what), np.zeros(size, np.bool_))[which] = True

    def drop(self, point: Point) -> None:
        """The point is computed more than once in a run, so nobody can say which is meant."""
        self._dropped.add(point)
        self.values.pop(point, None)
