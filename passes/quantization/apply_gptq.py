"""Chooses integers of 2 to 6 bits by the outputs of layers on calibration tokens (GPTQ), one layer after the other.

The program is evaluated once on all tokens. The input of a linear is computed with the integers that were chosen for
the layers before it, and is rounded as in the final program. From it come the Hessian and the integers of the linear;
the output with these is the input of the next layers. So memory holds the weight and the Hessian of one layer at a
time, for a model of any size. The integers are written to files if the context has a folder for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.weight_formats import GptqOptions, chooses

from ..formats.weight_format import WeightFormat
from ..ir.chosen_codes import ChosenCodes
from ..ir.prequantized import CodeFormat, Codes, Prequantized, decode
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.quantized import round_matrix, round_rows
from ..ir.stacked_weights import pieces
from ..ir.two_of_four import is_two_of_four
from ..ir.weights import Cast, Concat, Slice, WeightExpr
from .calibrated_walk import as_multiplied, calibration_tokens, walk
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, weight_node
from .gptq import factorize, gptq
from .held_out import FEWEST_TOKENS, ROWS, LayerInputs, OutputErrors

ew = torch.ops.ew

LARGEST_INPUT = "largest input"
"""The name of a metric: the largest magnitude of a linear's inputs."""

TOKENS_USED = "tokens used"
"""The name of a metric: the number of calibration tokens, as many as fit into the memory budget."""


class ApplyGptq(Pass):
    """Gives weights of 2 to 6 bits the integers that GPTQ chooses, if the recipe's method is "gptq".

    Other integers are used in these cases, which are recorded:

    1. A weight whose file has integers of the same format keeps them.
    2. An expert with too few tokens is rounded to the nearest.
    3. A weight, or an expert, is rounded to the nearest if that changes its output on held-out tokens less. With few
    tokens, GPTQ also fits their noise.
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
        working = {node: _working_bytes(program, node) for node in targets}
        sequences = calibration_tokens(program, context, "choosing the integers of the largest layer", working)
        if context.memory_budget is not None:
            _note_tokens(context.calibration, sequences, targets[0], result)
        sweep = _Sweep(program, context, targets, result)
        walk(program, dict.fromkeys(targets, sweep.look), sequences, {str(weight_node(n).target) for n in targets})
        for weight, chosen in sweep.chosen.items():
            _replace(program, weight, chosen)
        return result


def _targets(program: Program, result: PassResult) -> list[Node]:
    """Returns the linears that GPTQ chooses integers for, in the program's order; records those that keep integers."""
    targets = []
    for node in program.nodes_of(*LINEARS):
        if not chooses("gptq", node.meta[FORMAT]):
            continue
        expr = program.weight_of(weight_node(node))
        assert expr is not None  # ChooseFormats gives no format to a weight that is computed
        if isinstance(expr, ChosenCodes):
            continue  # together with what of it is kept
        if _is_chosen(expr, CodeFormat.of(node.meta[FORMAT])):
            reason = "its file has integers of that format, which it keeps"
            result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason))
        else:
            targets.append(node)
    return targets


def _note_tokens(every: Sequence[torch.Tensor], used: Sequence[torch.Tensor], first: Node, result: PassResult) -> None:
    """Records the number of calibration tokens that are used, and a rejection at ``first`` if not all sequences are.

    ``every`` has the token ids of all sequences, ``used`` those of the sequences that fit into memory.
    """
    if len(used) < len(every):
        reason = f"only {len(used)} of {len(every)} sequences fit into the memory that there may be"
        result.rejected.append(Rejection(first.name, "calibration", reason))
    result.metrics.append(Metric("calibration", TOKENS_USED, sum(map(len, used))))


def _working_bytes(program: Program, node: Node) -> int:
    """Returns the bytes that choosing the integers of a linear needs in addition to its inputs and outputs."""
    *experts, rows, size = program.value(weight_node(node)).shape
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
    """Makes all readers of a weight that have the format of its chosen integers, such as a tied embedding, read
    these.
    """
    new = program.weight(f"{weight.target}.gptq", chosen, where=weight.meta[WHERE])
    for user in list(weight.users):
        if FORMAT in user.meta and CodeFormat.of(user.meta[FORMAT]) == chosen.format:
            user.replace_input_with(weight, new)


class _Sweep:
    """Chooses the integers of linears while the program is evaluated: ``look`` computes each of the ``targets``.

    Attributes:
        chosen: the node of a weight -> its integers.
    """

    def __init__(self, program: Program, context: PassContext, targets: Sequence[Node], result: PassResult) -> None:
        self.chosen: dict[Node, ChosenCodes] = {}
        self._program, self._context, self._result = program, context, result
        self._left = dict.fromkeys(targets)
        self._total = len(targets)
        self._readers = Counter((n.args[0], n.meta[FORMAT]) for n in targets)
        self._inputs: dict[tuple[Any, WeightFormat], LayerInputs] = {}

    def look(self, node: Node, args: Sequence[Any]) -> Any:
        """Returns the result of a linear with its chosen integers; None for the last linear, whose result nothing
        reads.

        ``args`` has the values of its arguments.
        """
        where = join_where(node.meta[WHERE])
        self._context.progress(self._total - len(self._left), self._total, where)
        del self._left[node]
        x, *between, _, bias = args
        low, high = torch.aminmax(x)
        self._result.metrics.append(Metric(where, LARGEST_INPUT, max(-float(low), float(high))))
        rows = x.reshape(-1, x.shape[-1])  # [M, K]
        starts = between[0].tolist() if between else [0, len(rows)]
        weight = weight_node(node)
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
        """Chooses the integers of a weight: of one matrix, or of all experts. ``rows`` has the inputs [M, K] of
        each.
        """
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
        """Returns the Hessian of a linear's inputs ``rows`` [M, K], with samples of these.

        Linears with the same input share it, except for experts, of which there are too many.
        """
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
        """Writes the products of ``rows`` [M, K] with the chosen integers to ``out`` [M, N].

        ``starts`` are the bounds of the rows of each expert, and ``biases`` has one bias, or None, for each.
        """
        codes = chosen.codes()
        for e, (start, stop) in enumerate(pairwise(starts)):
            if start < stop:
                one = Codes(*(t[e] for t in codes.tensors)) if len(chosen.shape) == 3 else codes
                matrix, bias = decode(one, chosen.format), None if biases is None else biases[e]
                for part in torch.arange(start, stop).split(ROWS):
                    at = slice(int(part[0]), int(part[-1]) + 1)
                    x = as_multiplied(rows[at], node.meta[FORMAT])
                    out[at] = torch.nn.functional.linear(x, matrix, bias)


def _matrices(expr: WeightExpr) -> Any:
    """Yields a weight [N, K], or each matrix of [E, N, K], as float32."""
    for piece in pieces(expr):
        value = piece.evaluate().float()
        yield from value if value.dim() == 3 else [value]


def _nearest_codes(weight: torch.Tensor, code_format: CodeFormat) -> Codes:
    # Rows that aren't contiguous are rounded together: the order of torch's sums depends on their number.
    result = (round_matrix if weight.is_contiguous() else round_rows)(weight, code_format)
    return Codes(result.values, result.scales, result.offsets)


def _stacked(codes: Sequence[Codes]) -> Codes:
    return Codes(*(torch.stack(kind) for kind in zip(*(c.tensors for c in codes), strict=True)))


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"{shown} and {len(numbers) - 6} more" if len(numbers) > 6 else shown
