"""Helpers for tests of single passes: run one, and compare numbers before and after at two sizes."""

from __future__ import annotations

import torch

from enginewright.passes.framework.base import Pass, PassContext, PassRecord
from enginewright.passes.ir.program import Program
from tests.passes.captured import op_counts, packed

__all__ = ["op_counts", "rewrite"]

SIZES = ((4,), (3, 6, 1))


def rewrite(program: Program, *passes: Pass, tolerance: float = 0.0) -> list[PassRecord]:
    """Runs passes and checks that the program's values v stay, within ``tolerance * (1 + |v|)``.

    The tolerance is 0 where only views or names change.
    """
    inputs = [{k: v.long() for k, v in packed(lengths).items()} for lengths in SIZES]
    before = [program.evaluate(i)[0] for i in inputs]
    records = [one.run(program, PassContext()) for one in passes]
    for one, expected in zip(inputs, before, strict=True):
        torch.testing.assert_close(program.evaluate(one)[0], expected, rtol=tolerance, atol=tolerance)
    return records
