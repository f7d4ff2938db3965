"""The sizes that a step of segments is padded to, and its memory."""

from __future__ import annotations

import pytest

from enginewright.plugins.engines.blocks_segments import SegmentProgram, segment_limits
from enginewright.plugins.steps.packed_steps import StepLimits
from enginewright.runtime.shared.errors import RequestError

from .packed_bundles import schedule

STEMS = {"8.9": [("w", "p", "d", "c")] * 2}


def test_limits() -> None:
    assert segment_limits(schedule(STEMS), 256, 40) == StepLimits(tokens=12, requests=12, rows=6, blocks=10)
    assert segment_limits(schedule(STEMS), 5, 41) == StepLimits(tokens=12, requests=5, rows=6, blocks=11)


def test_shapes() -> None:
    program = SegmentProgram.__new__(SegmentProgram)
    stages = schedule(STEMS)
    program._schedule = stages.model_copy(update={"profiles": stages.profiles[::-1]})  # the larger one is the first
    program._limits = segment_limits(stages, 8, 40)
    for (tokens, requests, rows, blocks, decodes), expected in (
        ((1, 1, 1, 1, True), (1, 1, 1, 1, 1)),
        ((3, 3, 2, 5, True), (1, 4, 4, 4, 8)),
        ((7, 7, 6, 9, True), (0, 8, 8, 6, 10)),
        ((3, 1, 1, 3, False), (1, 4, 1, 1, 4)),
        ((11, 3, 5, 10, False), (0, 12, 4, 6, 10)),
    ):
        shape = program.shape_of(tokens, requests, rows, blocks, decodes)
        assert (shape.profile, shape.tokens, shape.requests, shape.rows, shape.blocks) == expected
        assert program._schedule.profiles[shape.profile].holds(shape.tokens, shape.rows)
    assert program.most(decodes=True) == (12, 8)
    assert program.most_rows(shape) == 6
    for wrong, what in (
        ((13, 1, 1, 1, False), "no profile holds 13 tokens and 1 rows"),
        ((4, 1, 7, 1, False), "no profile holds 4 tokens and 7 rows"),
        ((9, 9, 1, 1, True), "9 requests with 1 blocks are more than the 8 with 10"),
        ((1, 1, 1, 11, True), "1 requests with 11 blocks"),
    ):
        with pytest.raises(RequestError, match=what):
            program.shape_of(*wrong)
