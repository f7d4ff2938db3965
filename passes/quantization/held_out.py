"""Divides tokens into those to which GPTQ fits integers and held-out ones, and measures the errors of outputs on
both.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import torch

from enginewright.passes.framework.base import Metric

from ..formats.weight_format import WeightFormat
from ..ir.prequantized import CodeFormat, Codes, decode
from .calibrated_walk import as_multiplied
from .gptq import Factor, Hessian

FEWEST_TOKENS = 64
"""The fewest tokens of an expert for which GPTQ chooses integers. Fewer don't represent its inputs, so it is rounded to
the nearest.
"""

DAMPING = "damping"
NEAREST_ERROR, ERROR = "nearest: relative error", "relative error"
HELD_OUT_NEAREST, HELD_OUT_ERROR = "nearest, held-out tokens: relative error", "held-out tokens: relative error"
"""Names of metrics: the error ||X W^T - X Q^T|| / ||X W^T|| of a linear's output on tokens that no integers were fitted
to.

The first is with the nearest integers, the second with the ones in use. At most MEASURED tokens and as many outputs are
compared, evenly spaced.
"""

RUNS, HELD_OUT_EVERY = 32, 8
"""The number of runs of neighbouring tokens, and the interval of held-out runs: every eighth of 32.

With 32 sequences of one length, a run is a sequence. Runs are long because a token next to a fitted one tells little
about others.
"""

MEASURED = 512

ROWS = 512
"""The number of tokens that are rounded and multiplied at a time, which limits the memory."""


@dataclass
class LayerInputs:
    """The inputs of one expert, or of a linear without experts.

    Attributes:
        hessian: X^T X of the fitted tokens.
        fitted: some of the fitted tokens, on which errors are measured.
        held_out: some of the held-out tokens, likewise.
        factor: the factor of the Hessian; None until it is computed.
    """

    hessian: Hessian
    fitted: torch.Tensor
    held_out: torch.Tensor
    factor: Factor | None = None

    @staticmethod
    def of(rows: torch.Tensor, wanted: WeightFormat) -> LayerInputs:
        """Returns the Hessian and the samples of inputs [M, K], some of which are held out.

        ``wanted`` is the format of the weight, for which the inputs are rounded.
        """
        hessian = Hessian(rows.shape[-1])
        held_out = held_out_tokens(len(rows))
        for fitted, run in runs_of(held_out):
            if fitted:
                for part in rows[run].split(ROWS):
                    hessian.add(as_multiplied(part, wanted))
        some = [rows[evenly_spread(mask.nonzero()[:, 0])] for mask in (~held_out, held_out)]
        return LayerInputs(hessian, as_multiplied(some[0], wanted), as_multiplied(some[1], wanted))


def held_out_tokens(tokens: int) -> torch.Tensor:
    """Returns a mask [M] that is True for held-out tokens. ``tokens`` is M; below FEWEST_TOKENS none are held out."""
    if tokens < FEWEST_TOKENS:
        return torch.zeros(tokens, dtype=torch.bool)
    return torch.arange(tokens) * RUNS // tokens % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def runs_of(held_out: torch.Tensor) -> list[tuple[bool, slice]]:
    """Returns the runs of neighbouring tokens in a mask of held-out ones: (True for fitted tokens, slice) for each."""
    if not len(held_out):
        return []
    changes = (held_out.diff().nonzero()[:, 0] + 1).tolist()
    return [(not bool(held_out[a]), slice(a, b)) for a, b in pairwise([0, *changes, len(held_out)])]


def evenly_spread(rows: torch.Tensor) -> torch.Tensor:
    """Returns at most MEASURED of the rows, evenly spaced."""
    return rows[:: -(-len(rows) // MEASURED) or 1]


class OutputErrors:
    """The squared errors of a weight's outputs, with the chosen and with the nearest integers, summed over experts."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._outputs: dict[str, float] = defaultdict(float)
        self._worse: list[float] = [0.0, 0.0, 0.0]
        self._damping = 0.0

    def add(
        self, given: LayerInputs, weight: torch.Tensor, chosen: Codes, nearest: Codes, code_format: CodeFormat
    ) -> bool:
        """Adds the errors of one matrix. Returns True if the chosen integers are at least as good on held-out tokens.

        Args:
            given: the inputs.
            weight: [N, K].
            chosen, nearest: the integers that GPTQ chose, and the nearest ones.
            code_format: the format of both.
        """
        assert given.factor is not None
        self._damping = max(self._damping, given.factor.damping)
        some = evenly_spread(weight)
        off = [decode(Codes(*map(evenly_spread, c.tensors)), code_format) - some for c in (chosen, nearest)]
        pairs = [[float((x @ d.t()).square().sum()) for d in off] for x in (given.fitted, given.held_out)]
        sizes = [float((x @ some.t()).square().sum()) for x in (given.fitted, given.held_out)]
        keeps = pairs[1][0] <= pairs[1][1]
        names = ((ERROR, NEAREST_ERROR), (HELD_OUT_ERROR, HELD_OUT_NEAREST))
        for x, (used, near), (chosen_error, other), size in zip(
            (given.fitted, given.held_out), names, pairs, sizes, strict=True
        ):
            if not len(x):
                continue
            for name, error in ((used, chosen_error if keeps else other), (near, other)):
                self._sums[name] += error
                self._outputs[name] += size
        if not keeps:
            self._worse = [a + b for a, b in zip(self._worse, (*pairs[1], sizes[1]), strict=True)]
        return keeps

    def of_worse(self) -> str:
        """Returns a text with the errors on held-out tokens of the matrices for which GPTQ was worse than the nearest
        integers.
        """
        gptq_error, nearest, size = self._worse
        size = size or gptq_error  # outputs that are all 0 have no relative error
        return f"a relative error of {(nearest / size) ** 0.5:.4f}, with GPTQ {(gptq_error / size) ** 0.5:.4f}"

    def metrics(self, where: str) -> list[Metric]:
        """Returns the metrics of the layer at the module path ``where``; [] if no matrix was added."""
        errors = [
            Metric(where, name, (error / self._outputs[name]) ** 0.5 if self._outputs[name] else 0.0)
            for name, error in self._sums.items()
        ]
        return [*errors, Metric(where, DAMPING, self._damping)] if errors else []
