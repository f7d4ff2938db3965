"""The formats that ``auto`` chooses from if a recipe names none.

These are all formats that a kernel reads and a writer writes, except those that another format beats in everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.weight_formats import Method
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.calibrated_walk import as_multiplied
from enginewright.passes.quantization.choose_formats import weight_node
from enginewright.runtime.shared.weight_formats import FORMATS, SCALE_BLOCKS

from .format_sensitivity import round_weight
from .format_units import bytes_of, find_units

_SAMPLED_UNITS, _SAMPLED_ROWS, _INPUTS = 8, 32, 64
"""The numbers of weights, evenly spread over a model, of rows of each, and of random inputs, with which formats are
tried.
"""

_ALIKE = 0.02
"""The relative difference below which the errors of two formats count as equal."""


def writable_formats(*, common: bool, method: Method) -> tuple[WeightFormat, ...]:
    """Returns every dense format that kernels read and exports can write.

    Args:
        common: True returns only formats that every target reads.
        method: the method that chooses integers; formats that it doesn't support are omitted.
    """
    formats = []
    for storage, stored in FORMATS.items():
        if stored.layout is None:
            continue
        sizes = [g for g in stored.group_sizes if g or not stored.multiple] or [0]
        shifts = (False, True) if stored.shifted else (False,)
        for size, shift, block in product(sizes, shifts, (0, *SCALE_BLOCKS)):
            if block and not (stored.integers and size and method != "awq"):
                continue
            formats.append(
                WeightFormat(
                    storage=storage,
                    group_size=size,
                    zero_point=shift,
                    activation=stored.activation,
                    activation_group_size=size if stored.integers else 0,
                    scale_block=block,
                )
            )
    return tuple(f for f in formats if f.everywhere or not common)


@dataclass(frozen=True)
class Tried:
    """The results of one format on samples of weights.

    Attributes:
        format: the format.
        found: for each sample, its bytes and the relative squared error of products; None if it can't have the format.
    """

    format: WeightFormat
    found: tuple[tuple[int, float] | None, ...]

    def beaten_by(self, other: Tried) -> bool:
        """Returns True if the other format is at least as small and as exact for all weights, and better for one."""
        better = False
        for mine, its in zip(self.found, other.found, strict=True):
            if mine is None:
                continue
            if its is None or its[0] > mine[0] or its[1] > mine[1] * (1 + _ALIKE):
                return False
            better = better or its[0] < mine[0] or its[1] < mine[1] * (1 - _ALIKE)
        return better


def try_formats(program: Program, formats: Sequence[WeightFormat]) -> list[Tried]:
    """Rounds some rows of some weights of a program to each format. Formats that no weight can have are omitted."""
    units = find_units(program, formats)
    step = max(1, len(units) // _SAMPLED_UNITS)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for unit in units[::step]:
        expr = program.weight_of(weight_node(unit.nodes[0]))
        assert expr is not None
        rows = expr.evaluate().float().flatten(0, -2)
        rows = rows[:: max(1, len(rows) // _SAMPLED_ROWS)][:_SAMPLED_ROWS]
        samples.append((unit, rows, torch.randn(_INPUTS, rows.shape[1], generator=generator)))
    results = []
    for one in formats:
        of = [(bytes_of(tuple(r.shape), one), _error(r, x, one)) if one in u.formats else None for u, r, x in samples]
        if any(each is not None for each in of):
            results.append(Tried(one, tuple(of)))
    return results


def _error(rows: torch.Tensor, x: torch.Tensor, weight_format: WeightFormat) -> float:
    """Returns the relative squared error of x [M, K] times rows [N, K] with both in a format."""
    exact = x @ rows.t()
    off = as_multiplied(x, weight_format) @ round_weight(rows, weight_format).t() - exact
    return float(off.square().sum()) / max(float(exact.square().sum()), torch.finfo(torch.float32).tiny)


def undominated(tried: Sequence[Tried]) -> list[Tried]:
    """Returns the formats that no other format beats in both size and error."""
    return [one for one in tried if not any(one.beaten_by(other) for other in tried)]
