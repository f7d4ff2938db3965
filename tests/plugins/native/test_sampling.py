"""The sampler alone draws what the cpu target draws from the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.native.sampling import RowSampler
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.contracts import NO_TOKEN, SamplingBatch, StepInput
from enginewright.runtime.shared.errors import RequestError

ROWS = 12


def batch(rows: int = ROWS, logprobs: int | None = None, **changes: float) -> SamplingBatch:
    """Rows of all kinds: greedy, and drawn with each cut."""
    steps = np.arange(rows)
    values = {
        "temperature": np.where(steps % 3 == 0, 0.0, 0.5 + 0.1 * steps),
        "top_k": np.where(steps % 4 == 1, 7, 0),
        "top_p": np.where(steps % 4 == 2, 0.8, 1.0),
        "min_p": np.where(steps % 5 == 4, 0.05, 0.0),
        "seed": steps + 3,
        "counter": steps * 2,
    }
    values |= {name: np.full(rows, value) for name, value in changes.items()}
    return SamplingBatch(
        temperature=values["temperature"].astype(np.float32),
        top_k=values["top_k"].astype(np.int32),
        top_p=values["top_p"].astype(np.float32),
        min_p=values["min_p"].astype(np.float32),
        seed=values["seed"].astype(np.uint64),
        counter=values["counter"].astype(np.uint64),
        logprobs=logprobs,
    )


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_equals_the_cpu_target(tiny_bundle: Path, logprobs: int | None) -> None:
    bundle = Bundle.open(tiny_bundle)
    executor = CpuExecutor(bundle, {g.name: 1 for g in bundle.program("cpu").cache_groups}, Placement(threads=1))
    places = np.arange(ROWS, dtype=np.int32)
    output = executor.submit(
        StepInput(
            ids=places + 40,
            positions=places,
            q_start=np.array([0, ROWS], np.int32),
            kv_len=np.array([ROWS], np.int32),
            block_table={g.name: np.zeros((1, 1), np.int32) for g in executor.cache_groups},
            slots={g.name: places for g in executor.cache_groups},
            rows=places,
            sampling=batch(logprobs=logprobs),
            outputs=("logits",),
        )
    ).result()
    executor.close()
    assert output.logits is not None
    for threads in (1, 3):
        alone = RowSampler(threads).sample(output.logits, batch(logprobs=logprobs), return_logits=True)
        for name, expected in vars(output).items():
            if expected is None:
                assert getattr(alone, name) is None, name
            else:
                np.testing.assert_array_equal(getattr(alone, name), expected, err_msg=name)


def test_logits_come_back_where_they_are_asked_for() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 9)).astype(np.float32)
    assert RowSampler().sample(logits, batch(2)).logits is None
    np.testing.assert_array_equal(RowSampler().sample(logits, batch(2), return_logits=True).logits, logits)  # type: ignore[arg-type]


def test_values_out_of_range() -> None:
    logits = np.zeros((2, 9), np.float32)
    with pytest.raises(RequestError, match=r"step: .*top_p"):
        RowSampler().sample(logits, batch(2, top_p=2.0))
    with pytest.raises(RequestError, match="temperature must have 2 entries, not 3"):
        RowSampler().sample(logits, batch(3))
    with pytest.raises(RequestError, match="logprobs = 10"):
        RowSampler().sample(logits, batch(2, logprobs=10))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite(wrong: float) -> None:
    logits = np.zeros((2, 9), np.float32)
    logits[1, 4] = wrong
    output = RowSampler().sample(logits, batch(2, logprobs=1))
    assert output.tokens is not None and output.tokens.tolist() == [0, NO_TOKEN]
    assert output.top_ids is not None and output.top_ids[1].tolist() == [NO_TOKEN]
    assert output.token_logprobs is not None and np.isnan(output.token_logprobs).tolist() == [False, True]
