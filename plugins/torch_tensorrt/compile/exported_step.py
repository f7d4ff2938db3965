"""Exports a program as torch's ExportedProgram, the form that Torch-TensorRT compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx.node import Node, map_arg

from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import SYMBOLS, Program
from enginewright.passes.ops.library import NAMESPACE, REFERENCES

ew = torch.ops.ew

_WRITES = (ew.kv_write.default, ew.quantized_kv_write.default)

KEPT = (
    "combine_experts",
    "grouped_linear",
    "kv_write",
    "paged_attention",
    "quantized_grouped_linear",
    "quantized_kv_write",
    "quantized_paged_attention",
    "route_experts",
)
"""The ``ew`` ops that PyTorch runs by their references. These read numbers that a graph doesn't have, or write in
place.
"""

LEAST, MOST = 2, 4096
"""The bounds of each of the program's sizes. torch takes a size of 1 for a constant, and TensorRT needs an upper
bound.
"""

_EXAMPLE = (5, 40)
"""The tokens of the requests with which the program is traced: two numbers that no other size has."""


@dataclass(frozen=True)
class ExportedStep:
    """A program as an ExportedProgram that computes logits and written caches.

    Attributes:
        exported: the ExportedProgram.
        inputs, results: the names of its inputs and results, in order.
        sizes: for each input, the variable dimensions: axis -> size.
        dynamic: the same for torch.export.
        example: the inputs with which it was traced.
    """

    exported: ExportedProgram
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    sizes: tuple[dict[int, sympy.Expr], ...]
    dynamic: tuple[dict[int, Any], ...]
    example: tuple[torch.Tensor, ...]

    def kept(self) -> tuple[Any, ...]:
        """The ``ew`` ops that remain in the graph."""
        nodes = self.exported.graph.nodes
        targets = {node.target for node in nodes if getattr(node.target, "namespace", None) == NAMESPACE}
        return tuple(sorted(targets, key=str))

    def shapes(self, size: int) -> list[tuple[int, ...]]:
        """Returns each input's shape if all variable sizes are ``size``."""
        return [
            tuple(_at(varying[i], size) if i in varying else n for i, n in enumerate(example.shape))
            for example, varying in zip(self.example, self.sizes, strict=True)
        ]


def exported_step(program: Program) -> ExportedStep:
    """Exports a program with dynamic sizes. ``ew`` ops, except ``KEPT``, are replaced by their references in ATen ops.

    All weights are evaluated, and are in memory in the program's format.
    """
    module = _Step(program)
    example = step_example(program, _EXAMPLE)
    named = {name: Dim(name, min=LEAST, max=MOST) for name in SYMBOLS}
    sizes = tuple(_varying(program, node) for node in program.inputs.values())
    dynamic = tuple({i: _dim(expr, named) for i, expr in varying.items()} for varying in sizes)
    with torch.no_grad():
        exported = torch.export.export(module, example, dynamic_shapes={"inputs": dynamic}, strict=False)
        table = {getattr(ew, name).default: function for name, function in REFERENCES.items() if name not in KEPT}
        exported = exported.run_decompositions(table)
    return ExportedStep(exported, module.inputs, ("logits", *module.written), sizes, dynamic, example)


def step_example(program: Program, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Returns the inputs of a step of new requests of these lengths, always the same, with caches of their own."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(program.shape(program.logits)[-1])
    ids = [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]
    inputs = packed_inputs(program, ids)
    return tuple(inputs[name].clone(memory_format=torch.contiguous_format) for name in program.inputs)


class _Step(nn.Module):
    """A module that runs a program's graph. ``written`` has the caches that it returns, in the order of the inputs."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inputs = tuple(program.inputs)
        written = {str(a.target) for node in program.nodes_of(*_WRITES) for a in _caches(node)}
        self.written = tuple(name for name in self.inputs if name in written)
        self._logits = program.logits
        self._nodes = [node for node in program.graph.nodes if node.op != "output"]
        self._buffer = {name: f"weight_{i}" for i, name in enumerate(program.weights)}
        for name, buffer in self._buffer.items():
            self.register_buffer(buffer, program.weights[name].evaluate())

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values_by_name = dict(zip(self.inputs, inputs, strict=True))
        values: dict[Node, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = values_by_name[str(node.target)]
            elif node.op == "get_attr":
                values[node] = getattr(self, self._buffer[str(node.target)])
            else:
                assert callable(node.target)
                args, kwargs = (map_arg(part, values.__getitem__) for part in (node.args, node.kwargs))
                values[node] = node.target(*args, **kwargs)
                if node.target in _WRITES:
                    values_by_name |= zip((str(a.target) for a in _caches(node)), values[node], strict=True)
        return (values[self._logits], *(values_by_name[name] for name in self.written))


def _caches(write: Node) -> list[Node]:
    """Returns the caches that a write replaces: the first arguments of its call."""
    return [a for a in write.args[: len(write.meta["val"])] if isinstance(a, Node)]


def _varying(program: Program, node: Node) -> dict[int, sympy.Expr]:
    return {i: size for i, size in enumerate(program.shape(node)) if size.free_symbols}


def _at(expr: sympy.Expr, size: int) -> int:
    return int(expr.subs(dict.fromkeys(expr.free_symbols, size)))


def _dim(size: sympy.Expr, named: dict[str, Any]) -> Any:
    """Returns a size such as T or B + 1 as a dimension of torch.export. ``named`` has the dimensions by symbol."""
    (symbol,) = size.free_symbols
    more = int(size - symbol)
    return named[str(symbol)] + more if more else named[str(symbol)]
