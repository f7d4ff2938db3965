"""The memory of a training is computed from shapes, and refused with the figures."""

from __future__ import annotations

import pytest

from enginewright.optimizer.recover.memory import TrainingMemory, check_memory
from enginewright.runtime.shared.errors import CapacityError
from tests.passes.captured import normalized


def test_more_tokens_take_more_and_weights_take_four_times_their_bytes() -> None:
    program, _ = normalized("Llama")
    small, large = (TrainingMemory.of(program, 1000, 2000, tokens, 16) for tokens in (16, 64))
    assert small.weights == large.weights == 16_000
    assert small.source == large.source == 8_000
    # Everything but what frequencies make is in proportion to the tokens.
    assert large.activations == pytest.approx(4 * small.activations, rel=0.01)
    logits = 64 * 256 * 4  # T, V, float32
    assert large.activations > 6 * logits


def test_too_little_memory_is_refused_with_all_figures() -> None:
    needed = TrainingMemory(weights=3 << 20, source=1 << 20, activations=2 << 20)
    check_memory(needed, 6 << 20)
    with pytest.raises(CapacityError, match=r"6\.0 MiB of memory, and 5\.0 MiB are free: 3\.0 MiB .* 1\.0 .* 2\.0"):
        check_memory(needed, 5 << 20)
