from __future__ import annotations

from typing import Any

import pytest

from enginewright.optimizer.bench.options import BATCHES, CONTEXTS, PROMPTS, BenchOptions, new_tokens, plan
from enginewright.runtime.shared.errors import RequestError


def test_the_defaults_where_all_fit() -> None:
    sizes = plan(BenchOptions(), 8192)
    assert (sizes.prompts, sizes.batches, sizes.contexts) == (PROMPTS, BATCHES, CONTEXTS)
    assert sizes.context == max(PROMPTS) + new_tokens(sizes.steps)
    assert sizes.requests == max(BATCHES)


def test_the_defaults_of_a_short_context() -> None:
    sizes = plan(BenchOptions(steps=8), 600)
    assert (sizes.prompts, sizes.contexts) == ((128, 512), (128,))
    sizes = plan(BenchOptions(steps=8), 64)
    assert (sizes.prompts, sizes.contexts) == ((64 - new_tokens(8),), (64 - new_tokens(8),))
    assert sizes.context == 64


def test_sizes_come_once_and_in_order() -> None:
    sizes = plan(BenchOptions(prompts=(9, 3, 9), batches=(2, 1), contexts=(5, 4)), 512)
    assert (sizes.prompts, sizes.batches, sizes.contexts) == ((3, 9), (1, 2), (4, 5))


def test_room_is_made_for_what_is_measured_alone() -> None:
    assert plan(BenchOptions(prompts=(), contexts=(10,)), 512).context == 10 + new_tokens(16)
    assert plan(BenchOptions(prompts=(10,), batches=(), contexts=(400,)), 512).context == 10 + new_tokens(16)
    assert plan(BenchOptions(batches=()), 512).requests == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"steps": 0}, "steps: 0"),
        ({"steps": 600}, "steps: 600 are more"),
        ({"rounds": 0}, "rounds: 0"),
        ({"prompts": (0,)}, "prompts: 0"),
        ({"batches": (1, 5000)}, "batches: 5000"),
        ({"contexts": (-1,)}, "contexts: -1"),
        ({"prompts": (500,)}, "prompts: 500 tokens leave no room"),
        ({"contexts": (494,)}, "contexts: 494 tokens leave no room"),
        ({"prompts": (), "batches": ()}, "nothing to measure"),
        ({"prompts": (), "contexts": ()}, "nothing to measure"),
    ],
)
def test_sizes_that_cannot_be(given: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        plan(BenchOptions(**given), 512)


def test_the_longest_that_fits() -> None:
    assert plan(BenchOptions(prompts=(493,)), 512).context == 512
