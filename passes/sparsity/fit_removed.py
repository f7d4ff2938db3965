"""Chooses the inputs that a product loses, and the compensation for them, on two halves of some tokens."""

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
from .calibrated_walk import walk
from .eliminate import Moments, compensation, eliminate, output_error

CHOICE_DAMPING = 1e-3
"""The damping of the moments by which inputs are chosen."""

DAMPINGS = (1e-7, 1e-2, 1e-1, 1.0, 3.0)
"""The dampings of the fit. One half of the tokens is fitted, the other says which damping leaves the least error."""

ERROR, PLAIN_ERROR = "relative error", "relative error, only removed"
"""Names of metrics. Errors are of a product, ||Y - Y'||^2 / ||Y||^2, on tokens that weren't fitted; the second is that
of removing what adds the least by itself, with nothing compensated."""


def halves_of(sequences: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, by their number in the run, of every second sequence and of the others; of one, of its two halves."""
    lengths = [len(s) for s in sequences]
    if len(lengths) == 1:
        lengths = [lengths[0] // 2, lengths[0] - lengths[0] // 2]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) % 2
    return (owner == 0).nonzero()[:, 0], (owner == 1).nonzero()[:, 0]


@dataclass(frozen=True)
class Fit:
    """The removed inputs of a product, and the compensation; errors are relative, on the half that wasn't fitted."""

    removed: torch.Tensor
    kept: torch.Tensor
    mix: torch.Tensor | None
    error: float
    plain_error: float

    def expression(self, base: WeightExpr, file: Path | None) -> WeightExpr:
        """The weight from then on, of the one before. ``file``: for the mix; None keeps it in memory."""
        columns = tuple(self.kept.tolist())
        return Chosen(base, 1, columns) if self.mix is None else MixedColumns(base, columns, Mix.of(self.mix, file))

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product [T, N] of what is left of inputs [T, K] and of a weight [N, K]."""
        new = weight[:, self.kept]
        if self.mix is not None:
            new = new + weight[:, self.removed] @ self.mix
        return torch.nn.functional.linear(x[..., self.kept], new, bias)


Choose = Callable[[Moments, torch.Tensor], torch.Tensor]
"""A function of moments and a weight [N, K] that returns the inputs to remove, in order."""


def fitted(halves: Sequence[Moments], weight: torch.Tensor, choose: Choose, plainly: Choose, correct: bool) -> Fit:
    """Chooses inputs of the product with a weight [N, K], and compensates for them, if that is of use.

    Few tokens fit many inputs too well: what the other half says is held to. What is used is of both halves.

    Args:
        halves: moments of the inputs: the first is fitted, the second measures the fit.
        choose: a function for the inputs whose removal, compensated, costs the least.
        plainly: a function for the inputs that add the least by themselves.
        correct: take either of these, with what is compensated at some damping, if that is better on the second half
            than the latter with nothing compensated.
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
    """Returns ``choose`` and ``plainly`` for ``count`` inputs that go one by one."""

    def choose(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        return eliminate(moments, weight, count, CHOICE_DAMPING)

    def plainly(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        cost = moments.sum.diagonal() * weight.double().square().sum(0)  # [K]: what each adds to the output, squared
        return cost.argsort(stable=True)[:count].sort().values

    return choose, plainly


Fitting = Callable[[Sequence[Moments], torch.Tensor], tuple[Fit, dict[str, float]]]
"""Gets a product's weight, and moments of its inputs on both halves; gives what goes, and metrics that say how much."""


def fit_in_order(
    program: Program,
    context: PassContext,
    fittings: Mapping[Node, tuple[str, Fitting]],
    sequences: Sequence[torch.Tensor],
) -> tuple[dict[Node, tuple[Fit, WeightExpr]], list[Metric]]:
    """Chooses in one run over the tokens: what comes behind a linear sees what is left of its product.

    ``fittings``: of each linear the path that metrics have, and what chooses. Returns of each what goes and its weight
    from then on, and the metrics.
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
