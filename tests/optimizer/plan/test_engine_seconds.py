from __future__ import annotations

import pytest

from enginewright.optimizer.plan.engine_seconds import engine_seconds
from enginewright.plugins.steps.planning import CountedSteps


@pytest.mark.parametrize("requests", [1, 2])
def test_the_engine_is_timed_without_a_program(requests: int, tiny_steps: CountedSteps) -> None:
    assert engine_seconds(tiny_steps.program.cache_groups, requests) > 0
