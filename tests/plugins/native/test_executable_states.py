"""Steps with caches of states: a snapshot after any token, and slots that aren't places of the pool."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.shared.contracts import STATE, STATE_TOKENS, CacheGroup, StepInput
from enginewright.runtime.shared.errors import RequestError
from tests.plugins.native.lowered_builder import LoweredBuilder, R, T, step_input

ROWS = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


def program() -> CpuProgram:
    """A convolution over 4 tokens of 8 channels, whose result is the logits. A pool of 8 states."""
    b = LoweredBuilder()
    b.groups.append(CacheGroup("state", (0,), 1, 1, 1, kind=STATE, state_size=24, block_size=STATE_TOKENS))
    x, out = b.values(ROWS), b.buffer(T, 8)
    weight = b.weight(np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32))
    ports = [b.input(name) for name in ("block_table:state", "q_start", "kv_len", "slots:state")]
    b.step("stored_convolution", [x, weight, b.cache("state/0"), *ports], [out], "layers.0", first=0, activation="silu")
    b.logits = b.buffer(R, 8)
    b.step("take_rows", [out, b.input("rows")], [b.logits], "head")
    return b.build()


def step(ids: list[int], past: int, block: int, slots: dict[int, int]) -> StepInput:
    """Tokens of a request with its state in ``block``; ``slots`` are token of the step -> slot."""
    new_step = step_input([ids], [past], groups=["state"], tables=[[block]], return_logits=True)
    new_step.arrays["slots:state"][:] = -1
    for token, slot in slots.items():
        new_step.arrays["slots:state"][token] = slot
    return new_step


def test_a_request_goes_on_from_a_snapshot_with_the_same_bits() -> None:
    """It is stored after 3 of 6 tokens; another request with the first 3 tokens goes on in the snapshot's block."""
    whole, snapshot = program(), program()
    ids = [0, 3, 5, 1, 1, 4]
    expected = whole.run(step(ids, 0, 2, {})).logits
    np.testing.assert_array_equal(snapshot.run(step(ids, 0, 2, {2: 7 * STATE_TOKENS + 2})).logits, expected)
    np.testing.assert_array_equal(snapshot.run(step(ids[3:], 3, 7, {})).logits, expected)


@pytest.mark.parametrize("slot", [-2, 8 * STATE_TOKENS])
def test_a_slot_is_none_or_in_the_pool(slot: int) -> None:
    with pytest.raises(RequestError, match=rf"slots:state\[1\] = {slot} is not in \[-1, {8 * STATE_TOKENS}\)"):
        program().run(step([0, 1, 2], 0, 2, {1: slot}))
