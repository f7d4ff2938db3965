"""The places where a pass changed a program's results: each place's own error, with its inputs corrected.

The program before the pass and the one after it run on the same tokens. Wherever both have a value for the same place
they are compared, and the program after the pass continues with the value from before. So an error is reported where it
occurs, and not once more in every later layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.passes.ir.weights import COMPUTED

Values = dict[str, torch.Tensor]
"""Name of a node -> its value."""

TOKENS = 16
"""The most tokens of a sequence. All values of a program for these tokens are in memory."""

SEQUENCES = 2

_SHOWN = 4
"""The most tensors of a place that are printed."""


@dataclass(frozen=True)
class LayerError:
    """The error of one place.

    Attributes:
        where: the paths of its modules.
        op: the op that computes the value, such as "ew.rope".
        tensors: the tensors of the checkpoint on which the value depends, but no value of an earlier place.
        error: root mean square of the difference, divided by that of the value.
    """

    where: str
    op: str
    tensors: tuple[str, ...]
    error: float

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - _SHOWN} more" if len(self.tensors) > _SHOWN else ""
        tensors = f", tensor {', '.join(self.tensors[:_SHOWN])}{more}" if self.tensors else ""
        return f"{self.where or 'the model'} ({self.op}{tensors}) by {100 * self.error:.3g} %"


def layer_errors(
    before: Program, after: Program, sequences: Sequence[torch.Tensor], cache: WeightCache
) -> list[LayerError]:
    """Returns the relative error of each place where both programs compute a value, the largest first.

    A place is a call with the same name in both programs; copies of a program and passes keep names. A call that only
    ``after`` has is also a place if it replaces a call that only ``before`` has, as an argument of a common call.
    """
    few = [s[:TOKENS] for s in sequences[:SEQUENCES]]
    values: Values = {}

    def keep(node: Node, value: Any) -> None:
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_floating_point():
            values[node.name] = value

    FastEvaluation(before, cache).evaluate(packed_inputs(before, few), keep)
    places = _places(before, after)
    tensors = _tensors(before, after, places)
    fast, errors = FastEvaluation(after, cache), list[LayerError]()

    def compute(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = fast.compute(node, args, kwargs)
        if node not in places or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        expected = values.get(places[node])
        if expected is None or expected.numel() != value.numel():
            return value
        expected = expected.reshape(value.shape)
        errors.append(LayerError(join_where(node.meta[WHERE]), _op(node), tensors[node], _relative(value, expected)))
        return expected.to(value.dtype)

    after.evaluate(packed_inputs(after, few), compute=compute, read=fast.read)
    return sorted(errors, key=lambda e: -e.error)


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    # What masks hold is infinite in both.
    finite = expected.isfinite()
    difference = torch.where(finite, value.double() - expected, 0.0).norm()
    size = torch.where(finite, expected, 0.0).double().norm()
    if not torch.equal(finite, value.isfinite()):
        return float("inf")
    return float(difference / size) if size else float(difference)


def _places(before: Program, after: Program) -> dict[Node, str]:
    """Returns call of ``after`` -> name of the call of ``before`` with which its value is compared."""
    old = {n.name: n for n in before.graph.nodes}
    new = {n.name: n for n in after.graph.nodes}
    places: dict[Node, str] = {}
    for name, node in new.items():
        if name not in old or old[name].target != node.target:
            continue
        if node.op == "call_function":
            places[node] = name
        for argument, replaced in _pairs((node.args, node.kwargs), (old[name].args, old[name].kwargs)):
            if argument.op == "call_function" and argument.name not in old and replaced.name not in new:
                places.setdefault(argument, replaced.name)
    return places


def _pairs(new: object, old: object) -> Iterator[tuple[Node, Node]]:
    """Yields pairs of nodes that are at the same position in the arguments of two calls."""
    if isinstance(new, Node) and isinstance(old, Node):
        yield new, old
    elif isinstance(new, Mapping) and isinstance(old, Mapping):
        for key in new.keys() & old.keys():
            yield from _pairs(new[key], old[key])
    elif isinstance(new, (list, tuple)) and isinstance(old, (list, tuple)):
        for one, other in zip(new, old, strict=False):
            yield from _pairs(one, other)


def _tensors(before: Program, after: Program, places: Mapping[Node, str]) -> dict[Node, tuple[str, ...]]:
    """Returns call of ``after`` -> the names of the source tensors that its value depends on.

    Tensors that an earlier compared value already depends on are left out.

    Args:
        before: the program before a pass.
        after: the program after it.
        places: the calls whose values are compared, with their names.
    """
    old_tensors = {n.name: _own_tensors(before, n) for n in before.graph.nodes if n.op == "call_function"}
    tensors: dict[Node, tuple[str, ...]] = {}
    for node in after.graph.nodes:
        if node.op == "call_function":
            names = dict.fromkeys(_own_tensors(after, node))
            names.update(dict.fromkeys(old_tensors.get(node.name, ())))  # a bias that was dropped is in the old one's
            for argument in node.all_input_nodes:
                if argument in tensors and argument not in places:
                    names.update(dict.fromkeys(tensors[argument]))
            tensors[node] = tuple(names)
    return tensors


def _own_tensors(program: Program, node: Node) -> tuple[str, ...]:
    exprs = [program.weight_of(a) for a in node.all_input_nodes]
    sources = dict.fromkeys(p.source for e in exprs if e is not None for p in e.parts(0))
    return tuple(s for s in sources if not s.startswith(COMPUTED))


def _op(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    return getattr(target, "__name__", str(target))
