"""The arrays of a step say what the chunks say."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from enginewright.runtime.requests.request import Generation, PromptRequest, Request
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.base import Chunk, step_input
from enginewright.runtime.shared.contracts import CacheGroup

GROUPS = {"g": CacheGroup("g", (0,), 1, 1, 1, block_size=4)}


def request(length: int, table: list[int], scores: bool = False, **params: float) -> Request:
    prompt = range(10, 10 + length)
    generation: Request = Generation(prompt, SamplingParams(**params))
    if scores:
        generation = PromptRequest(prompt, ("logits",), lambda start, rows: None)
    generation.tables = {"g": array("i", table)}
    return generation


def test_a_decode_a_partial_and_a_whole_prefill() -> None:
    decode, partial, whole = request(6, [5, 2]), request(9, [0, 7]), request(2, [1], temperature=0.5, seed=9)
    decode.computed = 5
    step = step_input([Chunk(decode, 5, 1), Chunk(partial, 4, 3), Chunk(whole, 0, 2)], GROUPS)
    assert step.ids.tolist() == [15, 14, 15, 16, 10, 11]
    assert step.positions.tolist() == [5, 4, 5, 6, 0, 1]
    assert step.q_start.tolist() == [0, 1, 4, 6]
    assert step.kv_len.tolist() == [6, 7, 2]
    assert step.block_tables["g"].tolist() == [[5, 2], [0, 7], [1, -1]]
    assert step.slots["g"].tolist() == [9, 28, 29, 30, 4, 5]
    assert step.rows.tolist() == [0, 5]  # the partial prefill has none
    assert step.sampling is not None and not step.outputs
    assert step.sampling.temperature.tolist() == [0, 0.5]
    assert step.sampling.seed[1] == 9
    arrays = (step.ids, step.positions, step.q_start, step.kv_len, step.rows, step.slots["g"], step.block_tables["g"])
    assert all(a.dtype == np.int32 for a in arrays)


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_sampled_from_part_of_a_prompt(count: int) -> None:
    step = step_input([Chunk(request(4, [0]), 0, count)], GROUPS)
    assert step.rows.size == 0 and step.rows.dtype == np.int32
    assert step.sampling is None


def test_a_scored_prompt_wants_every_row() -> None:
    step = step_input([Chunk(request(5, [0, 1], scores=True), 1, 3), Chunk(request(2, [2]), 0, 2)], GROUPS)
    assert step.rows.tolist() == [0, 1, 2, 4]
    assert step.outputs == ("logits",)


def test_the_counter_is_the_index_of_the_new_token() -> None:
    running = request(2, [0])
    running.accept(30)
    running.accept(31)
    step = step_input([Chunk(running, 3, 1)], GROUPS)
    assert step.sampling is not None
    assert step.sampling.counter.tolist() == [2]
