"""What each layer costs alone with fewer heads, from one evaluation of the program.

Where a layer's attention is called its heads are fitted in every number; with the fewest what follows is computed anew,
and the KL of the logits is measured. Small errors cost KL in proportion to their square, so the other numbers are
predicted from the squared error that each makes in what the attention adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from enginewright.passes.attention.kv_sites import Site
from enginewright.passes.attention.observe_heads import HeadObserver
from enginewright.passes.attention.regroup_heads import Regrouped, regroup
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.kv_options import KvOptions
from enginewright.passes.framework.step_inputs import packed_inputs
from enginewright.passes.ir.program import Program

from .format_sensitivity import cache_bytes, mean_kl


@dataclass(frozen=True)
class LayerUnit:
    """An attention, and the numbers of heads that it can have, from those that it has to the fewest."""

    site: Site
    counts: tuple[int, ...]


def measure_layers(
    program: Program,
    units: Sequence[LayerUnit],
    options: KvOptions,
    sequences: Sequence[torch.Tensor],
    progress: Callable[[int, int, str], None],
    room: int | None = None,
) -> list[tuple[float, ...]]:
    """The predicted KL, in nats a token, of each number of heads of each layer; 0 of those that it has.

    Args:
        program: normalised, in 32-bit floats.
        units: of that program.
        options: how heads become fewer.
        sequences: token ids, [S] each.
        progress: told how many layers are done, of how many, and where the next is.
        room: bytes that this may take; see ``PassContext``.
    """
    return _Walk(program, units, options, progress, room).run(sequences)


class _Walk:
    """One evaluation of the program, from which others branch off at each attention."""

    def __init__(
        self,
        program: Program,
        units: Sequence[LayerUnit],
        options: KvOptions,
        progress: Callable[[int, int, str], None],
        room: int | None,
    ) -> None:
        self.program, self.units, self.options, self.progress = program, units, options, progress
        self.fast = FastEvaluation(program, WeightCache(cache_bytes(room)))
        self.observer = HeadObserver(program, [unit.site for unit in units], self.fast)
        self.nodes = [n for n in program.graph.nodes if n.op == "call_function"]
        self.last_use = {a: n for n in program.graph.nodes for a in n.all_input_nodes}
        self.unit_of = {unit.site.attention: unit for unit in units}

    def run(self, sequences: Sequence[torch.Tensor]) -> list[tuple[float, ...]]:
        inputs = packed_inputs(self.program, sequences)
        values: dict[Node, Any] = {n: inputs[name] for name, n in self.program.inputs.items()}
        reference = self._finish(dict(values), 0, {})
        costs: list[tuple[float, ...]] = []
        for at, node in enumerate(self.nodes):
            args, kwargs = self._given(node, values)
            self.observer.before(node, args)
            unit = self.unit_of.get(node)
            if unit is not None:
                self.progress(len(costs), len(self.units), unit.site.path)
                seen = self.observer.seen(unit.site, args, kwargs)
                found = [regroup(seen, count, self.options) for count in unit.counts[1:]]
                costs.append(self._costs(unit, found, dict(values), at, reference))
            self._step(node, values, {})
            self.observer.after(node, values[node])
        self.progress(len(self.units), len(self.units), "")
        return costs

    def _costs(
        self, unit: LayerUnit, found: Sequence[Regrouped], values: dict[Node, Any], at: int, reference: torch.Tensor
    ) -> tuple[float, ...]:
        fewest = found[-1]
        instead = {unit.site.attention: fewest.context, unit.site.output: fewest.output}
        cost = mean_kl(reference, self._finish(values, at, instead))
        share = cost / max(fewest.error, torch.finfo(torch.float32).tiny)
        return (0.0, *(share * one.error for one in found))

    def _finish(self, values: dict[Node, Any], at: int, instead: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """The logits [R, V] from the node at that place on, with another attention's result and projection."""
        for node in self.nodes[at:]:
            self._step(node, values, instead)
        logits: torch.Tensor = values[self.program.logits]
        return logits

    def _given(self, node: Node, values: Mapping[Node, Any]) -> tuple[list[Any], dict[str, Any]]:
        def value(n: Node) -> Any:
            return self.fast.read(str(n.target)) if n.op == "get_attr" else values[n]

        return [map_arg(a, value) for a in node.args], {k: map_arg(v, value) for k, v in node.kwargs.items()}

    def _step(self, node: Node, values: dict[Node, Any], instead: Mapping[Node, torch.Tensor]) -> None:
        given = instead.get(node)
        if given is not None and node in self.unit_of:
            values[node] = given
        else:
            args, kwargs = self._given(node, values)
            if given is not None:
                args[1] = given
            with torch.no_grad():
                values[node] = self.fast.compute(node, args, kwargs)
        for arg in node.all_input_nodes:
            if self.last_use[arg] is node and arg is not self.program.logits:
                values.pop(arg, None)
