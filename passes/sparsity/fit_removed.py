"""Chooses the inputs of a product to remove, and the compensation for them, with two halves of some tokens."""

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
"""The damping of the moments by which inputs are chosen."""

DAMPINGS = (1e-7, 1e-2, 1e-1, 1.0, 3.0)
"""The dampings to try: one half of the tokens is fitted, and the other half determines the best damping."""

ERROR, PLAIN_ERROR = "relative error", "relative error, only removed"
"""Names of metrics. Errors are of a product, ||Y - Y'||^2 / ||Y||^2, on tokens that weren't fitted; the second is that
of removing what adds the least by itself, with nothing compensated."""


def halves_of(sequences: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides the tokens of calibration into two halves: the indices of tokens of every second sequence, and of the
    others.

    A single sequence is divided in its middle.
    """
    lengths = [len(s) for s in sequences]
    if len(lengths) == 1:
        lengths = [lengths[0] // 2, lengths[0] - lengths[0] // 2]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) % 2
    return (owner == 0).nonzero()[:, 0], (owner == 1).nonzero()[:, 0]


@dataclass(frozen=True)
class Fit:
    """The removed inputs of a product, and the compensation.

    Attributes:
        removed, kept: the inputs.
        mix: the share of each removed column to add to each kept one; None without compensation.
        error, plain_error: relative errors on the held-out half of the tokens: of this fit, and of removing the inputs
            with the smallest contributions without compensation.
    """

    removed: torch.Tensor
    kept: torch.Tensor
    mix: torch.Tensor | None
    error: float
    plain_error: float

    def expression(self, base: WeightExpr, file: Path | None) -> WeightExpr:
        """Returns the new weight as an expression over ``base``, the old one.

        ``file``: ``mix`` is written to it; None keeps ``mix`` in memory.
        """
        columns = tuple(self.kept.tolist())
        return Chosen(base, 1, columns) if self.mix is None else MixedColumns(base, columns, Mix.of(self.mix, file))

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the product [T, N] of the kept inputs of x [T, K] and a weight [N, K]."""
        new = weight[:, self.kept]
        if self.mix is not None:
            new = new + weight[:, self.removed] @ self.mix
        return torch.nn.functional.linear(x[..., self.kept], new, bias)


Choose = Callable[[Moments, torch.Tensor], torch.Tensor]
"""A function of moments and a weight [N, K] that returns the inputs to remove, in order."""


def fitted(halves: Sequence[Moments], weight: torch.Tensor, choose: Choose, plainly: Choose, correct: bool) -> Fit:
    """Chooses inputs of the product with a weight [N, K] to remove, and compensates for them if that helps.

    A fit of many inputs to few tokens is too good on these tokens, so the second half measures it. The result uses both
    halves.

    Args:
        halves: the moments of the inputs of both halves: the first is fitted, the second measures the fit.
        weight: [N, K].
        choose: returns the inputs whose compensated removal costs the least.
        plainly: returns the inputs that add the least by themselves.
        correct: True to use either choice with compensation at some damping, if that is better on the second half than
            the plain choice without.
    """
    first, second = halves
    both = Moments(first.sum + second.sum, first.tokens + second.tokens)

    def errors(removed: torch.Tensor) -> dict[float, float]:
        """Returns the errors by damping, on the half that isn't fitted."""
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
    """Returns ``choose`` and ``plainly`` for ``count`` inputs that are removed one by one."""

    def choose(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        return eliminate(moments, weight, count, CHOICE_DAMPING)

    def plainly(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        cost = moments.sum.diagonal() * weight.double().square().sum(0)  # [K]: what each adds to the output, squared
        return cost.argsort(stable=True)[:count].sort().values

    return choose, plainly


Fitting = Callable[[Sequence[Moments], torch.Tensor], tuple[Fit, dict[str, float]]]
"""A function of the moments of a product's inputs on both halves, and of its weight, that returns the fit and
metrics.
"""


def fit_in_order(
    program: Program,
    context: PassContext,
    fittings: Mapping[Node, tuple[str, Fitting]],
    sequences: Sequence[torch.Tensor],
) -> tuple[dict[Node, tuple[Fit, WeightExpr]], list[Metric]]:
    """Chooses for several linears in one evaluation: calls after a linear get its product without the removed inputs.

    Args:
        program: the program.
        context: with the folder for files.
        fittings: linear -> the path for its metrics, and the function that chooses.
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
