"""How far each format of each unit takes a program from its source, predicted from one evaluation a unit.

A unit is given its smallest format, its weight and its input rounded as that has it, and what follows is computed
anew: the KL of the logits is measured. Small errors cost KL in proportion to their square, so the unit's other formats
are predicted from the squared error that each makes in what the unit itself gives. Of large models whole layers are
changed at a time, and their KL is divided among their units by these errors, relative to what they give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from enginewright.passes.framework.divergence import mean_kl as mean_kl
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache, decoded
from enginewright.passes.framework.step_inputs import packed_inputs
from enginewright.passes.ir.prequantized import CodeFormat
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.quantized import quantized
from enginewright.passes.ir.two_of_four import TwoOfFour
from enginewright.passes.quantization.choose_formats import WEIGHT_ARGUMENT
from enginewright.plugins.ops.experts import grouped_linear
from enginewright.plugins.ops.quantization import quantize_activation
from enginewright.plugins.shared.contracts import WeightFormat

from .units import Unit, weight_node

ew = torch.ops.ew

WORK = 1 << 43
"""Most parameters times tokens of all evaluations together: some minutes on two cores, however large the model."""

FEWEST_TOKENS = 64
_ENOUGH_TOKENS = 128
"""With fewer for each unit, layers are changed as a whole instead."""

_KEEP_BYTES = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Which units are changed together, by index, and how many tokens they are looked at with."""

    groups: tuple[tuple[int, ...], ...]
    tokens: int


