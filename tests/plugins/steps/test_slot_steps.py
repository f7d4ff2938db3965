"""Steps over slots that compute nothing: the order of logits, and what becomes of numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.plugins.steps.slot_steps import SlotSteps
from enginewright.plugins.steps.slots import SlotRun
from enginewright.runtime.shared.contracts import NO_TOKEN, CacheGroup, SamplingBatch, StepInput
from enginewright.runtime.shared.errors import CapacityError, RequestError

C, V = 9, 6
GROUP = CacheGroup("full", (0,), 1, 2, 2, block_size=C)


class Slots:
    """A token's logits are largest at its own id; id 5 has none that are finite."""

    length = C

    def __init__(self) -> None:
        self.runs: list[tuple[int, tuple[int, ...]]] = []
        self.forgotten: list[int] = []
        self._logits = np.zeros((16, V), np.float32)

    def fit(self, slot_of: np.ndarray, kv_len: np.ndarray) -> None:
        assert len(slot_of) == len(kv_len)

    def run(self, run: SlotRun) -> np.ndarray:
        self.runs.append((run.first, run.ids.shape))
        ids = run.ids.ravel()[run.wanted]
        logits = self._logits[: len(ids)]
        logits[:] = np.arange(V) == ids[:, None]
        logits[ids == 5] = np.nan
        return logits

    def forget(self, slots: np.ndarray) -> None:
        self.forgotten += slots.tolist()


def greedy(rows: int) -> SamplingBatch:
    zeros = np.zeros(rows)
    return SamplingBatch(
        temperature=zeros.astype(np.float32),
        top_k=zeros.astype(np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=zeros.astype(np.float32),
        seed=zeros.astype(np.uint64),
        counter=zeros.astype(np.uint64),
    )


def step(requests: dict[int, list[int]], rows: list[int], sampled: bool = True) -> StepInput:
    """``requests``: slot -> its tokens, from its first on."""
    counts = [len(tokens) for tokens in requests.values()]
    slots = np.array(list(requests), np.int32)
    positions = np.concatenate([np.arange(n) for n in counts] or [[]]).astype(np.int32)
    return StepInput(
        ids=np.array([t for tokens in requests.values() for t in tokens], np.int32),
        positions=positions,
        q_start=np.cumsum([0, *counts]).astype(np.int32),
        kv_len=np.array(counts, np.int32),
        block_table={"full": slots[:, None]},
        slots={"full": np.repeat(slots * C, counts).astype(np.int32) + positions},
        rows=np.array(rows, np.int32),
        sampling=greedy(len(rows)) if sampled else None,
        outputs=() if sampled else ("logits",),
    )


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def steps(slots: Slots) -> SlotSteps:
    return SlotSteps(slots, (GROUP,), 8, 1)


def test_rows_come_in_the_step_s_order(steps: SlotSteps, slots: Slots) -> None:
    """Decodes run first, then prompts that aren't neighbours one by one."""
    done = steps.run(step({6: [1, 2], 0: [3], 4: [4, 1, 2], 1: [2]}, [6, 1, 2, 5]))
    assert done.tokens is not None
    assert done.tokens.tolist() == [2, 2, 3, 2]
    assert slots.runs == [(0, (2, 1)), (4, (1, 3)), (6, (1, 2))]


def test_logits_that_are_kept_outlive_the_next_step(steps: SlotSteps) -> None:
    first = steps.run(step({0: [1]}, [0], sampled=False)).logits
    steps.run(step({0: [2]}, [0], sampled=False))
    assert first is not None
    assert first.argmax(-1).tolist() == [1]


def test_numbers_that_are_not_finite(steps: SlotSteps, slots: Slots) -> None:
    steps.run(step({2: [1], 3: [5], 7: [2, 5]}, [0, 1, 3], sampled=False))
    assert slots.forgotten == [3, 7]
    done = steps.run(step({0: [3], 4: [1, 5], 2: [2]}, [0, 2, 3]))
    assert done.tokens is not None and done.tokens.tolist() == [3, NO_TOKEN, 2]
    assert slots.forgotten == [3, 7, 4]


def test_steps_that_can_not_be(steps: SlotSteps, slots: Slots) -> None:
    with pytest.raises(RequestError, match="it has no tokens"):
        steps.run(step({}, []))
    with pytest.raises(CapacityError, match="a request has 9 tokens, and a slot holds 8"):
        steps.run(step({0: [1] * 9}, [0]))
    with pytest.raises(RequestError, match="slots are 0 to 7"):
        steps.run(step({8: [1]}, [0]))
    assert slots.runs == []
