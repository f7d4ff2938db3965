"""Options: what is out of range is named, and the learning rate rises and falls as it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from enginewright.optimizer.recover.options import RecoverOptions
from enginewright.runtime.shared.errors import RequestError

WRONG: list[tuple[str, Any]] = [
    ("steps", 0),
    ("steps", True),
    ("batch_tokens", 1.5),
    ("sequence_length", 4),
    ("learning_rate", 0.0),
    ("learning_rate", float("nan")),
    ("temperature", -1.0),
    ("validation", 0.0),
    ("warmup", 1.5),
    ("hidden", -1.0),
    ("seed", -1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_option_out_of_range_is_named(name: str, value: Any) -> None:
    RecoverOptions().check()
    with pytest.raises(RequestError, match=f"^{name}: "):
        replace(RecoverOptions(), **{name: value}).check()


@pytest.mark.parametrize("steps", [10, 300])
def test_the_rate_rises_then_falls_to_a_tenth(steps: int) -> None:
    options = RecoverOptions(steps=steps, learning_rate=1e-3)
    rates = [options.rate(step) for step in range(steps)]
    rising = round(0.1 * steps)
    assert rates[rising - 1] == max(rates) == pytest.approx(1e-3)
    assert rates[:rising] == sorted(rates[:rising])
    assert rates[rising:] == sorted(rates[rising:], reverse=True)
    assert options.rate(steps) == pytest.approx(1e-4)


def test_what_a_resumed_run_may_have_otherwise_is_no_part_of_what_counts() -> None:
    one, other = RecoverOptions(), replace(RecoverOptions(), threads=2, checkpoint_every=7)
    assert one.what_counts() == other.what_counts()
    assert one.what_counts() != replace(one, seed=1).what_counts()
