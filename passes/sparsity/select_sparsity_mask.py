"""Chooses the two of every four weights along K that a sparse linear keeps: by magnitude, Wanda or SparseGPT.

    magnitude   the largest |w|
    wanda       the largest |w| times the norm of its column's inputs; Sun et al. 2023, https://arxiv.org/abs/2306.11695
    sparsegpt   those whose removal the kept ones can't compensate for, with that compensation; see sparsegpt.py

The last two evaluate the program once on calibration tokens, layer by layer. The inputs of a layer are computed with
the sparse layers before it. The sparse weight is an expression over the original one, which is evaluated when it is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult

from ..formats.weight_format import WeightFormat
from ..ir.chosen_codes import ChosenCodes
from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.scaled import Factors
from ..ir.two_of_four import Sparsified, TwoOfFour, best_two
from ..ir.weights import WeightExpr
from ..ops.epilogue import finish_linear
from ..quantization.calibrated_walk import Look, as_multiplied, calibration_tokens, walk
from ..quantization.choose_formats import FORMAT, HAS_FORMATS, LINEARS, weight_node
from ..quantization.gptq import Hessian
from .sparsegpt import factorize_by_fours, sparsegpt, sparsegpt_codes

ERROR, MAGNITUDE_ERROR = "relative error", "magnitude: relative error"
"""Names of metrics: the error ||X W^T - X S^T|| / ||X W^T|| of a linear's output, for at most MEASURED tokens.

S is the weight that the recipe's method keeps, and the weight that "magnitude" would keep.
"""

MEASURED = 512

MOST_TOKENS = 8192
"""The most calibration tokens."""


class SelectSparsityMask(Pass):
    """Makes the weights of linears sparse if their format has the sparsity 2:4.

    A weight that has the form already stays unchanged, bit for bit, except for the rounding to its format. SparseGPT
    chooses integers at the same time.
    """

    name = "select_sparsity_mask"
    exact = False
    requires = (HAS_FORMATS,)

    def wanted(self, context: PassContext) -> bool:
        return any(f.sparsity != "dense" for f in context.recipe.weights.formats)

    def needs_tokens(self, context: PassContext) -> bool:
        return context.recipe.weights.sparsify != "magnitude"

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        by_weight: dict[Node, list[Node]] = {}
        for node in program.nodes_of(*LINEARS):
            if node.meta[FORMAT].sparsity != "dense":
                by_weight.setdefault(weight_node(node), []).append(node)
        if not by_weight:
            return result
        result.matched = sum(map(len, by_weight.values()))
        if context.recipe.weights.sparsify == "magnitude":
            for weight in by_weight:
                _replace(program, weight, TwoOfFour(_expression(program, weight)))
            return result
        first = [nodes[0] for nodes in by_weight.values()]
        working = {node: _working_bytes(program, node) for node in first}
        sequences = calibration_tokens(program, context, f"the pass {self.name}", working, MOST_TOKENS)
        sweep = _Sweep(program, context, result, len(first))
        targets: dict[Node, Look] = {n: sweep.look for nodes in by_weight.values() for n in nodes}
        walk(program, targets, sequences)
        for weight, sparse in sweep.kept.items():
            _replace(program, weight, sparse)
        return result


def _expression(program: Program, weight: Node) -> WeightExpr:
    expr = program.weight_of(weight)
    assert expr is not None
    return expr


def _replace(program: Program, weight: Node, kept: WeightExpr) -> None:
    """Makes all readers of a weight, which are sparse linears, read the sparse weight ``kept``."""
    new = program.weight(f"{weight.target}.2of4", kept, where=weight.meta[WHERE])
    for user in list(weight.users):
        user.replace_input_with(weight, new)


def _working_bytes(program: Program, node: Node) -> int:
    """Returns the bytes that choosing a linear's weights needs in addition to inputs and outputs.

    These are copies of the weight, the Hessian and its factor.
    """
    rows, size = program.value(weight_node(node)).shape
    return 24 * prod((rows, size)) + 20 * size * size


class _Sweep:
    """Makes weights sparse while the program is evaluated: ``look`` computes each sparse linear.

    Attributes:
        kept: the sparse weight, by the node of the original one.
    """

    def __init__(self, program: Program, context: PassContext, result: PassResult, total: int) -> None:
        self.kept: dict[Node, WeightExpr] = {}
        self._program, self._context, self._result, self._total = program, context, result, total

    def look(self, node: Node, args: Sequence[Any]) -> torch.Tensor:
        """Returns the result of a linear with its sparse weight, which is chosen first. ``args`` has the values of its
        arguments.
        """
        x, bias, weight = as_multiplied(args[0], node.meta[FORMAT]), args[2], weight_node(node)
        if weight not in self.kept:
            where = join_where(node.meta[WHERE])
            self._context.progress(len(self.kept), self._total, where)
            self.kept[weight] = self._choose(node, where, x.reshape(-1, x.shape[-1]), args[1].float())
        sparse_weight = self.kept[weight].evaluate().float()
        return finish_linear(torch.nn.functional.linear(x, sparse_weight, bias), *args[3:])

    def _choose(self, node: Node, where: str, x: torch.Tensor, value: torch.Tensor) -> WeightExpr:
        expr = _expression(self._program, weight_node(node))
        sparse: WeightExpr
        if self._context.recipe.weights.sparsify != "sparsegpt":
            norms = x.square().sum(0).sqrt()[None]  # [1, K]
            sparse = TwoOfFour(expr, Factors("input norms", norms))
        else:
            sparse = self._sparsegpt(expr, x, value, node.meta[FORMAT])
        sample = x[:: -(-len(x) // MEASURED) or 1]
        exact = sample @ value.t()
        by_magnitude = torch.where(best_two(value.abs()), value, 0.0)
        for name, other in ((ERROR, sparse.evaluate().float()), (MAGNITUDE_ERROR, by_magnitude)):
            error = (sample @ (other - value).t()).norm() / exact.norm().clamp(min=1e-30)
            self._result.metrics.append(Metric(where, name, float(error)))
        return sparse

    def _sparsegpt(self, expr: WeightExpr, x: torch.Tensor, value: torch.Tensor, wanted: WeightFormat) -> WeightExpr:
        hessian = Hessian(x.shape[1])
        hessian.add(x)
        factor = factorize_by_fours(hessian.sum)
        code_format, scratch = CodeFormat.of(wanted), self._context.scratch
        file = None if scratch is None else scratch / f"{len(self.kept)}.kept"
        if code_format is None:
            return Sparsified.from_values(expr, sparsegpt(value, factor), file)
        # The base says that zeros are kept in place; what stands for it are the integers.
        base = TwoOfFour(expr)
        return ChosenCodes.of(base, code_format, sparsegpt_codes(value, hessian.sum, factor, code_format), file)
