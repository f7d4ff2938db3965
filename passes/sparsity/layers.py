"""Finds the layers of a program with the residual stream before and after each, and evaluates it without some of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Rejection
from enginewright.passes.framework.stepwise_evaluation import StepwiseEvaluation
from enginewright.passes.framework.token_sequences import mean_kl

from ..ir.program import Program, tensor_arguments
from ..ir.provenance import WHERE, layer_path

ew = torch.ops.ew


@dataclass(frozen=True)
class Layer:
    """A layer: its path, and the nodes of the residual stream [T, H] before and after it."""

    path: str
    before: Node
    behind: Node


def find_layers(program: Program) -> tuple[list[Layer], list[Rejection]]:
    """Returns the layers with an attention that can be removed, in order, and rejections of the others."""
    members: dict[str, list[Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            paths = {layer_path(path) for path in node.meta[WHERE]}
            members.setdefault(paths.pop() if len(paths) == 1 else "", []).append(node)
    layers: list[Layer] = []
    rejected: list[Rejection] = []
    for path, nodes in members.items():
        if not path or not any(n.target is ew.attention.default for n in nodes):
            continue
        layer = _layer(program, path, nodes)
        if isinstance(layer, str):
            rejected.append(Rejection(nodes[0].name, path, layer))
        else:
            layers.append(layer)
    return layers, rejected


def _layer(program: Program, path: str, nodes: Sequence[Node]) -> Layer | str:
    members = set(nodes)
    entering = {a for n in nodes for a in tensor_arguments(n) if a not in members and a.op == "call_function"}
    streams = []
    for behind in (n for n in nodes if any(user not in members for user in n.users)):
        used = _depends_on(behind, members)
        shape = program.shape(behind) if isinstance(behind.meta["val"], torch.Tensor) else None
        before = [a for a in entering & used if program.shape(a) == shape]
        if not before and not any(n.target is ew.attention.default for n in used):
            continue  # what other layers share, such as a table of positions, stays
        streams.append((behind, before))
    if len(streams) != 1:
        return "others read more of it than what it adds to the stream"
    behind, before = streams[0]
    if len(before) != 1:
        return "what it adds to is unclear"
    return Layer(path, before[0], behind)


def _depends_on(node: Node, own: set[Node]) -> set[Node]:
    """Returns the nodes in ``own`` from which a value is computed, and the nodes that these read directly."""
    dependencies, waiting = {node}, [node]
    while waiting:
        for argument in waiting.pop().all_input_nodes:
            if argument not in dependencies:
                dependencies.add(argument)
                if argument in own:
                    waiting.append(argument)
    return dependencies


class LeavingOut:
    """Evaluates the whole program once, and then without some layers or inputs of linears.

    Args:
        program: the program, which isn't changed.
        layers: its layers.
        sequences: token ids, [S] each.
        cache_bytes: the most bytes of weights that are cached between evaluations.
    """

    def __init__(
        self, program: Program, layers: Sequence[Layer], sequences: Sequence[torch.Tensor], cache_bytes: int
    ) -> None:
        self._run = StepwiseEvaluation(program, sequences, cache_bytes)
        self.similarity: dict[Layer, float] = {}
        """The mean cosine of a token's stream before a layer and behind it (Men et al. 2024)."""
        values = self._run.start()
        before: dict[Layer, torch.Tensor] = {}
        for node in self._run.calls:
            self._run.step(node, values)
            for layer in layers:
                if layer.before is node:
                    before[layer] = values[node]
                if layer.behind is node:
                    cosine = torch.nn.functional.cosine_similarity(before.pop(layer), values[node], dim=-1)
                    self.similarity[layer] = float(cosine.mean())
        self.reference: torch.Tensor = values[program.logits]

    def kl(self, left_out: Collection[Layer]) -> float:
        """Returns the mean KL(original || without these layers) per token, in nats."""
        skipped = {layer.behind: layer.before for layer in left_out}
        run, values = self._run, self._run.start()
        inside = _inside(run.calls, left_out, run.program)
        for node in run.calls:
            if node in skipped:
                values[node] = values[skipped[node]]
            elif node not in inside:
                run.step(node, values, keep=set(skipped.values()))
        return mean_kl(self.reference, values[run.program.logits])

    def kl_without(self, linear: Node, inputs: torch.Tensor) -> float:
        """Returns the mean KL(original || with these inputs of a linear set to zero) per token, in nats."""
        without = self._run.with_argument(linear, 0, lambda x: x.index_fill(-1, inputs, 0.0))
        return mean_kl(self.reference, self._run.finish(self._run.start(), 0, {linear: without}))


def _inside(nodes: Sequence[Node], left_out: Collection[Layer], program: Program) -> set[Node]:
    """Returns the calls that need not be computed without the layers ``left_out``."""
    behind = {layer.behind for layer in left_out}
    needed: set[Node] = {program.logits}
    skipped = {layer.behind: layer.before for layer in left_out}
    for node in reversed(nodes):
        if node in needed:
            needed.update([skipped[node]] if node in behind else node.all_input_nodes)
    return {node for node in nodes if node not in needed}
