"""Chooses the inputs of a product to remove, and fits the compensation for them, on two halves of some tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, PassContext

from ..ir.chosen_rows import Chosen, Mix, MixedColumns, others
from ..ir.program import Program
from ..ir.weights import WeightExpr
from ..quantization.calibrated_walk import walk
from .eliminate import Moments, compensation, eliminate, output_error

CHOICE_DAMPING = 1e-3
"""The damping of the moments when inputs are chosen."""

DAMPINGS = (1e-7, 1e-2, 1e-1, 1.0, 3.0)
"""The dampings of the compensation to try. One half of the tokens is fitted, and the other half decides which is
best.
"""

ERROR, PLAIN_ERROR = "relative error", "relative error, only removed"
"""Names of metrics: the error of a product, ||Y - Y'||^2 / ||Y||^2, on tokens that weren't fitted.

The second is the error of removing the inputs that contribute least, without compensation.
"""


def halves_of(sequences: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides calibration tokens into two halves: the indices of tokens of every second sequence, and of the other
    sequences.

    A single sequence is divided in its middle.
    """
    lengths = [len(s) for s in sequences]
    if len(lengths) == 1:
        lengths = [lengths[0] // 2, lengths[0] - lengths[0] // 2]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) % 2
    return (owner == 0).nonzero()[:, 0], (owner == 1).nonzero()[:, 0]


@dataclass(frozen=True)
class Fit:
    """The removed inputs of a product, and the compensation for them.

    Attributes:
        removed, kept: the indices of the inputs.
        mix: the share of each removed column to add to each kept one, [removed, kept]; None without compensation.
        error: the relative error on the held-out half of the tokens.
        plain_error: the same error if the inputs with the smallest contributions are removed without compensation.
    """

    removed: torch.Tensor
    kept: torch.Tensor
    mix: torch.Tensor | None
    error: float
    plain_error: float

    def expression(self, base: WeightExpr, file: Path | None) -> WeightExpr:
        """Returns the new weight as an expression over the old one, ``base``.

        The numbers of ``mix`` are written to ``file``; None keeps them in memory.
        """
        columns = tuple(self.kept.tolist())
        return Chosen(base, 1, columns) if self.mix is None else MixedColumns(base, columns, Mix.of(self.mix, file))

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the product [T, N] of the kept inputs of x [T, K] with the new weight. ``weight`` [N, K] is the old
        one.
        """
        new = weight[:, self.kept]
        if self.mix is not None:
            new = new + weight[:, self.removed] @ self.mix
        return torch.nn.functional.linear(x[..., self.kept], new, bias)


Choose = Callable[[Moments, torch.Tensor], torch.Tensor]
"""A function that chooses inputs to remove. It gets the moments of all inputs and a weight [N, K], and returns indices
in order.
"""


def fitted(halves: Sequence[Moments], weight: torch.Tensor, choose: Choose, plainly: Choose, correct: bool) -> Fit:
    """Chooses inputs of the product with a weight [N, K] to remove, and compensates for them if that helps.

    Errors are measured on the second half of the tokens, because a fit to few tokens looks too good on these tokens.
    The final choice and compensation use both halves.

    Args:
        halves: the moments of the inputs on both halves of the tokens.
        weight: [N, K].
        choose: chooses the inputs that cost the least with compensation.
        plainly: chooses the inputs that contribute the least.
        correct: True tries compensation for both choices, with each damping, and takes the best if it is better than
            ``plainly`` without compensation.
    """
    first, second = halves
    both = Moments(first.sum + second.sum, first.tokens + second.tokens)

    def errors(removed: torch.Tensor) -> dict[float, float]:
        """Returns damping -> the error on the second half of a compensation that is fitted to the first half."""
        rest = others(removed.tolist(), weight.shape[1])
        mixes = ((d, compensation(first, removed, rest, d)) for d in DAMPINGS)
        return {d: output_error(second, weight, removed, rest, mix) for d, mix in mixes}

    least = plainly(both, weight)
    left = others(least.tolist(), weight.shape[1])
    plain = output_error(second, weight, least, left, None)
    if correct:
        candidates = [
            (error, damping, criterion)
            for criterion in (choose, plainly)
            for damping, error in errors(criterion(first, weight)).items()
        ]
        error, damping, criterion = min(candidates, key=lambda w: w[0])
        if error < plain:
            removed = criterion(both, weight)
            rest = others(removed.tolist(), weight.shape[1])
            return Fit(removed, rest, compensation(both, removed, rest, damping), error, plain)
    return Fit(least, left, None, plain, plain)


def single_inputs(count: int) -> tuple[Choose, Choose]:
    """Returns the functions ``choose`` and ``plainly`` of ``fitted`` for ``count`` single inputs."""

    def choose(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        return eliminate(moments, weight, count, CHOICE_DAMPING)

    def plainly(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        cost = moments.sum.diagonal() * weight.double().square().sum(0)  # [K]: what each adds to the output, squared
        return cost.argsort(stable=True)[:count].sort().values

    return choose, plainly


Fitting = Callable[[Sequence[Moments], torch.Tensor], tuple[Fit, dict[str, float]]]
"""A function that fits one product. It gets the moments of the inputs on both halves and the weight, and returns the
fit and metrics.
"""


def fit_in_order(
    program: Program,
    context: PassContext,
    fittings: Mapping[Node, tuple[str, Fitting]],
    sequences: Sequence[torch.Tensor],
) -> tuple[dict[Node, tuple[Fit, WeightExpr]], list[Metric]]:
    """Fits several linears in one evaluation of the program. Calls after a linear get its product without the removed
    inputs.

    Args:
        program: the program.
        context: the pass's context, with the folder for files.
        fittings: linear -> the module path for its metrics, and the function that fits it.
        sequences: token ids, [S] each.

    Returns:
        linear -> the fit and the new weight; and the metrics.
    """
    fits: dict[Node, tuple[Fit, WeightExpr]] = {}
    metrics: list[Metric] = []
    halves = halves_of(sequences)

    def look(node: Node, args: Sequence[Any]) -> torch.Tensor:
        path, fitting = fittings[node]
        context.progress(len(fits), len(fittings), path)
        x, weight, bias = args[0], args[1].float(), args[2]
        fit, counts = fitting([Moments.from_inputs(x[half]) for half in halves], weight)
        expr = program.weight_of(node.args[1])
        assert expr is not None
        file = None if context.scratch is None else context.scratch / f"{path}.mix"
        fits[node] = fit, fit.expression(expr, file)
        values = counts | {ERROR: fit.error, PLAIN_ERROR: fit.plain_error}
        metrics.extend(Metric(path, name, float(value)) for name, value in values.items())
        return fit.apply(x, weight, bias)

    walk(program, dict.fromkeys(fittings, look), sequences)
    context.progress(len(fittings), len(fittings), "")
    return fits, metrics
