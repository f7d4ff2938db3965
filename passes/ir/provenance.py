"""Provenance: the module paths of nodes, and the source tensors and rows of weights.

It is part of the IR and is verified after every pass; bisection, sensitivity and skipping of layers depend on it. A
call that replaces several (a fusion) has the paths of all of them. A call into which equal calls were merged has the
paths of the first only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # recipes name layers by their paths, and are read without torch
    import torch.fx

WHERE = "where"
"""The key in ``node.meta`` of a tuple of module paths, such as ("model.layers.0.mlp.gate_proj",). The outermost module
is "".
"""


@dataclass(frozen=True, order=True)
class Part:
    """The origin of some indices of a weight: the indices ``start:stop`` along ``axis`` of the source tensor
    ``source``.

    If ``mixed`` is None, each index of the source is one index of the weight. Otherwise these source indices are
    combined into ``mixed`` indices of the weight. If several parts are combined into the same indices, only the first
    counts them, and the others have a ``mixed`` of 0: so the sizes of all parts add up to the weight's size.
    """

    source: str
    start: int
    stop: int
    axis: int = 0
    mixed: int | None = None

    @property
    def size(self) -> int:
        """The number of indices of the weight that have this origin."""
        return self.stop - self.start if self.mixed is None else self.mixed

    def __str__(self) -> str:
        return f"{self.source}[{':, ' * self.axis}{self.start}:{self.stop}]"


def where_of(nodes: Iterable[torch.fx.Node]) -> tuple[str, ...]:
    """Returns the module paths of all these nodes, in order and without repetitions."""
    paths: dict[str, None] = {}
    for node in nodes:
        paths.update(dict.fromkeys(node.meta.get(WHERE, ())))
    return tuple(paths)


def join_where(where: Iterable[str]) -> str:
    """Returns module paths as one text: "model.layers.0.self_attn.q_proj + model.layers.0.self_attn.k_proj"."""
    return " + ".join(where)


def op_and_where(node: torch.fx.Node) -> str:
    """Returns a call's description for messages: "aten.foo at model.layers.0.mlp"."""
    where = join_where(node.meta[WHERE]) or "the model's top level"
    return f"{str(node.target).removesuffix('.default')} at {where}"


def layer_path(path: str) -> str:
    """Returns the path up to its first number, "model.layers.3" for "model.layers.3.mlp.down_proj"; "" if the path has
    no number.
    """
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
    return match[0] if match else ""
