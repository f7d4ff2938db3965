"""Tiny decoders with something in them that adds nothing, and what the tests of pruning share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache

import torch

from enginewright.passes.framework.base import Pass, PassContext, PassRecord
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.pruning import Pruning
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from tests.passes.captured import normalized, packed
from tests.passes.rewriting import SIZES

Change = Callable[[torch.Tensor], None]


def tokens(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 250, (n,), generator=generator, dtype=torch.int32) for n in lengths)


CALIBRATION = tokens(*[32] * 16)


def normal(family: str, **overrides: object) -> Program:
    """A normalised program, to be changed."""
    return _normal(family, json.dumps(overrides)).copy()


@cache
def _normal(family: str, overrides: str) -> Program:
    return normalized(family, **json.loads(overrides))[0]


def changed(family: str, changes: Mapping[str, Change], **overrides: object) -> Program:
    """A normalised program with some source tensors changed, by the ends of their names."""
    program = normal(family, **overrides)
    for name in program.weights:
        expr = program.weights[name]
        source = expr if isinstance(expr, Source) else getattr(expr, "base", None)
        change = next(
            (c for end, c in changes.items() if isinstance(source, Source) and source.name.endswith(end)), None
        )
        if change is None:
            continue
        assert isinstance(source, Source)
        value = source.evaluate().clone()
        change(value)
        new = Source(source.name, source.shape, source.dtype, lambda value=value: value)
        program.weights.change(name, new if expr is source else type(expr)(new))
    return program


def prune(program: Program, one: Pass, pruning: Pruning) -> PassRecord:
    return one.run(program, PassContext(recipe=PassOptions(prune=pruning), calibration=CALIBRATION))


def logits(program: Program) -> list[torch.Tensor]:
    """Computes them on other tokens than those of the calibration, at two sizes."""
    return [program.evaluate({k: v.long() for k, v in packed(lengths, seed=9).items()})[0] for lengths in SIZES]


def assert_lossless(program: Program, one: Pass, pruning: Pruning, tolerance: float) -> PassRecord:
    """Prunes, and checks that the values v stay within ``tolerance * (1 + |v|)``."""
    before = logits(program)
    record = prune(program, one, pruning)
    assert record.matched and record.parameters_removed > 0
    for now, expected in zip(logits(program), before, strict=True):
        torch.testing.assert_close(now, expected, rtol=tolerance, atol=tolerance)
    return record
