"""Evaluates a program call by call, so that other evaluations can branch off before any call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from enginewright.passes.ir.program import Program

from .fast_evaluation import FastEvaluation, WeightCache
from .token_sequences import packed_inputs

Values = dict[Node, Any]
"""Maps each node to its result so far. A result that no later call reads is removed."""

Replacement = Callable[[Values], Any]
"""A function that computes a call's result in place of the op, from the results of the calls before it."""


class StepwiseEvaluation:
    """Evaluates a program over the same tokens several times, whole or from a call on, optionally with replaced calls::

        run = StepwiseEvaluation(program, sequences, cache_bytes)
        values = run.start()
        for at, node in enumerate(run.calls):
            logits = run.finish(dict(values), at, {node: replacement})
            run.step(node, values)

    Args:
        program: the program, which isn't changed.
        sequences: token ids, [S] each.
        cache_bytes: the most bytes of weights that are cached between runs.
        most_rows: the most tokens whose logits are computed; None for all.
    """

    def __init__(
        self, program: Program, sequences: Sequence[torch.Tensor], cache_bytes: int, most_rows: int | None = None
    ) -> None:
        self.program = program
        self.fast = FastEvaluation(program, WeightCache(cache_bytes))
        self.calls = [n for n in program.graph.nodes if n.op == "call_function"]
        self._last_use = {a: n for n in program.graph.nodes for a in n.all_input_nodes}
        self._inputs = packed_inputs(program, sequences, most_rows)

    def start(self) -> Values:
        """Returns the values of the program's inputs, the state before the first call."""
        return {node: self._inputs[name] for name, node in self.program.inputs.items()}

    def arguments(self, node: Node, values: Values) -> tuple[list[Any], dict[str, Any]]:
        """Returns the values of a call's arguments, by position and by name."""

        def value(n: Node) -> Any:
            return self.fast.read(str(n.target)) if n.op == "get_attr" else values[n]

        return [map_arg(a, value) for a in node.args], {k: map_arg(v, value) for k, v in node.kwargs.items()}

    def with_argument(self, node: Node, position: int, change: Callable[[Any], Any]) -> Replacement:
        """Returns a replacement that computes the call with a changed argument.

        ``position`` is the argument's index, ``change`` a function from its value to the changed value.
        """

        def compute(values: Values) -> Any:
            args, kwargs = self.arguments(node, values)
            args[position] = change(args[position])
            return self.fast.compute(node, args, kwargs)

        return compute

    def step(
        self, node: Node, values: Values, replacement: Replacement | None = None, keep: Collection[Node] = ()
    ) -> None:
        """Computes one call and adds its result to ``values``.

        Args:
            node: the call.
            values: the results so far. Those that no later call reads are removed, except for ``keep`` and the logits.
            replacement: computes the result in place of the op; None computes the op.
            keep: nodes whose results stay in ``values``.
        """
        with torch.no_grad():
            if replacement is not None:
                values[node] = replacement(values)
            else:
                values[node] = self.fast.compute(node, *self.arguments(node, values))
        for arg in node.all_input_nodes:
            if self._last_use[arg] is node and arg is not self.program.logits and arg not in keep:
                values.pop(arg, None)

    def finish(
        self, values: Values, first: int = 0, replacements: Mapping[Node, Replacement] | None = None
    ) -> torch.Tensor:
        """Computes the calls from index ``first`` on and returns the logits [R, V]. It changes ``values``.

        ``replacements`` has the functions that compute some of the calls in place of their ops.
        """
        for node in self.calls[first:]:
            self.step(node, values, (replacements or {}).get(node))
        logits: torch.Tensor = values[self.program.logits]
        return logits
