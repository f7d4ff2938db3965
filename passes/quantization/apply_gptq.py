"""Integers of 4 to 6 bits chosen by what layers give on calibration tokens (GPTQ), one layer after the other.

One run of the program over all tokens goes through it call by call. Where a linear is to have integers, its input is
there as the integers of the layers before make it, rounded as it will be: from it come the Hessian, the integers, and
with these the output that the next layers see. So memory holds one layer's weight and Hessian at a time, whatever the
model's size; the integers go to files where the context has a folder for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult, Rejection, describe_node
from enginewright.passes.framework.evaluation_memory import evaluation_bytes
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.token_sequences import packed_inputs, spread
from enginewright.passes.framework.weight_formats import GptqOptions, chooses
from enginewright.runtime.shared.errors import CapacityError, PassError

from ..formats.weight_format import WeightFormat
from ..ir.chosen_codes import ChosenCodes
from ..ir.prequantized import CodeFormat, Codes, Prequantized, decode
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.quantized import round_rows
from ..ir.stacked_weights import pieces
from ..ir.two_of_four import is_two_of_four
from ..ir.weights import Cast, Concat, Slice, WeightExpr
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT
from .gptq import factorize, gptq
from .held_out import FEWEST_TOKENS, ROWS, LayerInputs, OutputErrors, as_multiplied, tensors_of

ew = torch.ops.ew

LARGEST_INPUT = "largest input"
"""The name of a metric: the largest magnitude of what a linear is given."""

TOKENS_USED = "tokens used"
"""The name of the metric for the number of calibration tokens that fit into the memory budget."""


class ApplyGptq(Pass):
    """Gives the weights of 2 to 6 bits integers that GPTQ chose, if the recipe's method is "gptq".

    Cases that keep other integers, which is recorded:

    1. A weight that its file has as integers of that very format keeps them.
    2. An expert that too few tokens reach is rounded to the nearest.
    3. So is a weight, or an expert, whose output the nearest integers change less on tokens that are held out: GPTQ
       fits what few tokens happen to show, too.
    """

    name = "apply_gptq"
    exact = False
    requires = (HAS_FORMATS,)

    def needs_tokens(self, context: PassContext) -> bool:
        return context.recipe.weights.method == "gptq"

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        if context.recipe.weights.method != "gptq":
            return result
        targets = _targets(program, result)
        if not targets:
            return result
        sequences = _fitting(program, context, targets, result)
        sweep = _Sweep(program, context, targets, result)
        program.evaluate(packed_inputs(program, sequences), compute=sweep.compute, read=sweep.read)
        for weight, chosen in sweep.chosen.items():
            _replace(program, weight, chosen)
        return result


def _targets(program: Program, result: PassResult) -> list[Node]:
    """Linears of few bits with a weight that isn't integers already, in the program's order."""
    targets = []
    for node in program.nodes_of(*LINEARS):
        if not chooses("gptq", node.meta[FORMAT]):
            continue
        expr = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
        assert expr is not None  # ChooseFormats gives no format to a weight that is computed
        if isinstance(expr, ChosenCodes):
            continue  # together with what of it is kept
        if _is_chosen(expr, CodeFormat.of(node.meta[FORMAT])):
            reason = "its file has integers of that format, which it keeps"
            result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason))
        else:
            targets.append(node)
    return targets


def _fitting(
    program: Program, context: PassContext, targets: Sequence[Node], result: PassResult
) -> Sequence[torch.Tensor]:
    """The calibration sequences, or as many of them, evenly spread, as the context has room for.

    Raises CapacityError if it has none for a single one.
    """
    sequences = context.calibration
    if context.memory_budget is None:
        return sequences
    working = {node: _working_bytes(program, node) for node in targets}
    lengths = sorted(map(len, sequences), reverse=True)

    def needed(count: int) -> int:
        return evaluation_bytes(program, sum(lengths[:count]), working, until=targets[-1])

    count = len(sequences)
    while count > 1 and needed(count) > context.memory_budget:
        count = count * 3 // 4
    if (least := needed(count)) > context.memory_budget:
        raise CapacityError(
            f"max_memory: choosing the integers of the largest layer takes {least:,} bytes, and there are "
            f"{context.memory_budget:,} beside what the process has already",
            hint=f"Allow {least - context.memory_budget:,} bytes more, or take a recipe without calibration.",
        )
    if count < len(sequences):
        reason = f"only {count} of {len(sequences)} sequences fit into the memory that there may be"
        result.rejected.append(Rejection(targets[0].name, "calibration", reason))
    chosen = spread(sequences, count)
    result.metrics.append(Metric("calibration", TOKENS_USED, sum(map(len, chosen))))
    return chosen


def _working_bytes(program: Program, node: Node) -> int:
    """Returns the bytes that choosing a linear's integers takes besides its inputs and outputs."""
    *experts, rows, size = program.value(_weight(node)).shape
    # The weight as it is read, reordered and rounded, and all experts' integers; the Hessian, and its factor in
    # float64 and float32.
    return 16 * rows * size + 3 * prod(experts) * rows * size + 16 * size * size