def plan_measurements(units: Sequence[Unit], parameters: int, most_tokens: int) -> Plan:
    """Units one by one, or layer by layer where that would take too long.

    Half a program, in the mean, follows a unit; parameters * tokens is half its multiplications and additions.
    """

    def affordable(groups: int) -> int:
        return min(most_tokens, WORK // max(1, groups * parameters))

    tokens = affordable(len(units))
    if tokens >= min(_ENOUGH_TOKENS, most_tokens):
        return Plan(tuple((i,) for i in range(len(units))), tokens)
    layers: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        layers.setdefault(unit.layer, []).append(i)
    return Plan(tuple(tuple(g) for g in layers.values()), max(FEWEST_TOKENS, affordable(len(layers))))


def measure_sensitivities(
    program: Program,
    units: Sequence[Unit],
    groups: Sequence[Sequence[int]],
    sequences: Sequence[torch.Tensor],
    progress: Callable[[int, int, str], None],
    room: int | None = None,
) -> list[tuple[float, ...]]:
    """The predicted KL, in nats a token, of each format of each unit.

    Args:
        program: paged, in 32-bit floats.
        units: of that program.
        groups: which of them, by index, are changed together.
        sequences: token ids, [S] each.
        progress: told how many groups are done, of how many, and where the next is.
        room: bytes that this may take; see ``PassContext``.
    """
    return _Walk(program, units, groups, progress, room).run(sequences)


def cache_bytes(room: int | None) -> int:
    """How many bytes of weights are kept while programs run, of so much room."""
    return _KEEP_BYTES if room is None else min(_KEEP_BYTES, room // 4)


class _Walk:
    """One evaluation of the program, from which others branch off where a group begins."""

    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        groups: Sequence[Sequence[int]],
        progress: Callable[[int, int, str], None],
        room: int | None,
    ) -> None:
        self.program, self.units, self.groups, self.progress = program, units, groups, progress
        self.fast = FastEvaluation(program, WeightCache(cache_bytes(room)))
        self.nodes = [n for n in program.graph.nodes if n.op == "call_function"]
        self.last_use = {a: n for n in program.graph.nodes for a in n.all_input_nodes}
        self.unit_of = {n: i for i, u in enumerate(units) for n in u.nodes}

    def run(self, sequences: Sequence[torch.Tensor]) -> list[tuple[float, ...]]:
        inputs = packed_inputs(self.program, sequences)
        values: dict[Node, Any] = {n: inputs[name] for name, n in self.program.inputs.items()}
        reference = self._finish(dict(values), 0, {})
        begins = {min((n for i in g for n in self.units[i].nodes), key=self.nodes.index): g for g in self.groups}
        costs: dict[int, float] = {}
        errors = [[0.0] * len(u.formats) for u in self.units]
        for at, node in enumerate(self.nodes):
            if node in begins:
                group = begins[node]
                self.progress(len(costs), len(self.groups), self.units[group[0]].where)
                changed = {n: self.units[i].formats[self.units[i].smallest] for i in group for n in self.units[i].nodes}
                costs[group[0]] = mean_kl(reference, self._finish(dict(values), at, changed))
            if node in self.unit_of:
                unit = self.unit_of[node]
                for k, error in enumerate(self._errors(node, values, self.units[unit].formats)):
                    errors[unit][k] += error
            self._step(node, values, None)
        self.progress(len(self.groups), len(self.groups), "")
        return [costs_of for _, costs_of in sorted(self._predict(costs, errors))]

    def _predict(
        self, costs: dict[int, float], errors: Sequence[Sequence[float]]
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        for group in self.groups:
            measured = [errors[i][self.units[i].smallest] for i in group]
            share = costs[group[0]] / max(sum(measured), torch.finfo(torch.float32).tiny)
            for i in group:
                yield i, tuple(share * e for e in errors[i])

    def _finish(self, values: dict[Node, Any], at: int, changed: dict[Node, WeightFormat]) -> torch.Tensor:
        """The logits [R, V] from the node at that place on, with some units in other formats."""
        for node in self.nodes[at:]:
            self._step(node, values, changed.get(node))
        logits: torch.Tensor = values[self.program.logits]
        return logits

    def _step(self, node: Node, values: dict[Node, Any], weight_format: WeightFormat | None) -> None:
        if weight_format is None:

            def value(n: Node) -> Any:
                return self.fast.read(str(n.target)) if n.op == "get_attr" else values[n]

            args = [map_arg(a, value) for a in node.args]
            kwargs = {k: map_arg(v, value) for k, v in node.kwargs.items()}
            with torch.no_grad():
                values[node] = self.fast.compute(node, args, kwargs)
        else:
            values[node] = self._rounded(node, values, weight_format)
        for arg in node.all_input_nodes:
            if self.last_use[arg] is node and arg is not self.program.logits:
                values.pop(arg, None)

    def _errors(self, node: Node, values: dict[Node, Any], formats: Sequence[WeightFormat]) -> list[float]:
        """The squared error that each format makes in what a node gives, relative to that."""
        exact = self._product(node, values, lambda x: x, self._weight(node))
        size = max(float(exact.square().sum()), torch.finfo(torch.float32).tiny)
        return [float((self._rounded(node, values, f) - exact).square().sum()) / size for f in formats]

    def _rounded(self, node: Node, values: dict[Node, Any], weight_format: WeightFormat) -> torch.Tensor:
        expr = self.program.weight_of(weight_node(node))
        assert expr is not None
        code_format = CodeFormat.of(weight_format.for_inputs(expr.shape[-1]))
        if weight_format.sparsity != "dense":
            expr = TwoOfFour(expr)  # by magnitude; what the recipe's way of choosing costs, the check measures
        if code_format is not None:
            parts = [p.evaluate() for p in quantized(expr, code_format) if p is not None]
            rounded = decoded(*parts, group=code_format.group_size)
        else:
            rounded = expr.evaluate().float() if isinstance(expr, TwoOfFour) else self._weight(node)
            rounded = rounded.bfloat16().float() if weight_format.storage == "bf16" else rounded
        return self._product(node, values, lambda x: _rounded_activation(x, weight_format), rounded)

    def _weight(self, node: Node) -> torch.Tensor:
        return self.fast.read(str(weight_node(node).target))

    def _product(
        self, node: Node, values: dict[Node, Any], x: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor
    ) -> torch.Tensor:
        """What a node gives with this weight, of its input after ``x``."""
        first = node.args[0]
        assert isinstance(first, Node)
        given = values[first]
        if node.target is ew.embedding.default:
            return weight[given.long()]
        bias, starts = node.args[WEIGHT_ARGUMENT[node.target] + 1], node.args[1]
        added = self.fast.read(str(bias.target)) if isinstance(bias, Node) else None
        if node.target is ew.grouped_linear.default:
            assert isinstance(starts, Node)
            return grouped_linear(x(given), values[starts], weight, added)
        return torch.nn.functional.linear(x(given), weight, added)


def _rounded_activation(x: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    if weight_format.activation == "int8":
        group = weight_format.activation_group_size
        values, scales, _ = quantize_activation(x, group)
        return decoded(values, scales, group=group)
    return x.bfloat16().float() if weight_format.activation == "bf16" else x
