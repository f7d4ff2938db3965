"""Which sequences a step has: all of them before any comes again, and the same at every call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from enginewright.optimizer.recover.options import RecoverOptions
from enginewright.optimizer.recover.sequences import Sequences, split
from enginewright.runtime.shared.errors import RequestError

OPTIONS = RecoverOptions(batch_tokens=16, sequence_length=8)


def numbered(count: int, length: int = 8) -> list[torch.Tensor]:
    return [torch.full((length,), i, dtype=torch.int32) for i in range(count)]


@pytest.mark.parametrize("count", [4, 10])
def test_every_sequence_comes_once_before_any_comes_again(count: int) -> None:
    sequences = Sequences(tuple(numbered(count)), (), "here")
    steps = [[int(s[0]) for s in sequences.batch(step, OPTIONS)] for step in range(count)]
    assert all(len(batch) == 2 for batch in steps)
    halves = (steps[: count // 2], steps[count // 2 :])
    first, second = ([one for batch in half for one in batch] for half in halves)
    assert sorted(first) == sorted(second) == list(range(count))
    assert first != second
    assert [int(s[0]) for s in sequences.batch(1, OPTIONS)] == steps[1]
    other = replace(OPTIONS, seed=1)
    assert [[int(s[0]) for s in sequences.batch(i, other)] for i in range(count)] != steps


def test_held_out_sequences_are_spread_evenly_and_never_trained_on() -> None:
    parts = split(numbered(40), replace(OPTIONS, validation=0.1), "here")
    assert [int(s[0]) for s in parts.held_out] == [0, 10, 20, 30]
    assert len(parts.training) == 36
    assert parts.tokens + parts.held_out_tokens == 320
    assert not {int(s[0]) for s in parts.training} & {int(s[0]) for s in parts.held_out}


def test_what_is_too_short_is_left_out_and_too_little_is_refused() -> None:
    short = torch.tensor([3], dtype=torch.int32)
    parts = split([*numbered(20, 32), short], OPTIONS, "here")
    assert all(len(s) == 32 for s in (*parts.training, *parts.held_out))
    with pytest.raises(RequestError, match=r"here is too small to recover with: 8 tokens .* the 16 of a step"):
        split(numbered(2), OPTIONS, "here")