def _is_chosen(expr: WeightExpr, code_format: CodeFormat | None) -> bool:
    match expr:
        case Prequantized():
            return expr.code_format == code_format
        case Concat():
            return expr.dim == 0 and all(_is_chosen(b, code_format) for b in expr.bases)
        case Slice():
            return expr.dim == 0 and _is_chosen(expr.base, code_format)
        case Cast():
            return expr.to == torch.float32 and _is_chosen(expr.base, code_format)
        case _:
            return False


def _replace(program: Program, weight: Node, chosen: ChosenCodes) -> None:
    """Whatever has the weight in the same format gets the integers: a tied embedding too."""
    new = program.weight(f"{weight.target}.gptq", chosen, where=weight.meta[WHERE])
    for user in list(weight.users):
        if FORMAT in user.meta and CodeFormat.of(user.meta[FORMAT]) == chosen.format:
            user.replace_input_with(weight, new)


class _Sweep:
    """``compute`` and ``read`` for the one run. ``chosen``: integers by the node of the weight that they are for."""

    def __init__(self, program: Program, context: PassContext, targets: Sequence[Node], result: PassResult) -> None:
        self.chosen: dict[Node, ChosenCodes] = {}
        self._program, self._context, self._result = program, context, result
        self._left = dict.fromkeys(targets)
        self._total = len(targets)
        self._fast = FastEvaluation(program, WeightCache(0))  # each weight is used once
        self._weights = {_weight(n).target for n in targets}
        self._readers = Counter((n.args[0], n.meta[FORMAT]) for n in targets)
        self._inputs: dict[tuple[Any, WeightFormat], LayerInputs] = {}

    def read(self, name: str) -> torch.Tensor:
        """A weight; those that are to have integers, and what comes behind the last of these, have a shape alone."""
        if not self._left or name in self._weights:
            expr = self._program.weights[name]
            return torch.empty(expr.shape, dtype=expr.dtype, device="meta")
        return self._fast.read(name)

    def compute(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call's value; None behind the last linear, where nothing is left to look at."""
        if not self._left:
            return None
        if node not in self._left:
            return self._fast.compute(node, args, kwargs)
        where = join_where(node.meta[WHERE])
        self._context.progress(self._total - len(self._left), self._total, where)
        del self._left[node]
        x, *between, _, bias = args
        low, high = torch.aminmax(x)
        self._result.metrics.append(Metric(where, LARGEST_INPUT, max(-float(low), float(high))))
        rows = x.reshape(-1, x.shape[-1])  # [M, K]
        starts = between[0].tolist() if between else [0, len(rows)]
        weight = _weight(node)
        if weight not in self.chosen:
            self._choose(node, weight, [rows[a:b] for a, b in pairwise(starts)])
            self._result.matched += 1
        if not self._left:
            self._context.progress(self._total, self._total, where)
            return None
        out = x.new_zeros((len(rows), self.chosen[weight].shape[-2]))
        self._multiply(node, self.chosen[weight], rows, starts, bias if between else [bias], out)
        return out.view(*x.shape[:-1], -1)

    def _choose(self, node: Node, weight: Node, rows: Sequence[torch.Tensor]) -> None:
        """Chooses the integers of all experts, or of the one matrix; ``rows`` [M, K] are what each is given."""
        expr = self._program.weight_of(weight)
        assert expr is not None
        where, code_format = join_where(node.meta[WHERE]), CodeFormat.of(node.meta[FORMAT])
        assert code_format is not None
        grouped = len(expr.shape) == 3
        codes_of_matrices: list[Codes] = []
        few: list[int] = []
        worse: list[int] = []
        errors = OutputErrors()
        for matrix, tokens in zip(_matrices(expr), rows, strict=True):
            nearest = _nearest_codes(matrix, code_format)
            if len(tokens) < FEWEST_TOKENS and grouped:
                few.append(len(codes_of_matrices))
                codes_of_matrices.append(nearest)
                continue
            inputs = self._input_of(node, tokens)
            options = self._context.recipe.weights.gptq or GptqOptions()
            inputs.factor = inputs.factor or factorize(
                inputs.hessian.sum, activation_order=options.activation_order, damping=options.damping
            )
            sparse = is_two_of_four(expr)
            chosen = gptq(matrix, inputs.hessian.sum, code_format, inputs.factor, keep_zeros=sparse)
            keeps = errors.add(inputs, matrix, chosen, nearest, code_format)
            if not keeps:
                worse.append(len(codes_of_matrices))
            codes_of_matrices.append(chosen if keeps else nearest)
        if few:
            reason = f"experts {_listed(few)} got fewer than {FEWEST_TOKENS} tokens: rounded to the nearest"
            self._result.rejected.append(Rejection(node.name, where, reason))
        if worse:
            which = f"experts {_listed(worse)}: " if grouped else ""
            reason = f"{which}rounded to the nearest, which is better on held-out tokens ({errors.of_worse()})"
            self._result.rejected.append(Rejection(node.name, where, reason))
        self._result.metrics += errors.metrics(where)
        codes = _stacked(codes_of_matrices) if grouped else codes_of_matrices[0]
        scratch = self._context.scratch
        file = None if scratch is None else scratch / f"{len(self.chosen)}.codes"
        self.chosen[weight] = ChosenCodes.of(expr, code_format, codes, file)

    def _input_of(self, node: Node, rows: torch.Tensor) -> LayerInputs:
        """Returns the Hessian of ``node``'s inputs; linears of one input share it, experts are too many to."""
        key = (node.args[0], node.meta[FORMAT])
        if node.target is not ew.linear.default or self._readers[key] == 1:
            return self._inputs.pop(key) if key in self._inputs else LayerInputs.of(rows, node.meta[FORMAT])
        self._readers[key] -= 1
        if key not in self._inputs:
            self._inputs[key] = LayerInputs.of(rows, node.meta[FORMAT])
        return self._inputs[key]

    def _multiply(
        self,
        node: Node,
        chosen: ChosenCodes,
        rows: torch.Tensor,
        starts: Sequence[int],
        biases: Any,
        out: torch.Tensor,
    ) -> None:
        """Fills ``out`` [M, N] with what the chosen integers give."""
        codes = chosen.codes()
        for e, (start, stop) in enumerate(pairwise(starts)):
            if start < stop:
                one = Codes(*(t[e] for t in tensors_of(codes))) if len(chosen.shape) == 3 else codes
                matrix, bias = decode(one, chosen.format), None if biases is None else biases[e]
                for part in torch.arange(start, stop).split(ROWS):
                    at = slice(int(part[0]), int(part[-1]) + 1)
                    x = as_multiplied(rows[at], node.meta[FORMAT])
                    out[at] = torch.nn.functional.linear(x, matrix, bias)


def _weight(node: Node) -> Node:
    weight = node.args[WEIGHT_ARGUMENT[node.target]]
    if not isinstance(weight, Node):
        raise PassError(f"{describe_node(node)}: its weight isn't a weight")
    return weight


def _matrices(expr: WeightExpr) -> Any:
    """A weight [N, K], or each of [E, N, K], as float32."""
    for piece in pieces(expr):
        value = piece.evaluate().float()
        yield from value if value.dim() == 3 else [value]


def _nearest_codes(weight: torch.Tensor, code_format: CodeFormat) -> Codes:
    result = round_rows(weight, code_format)
    return Codes(result.values, result.scales, result.offsets)


def _stacked(codes: Sequence[Codes]) -> Codes:
    return Codes(*(torch.stack(kind) for kind in zip(*map(tensors_of, codes), strict=True)))


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"{shown} and {len(numbers) - 6} more" if len(numbers) > 6 else shown
