"""Predicts the KL of a program from its source with each format of each unit, from one evaluation for each unit.

The weight and the input of a unit are rounded to its smallest format, the rest of the program is computed again, and
the KL of the logits is measured. Small errors cost KL in proportion to their square, so the KL of other formats is
predicted from their squared errors in the unit's output. In large models all units of a layer change at a time, and the
KL is divided among them by these errors, relative to the units' outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx.node import Node

from enginewright.passes.formats.rounding import TORCH_DTYPES
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.fast_evaluation import decoded
from enginewright.passes.framework.stepwise_evaluation import StepwiseEvaluation, Values
from enginewright.passes.framework.token_sequences import mean_kl
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.quantized import quantized, round_rows
from enginewright.passes.ir.two_of_four import TwoOfFour
from enginewright.passes.ops.experts import grouped_linear
from enginewright.passes.quantization.calibrated_walk import as_multiplied
from enginewright.passes.quantization.choose_formats import WEIGHT_ARGUMENT, weight_node

from .format_units import FormatUnit
from .measure_choices import FEWEST_TOKENS, affordable_tokens, cache_bytes, share_of

ew = torch.ops.ew

_ENOUGH_TOKENS = 128
"""The fewest tokens with which units are measured one by one.

If less is affordable, whole layers are changed instead.
"""

MOST_ROWS = 512
"""The most rows of a weight, evenly spread, from which errors are computed."""


@dataclass(frozen=True)
class Plan:
    """The plan of the measurements.

    Attributes:
        groups: the units that change together, by index.
        tokens: the number of tokens of each measurement.
    """

    groups: tuple[tuple[int, ...], ...]
    tokens: int


def plan_measurements(units: Sequence[FormatUnit], parameters: int, most_tokens: int) -> Plan:
    """Plans the measurements unit by unit, or layer by layer if that would take too long.

    Args:
        units: the units.
        parameters: the number of the model's parameters.
        most_tokens: the most tokens of a measurement.
    """
    tokens = min(most_tokens, affordable_tokens(len(units), parameters))
    if tokens >= min(_ENOUGH_TOKENS, most_tokens):
        return Plan(tuple((i,) for i in range(len(units))), tokens)
    layers: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        layers.setdefault(unit.layer, []).append(i)
    tokens = max(FEWEST_TOKENS, min(most_tokens, affordable_tokens(len(layers), parameters)))
    return Plan(tuple(tuple(g) for g in layers.values()), tokens)


def measure_sensitivities(
    program: Program,
    units: Sequence[FormatUnit],
    groups: Sequence[Sequence[int]],
    sequences: Sequence[torch.Tensor],
    on_progress: Callable[[int, int, str], None],
    memory_budget: int | None = None,
) -> list[tuple[float, ...]]:
    """Returns the predicted KL, in nats per token, of each format of each unit.

    Args:
        program: a paged program in 32-bit floats.
        units: the units of that program.
        groups: the units that change together, by index.
        sequences: token ids, [S] each.
        on_progress: called with the number of measured groups, the number of all, and the path of the next one.
        memory_budget: bytes of memory that may be used; see ``PassContext``.
    """
    run = StepwiseEvaluation(program, sequences, cache_bytes(memory_budget))
    values = run.start()
    reference = run.finish(dict(values))
    unit_of = {n: i for i, u in enumerate(units) for n in u.nodes}
    begins = {min((n for i in g for n in units[i].nodes), key=run.calls.index): g for g in groups}
    errors = [[0.0] * len(u.formats) for u in units]
    costs: list[tuple[float, ...]] = [()] * len(units)
    kl: dict[int, float] = {}
    for at, node in enumerate(run.calls):
        if node in begins:
            group = begins[node]
            on_progress(len(kl), len(groups), units[group[0]].where)
            changed = {
                n: partial(_rounded, run, n, units[i].formats[units[i].smallest]) for i in group for n in units[i].nodes
            }
            kl[group[0]] = mean_kl(reference, run.finish(dict(values), at, changed))
        if node in unit_of:
            unit_errors = errors[unit_of[node]]
            for k, error in enumerate(_errors(run, node, values, units[unit_of[node]].formats)):
                unit_errors[k] += error
        run.step(node, values)
    on_progress(len(groups), len(groups), "")
    for group in groups:
        share = share_of(kl[group[0]], sum(errors[i][units[i].smallest] for i in group))
        for i in group:
            costs[i] = tuple(share * e for e in errors[i])
    return costs


def _errors(run: StepwiseEvaluation, node: Node, values: Values, formats: Sequence[WeightFormat]) -> list[float]:
    """Returns for each format the squared error of a node's result, divided by the square of the result.

    If the node looks up a table, or its weight has many rows, only a part of the result is computed.
    """
    if node.target is ew.grouped_linear.default or any(f.sparsity != "dense" for f in formats):
        exact = _product(run, node, values, lambda x: x, _weight(run, node))
        off = [_rounded(run, node, f, values) - exact for f in formats]
    elif node.target is ew.embedding.default:
        exact = _weight(run, node)[_input(node, values).long().flatten().unique()]
        off = [round_weight(exact, f) - exact for f in formats]
    else:
        x, weight = _input(node, values), _weight(run, node)
        rows = weight[:: -(-len(weight) // MOST_ROWS)]
        exact = x @ rows.t()
        off = [as_multiplied(x, f) @ round_weight(rows, f).t() - exact for f in formats]
    size = max(float(exact.square().sum()), torch.finfo(torch.float32).tiny)
    return [float(each.square().sum()) / size for each in off]


def round_weight(rows: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    """Rounds rows [N, K] to a dense format and returns them as float32."""
    code_format = CodeFormat.of(weight_format.for_inputs(rows.shape[-1]))
    if code_format is None:
        return rows.to(TORCH_DTYPES[weight_format.stored.dtype]).float()
    codes = round_rows(rows, code_format)
    return decode(Codes(codes.values, codes.scales, codes.offsets), code_format)


def _input(node: Node, values: Values) -> torch.Tensor:
    first = node.args[0]
    assert isinstance(first, Node)
    value: torch.Tensor = values[first]
    return value


def _rounded(run: StepwiseEvaluation, node: Node, weight_format: WeightFormat, values: Values) -> torch.Tensor:
    """Computes a node with its weight and its input rounded to a format."""
    expr = run.program.weight_of(weight_node(node))
    assert expr is not None
    code_format = CodeFormat.of(weight_format.for_inputs(expr.shape[-1]))
    if weight_format.sparsity != "dense":
        expr = TwoOfFour(expr)  # by magnitude; what the recipe's method costs, the check measures
    if code_format is not None:
        parts = [p.evaluate() for p in quantized(expr, code_format) if p is not None]
        rounded = decoded(*parts, group=code_format.group_size)
    else:
        rounded = expr.evaluate().float() if isinstance(expr, TwoOfFour) else _weight(run, node)
        rounded = rounded.to(TORCH_DTYPES[weight_format.stored.dtype]).float()
    return _product(run, node, values, lambda x: as_multiplied(x, weight_format), rounded)


def _weight(run: StepwiseEvaluation, node: Node) -> torch.Tensor:
    return run.fast.read(str(weight_node(node).target))


def _product(
    run: StepwiseEvaluation,
    node: Node,
    values: Values,
    x: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
) -> torch.Tensor:
    """Computes a node with another weight, and with the function ``x`` applied to its input."""
    inputs = _input(node, values)
    if node.target is ew.embedding.default:
        return weight[inputs.long()]
    bias, starts = node.args[WEIGHT_ARGUMENT[node.target] + 1], node.args[1]
    added = run.fast.read(str(bias.target)) if isinstance(bias, Node) else None
    if node.target is ew.grouped_linear.default:
        assert isinstance(starts, Node)
        return grouped_linear(x(inputs), values[starts], weight, added)
    return torch.nn.functional.linear(x(inputs), weight, added)
