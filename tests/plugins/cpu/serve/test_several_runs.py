"""Several runs of a step in C++: tokens, bit for bit, are those of one run a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import NO_TOKEN, StepInput, StepOutput
from enginewright.runtime.shared.errors import RequestError
from tests.plugins.native.lowered_builder import sampling_batch, step_input
from tests.several_runs import run_several

from .test_executor import TABLE, V, make_bundle

__all__ = ["make_bundle"]

LONG = 1e9
"""Seconds in which as many runs fit as an executor takes."""


class Counting(CpuExecutor):
    """Counts the runs of each step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.runs: list[int] = []

    def submit(self, step: StepInput) -> Any:
        pending = super().submit(step)
        result = pending.result

        def counted() -> StepOutput:
            output = result()
            if step.runs > 1:
                assert output.tokens is not None
                self.runs.append(len(output.tokens))
            return output

        pending.result = counted  # type: ignore[method-assign]
        return pending


def random_generation(rng: np.random.Generator) -> Generation:
    params = SamplingParams(
        max_tokens=int(rng.integers(1, 70)),
        temperature=float(rng.choice([0, 0.7, 1.5])),
        top_k=int(rng.choice([0, 5])),
        top_p=float(rng.choice([1, 0.8])),
        xtc_probability=float(rng.choice([0, 0.5])),
        xtc_threshold=0.02,
        seed=int(rng.integers(1 << 32)),
        logit_bias={7: 1.5, 9: -100.0} if rng.random() < 0.3 else {},
        allowed_token_ids=range(5, 90) if rng.random() < 0.2 else (),
        stop_token_ids=rng.integers(0, V, 8).tolist(),
        repetition_penalty=1.5 if rng.random() < 0.03 else 1.0,
    )
    return Generation(rng.integers(0, V, rng.integers(1, 50)).tolist(), params)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cache", ["f32", "i8"])
def test_tokens_are_those_of_one_run_a_step(make_bundle: Callable[..., Path], cache: str, threads: int) -> None:
    bundle = Bundle.open(make_bundle(cache))
    single = CpuExecutor(bundle, {"full": 8}, Placement(threads=1))
    executor = Counting(bundle, {"full": 12}, Placement(threads=threads))
    engine = Engine(executor, SchedulerConfig(6, 64, prefix_cache=True, runs_seconds=LONG))
    rng, waiting, running = np.random.default_rng(threads), 40, list[Generation]()
    while waiting or engine.has_work():
        if waiting and (rng.random() < 0.1 or not engine.has_work()):
            waiting -= 1
            running.append(request := random_generation(rng))
            engine.add_request(request)
        if running and rng.random() < 0.02:
            engine.abort(running[0])
        if engine.has_work():
            engine.step()
        for request in [one for one in running if one.finished]:
            running.remove(request)
            alone = Engine(single, SchedulerConfig())
            one = Generation(request.tokens[: request.prompt_length], request.params)
            alone.add_request(one)
            while alone.has_work():
                alone.step()
            if request.finish_reason == "abort":
                assert request.tokens == one.tokens[: len(request.tokens)]
            else:
                assert (request.tokens, request.stop_reason) == (one.tokens, one.stop_reason)
    assert sum(executor.runs) > 2 * len(executor.runs) > 20
    assert engine.pools["full"].free_blocks == 12


def decode(program: Any, lengths: list[int], **options: Any) -> StepInput:
    """A step in which each request decodes one token after a prompt that has been computed in ``program``."""
    rng = np.random.default_rng(4)
    tables = [[3 * b, 3 * b + 1, 3 * b + 2] for b in range(len(lengths))]
    prompts = [rng.integers(0, V // 2, length).tolist() for length in lengths]
    program.run(step_input(prompts, groups=["full"], tables=tables))
    last = [[int(token)] for token in rng.integers(0, V // 2, len(lengths))]
    sampling = sampling_batch(len(lengths), top_k=20, seed=9, counter=3)
    step = step_input(last, lengths, groups=["full"], tables=tables, sampling=sampling)
    return step.changed(**options)


def test_runs_are_those_of_steps_that_are_made_anew(make_bundle: Callable[..., Path]) -> None:
    """Requests come to their next block at different runs."""
    executor = CpuExecutor(Bundle.open(make_bundle("f32")), {"full": 9}, Placement(threads=2))
    program, groups = executor.program, executor.cache_groups
    step = decode(program, [29, 32, 50], runs=8)
    tokens_of_runs = program.run(step).tokens
    expected = run_several(decode(program, [29, 32, 50], runs=8), groups, program.run).tokens
    assert tokens_of_runs is not None and tokens_of_runs.shape == (8, 3)
    np.testing.assert_array_equal(tokens_of_runs, expected)
    ended = program.run(replace_until(step, int(tokens_of_runs[4, 1]))).tokens
    first = int(np.flatnonzero((tokens_of_runs == tokens_of_runs[4, 1]).any(1))[0])
    np.testing.assert_array_equal(ended, tokens_of_runs[: first + 1])
    program.interrupt()
    assert program.run(step).tokens.tolist() == tokens_of_runs[:1].tolist()  # type: ignore[union-attr]
    np.testing.assert_array_equal(program.run(step).tokens, tokens_of_runs)


def replace_until(step: StepInput, *tokens: int) -> StepInput:
    return step.changed(until=tokens)


def test_runs_end_at_a_row_of_nan(make_bundle: Callable[..., Path]) -> None:
    executor = CpuExecutor(Bundle.open(make_bundle("f32")), {"full": 6}, Placement(threads=1))
    tokens = executor.program.run(decode(executor.program, [5, 6], runs=8)).tokens
    assert tokens is not None
    table = TABLE.copy()  # prompts have the first half of it
    at, bad = next((r, t) for r, t in enumerate(tokens[:7, 0].tolist()) if t >= V // 2 and t not in tokens[:r])
    assert bad not in tokens[: at + 1, 1]
    table[bad] = np.nan
    executor = CpuExecutor(Bundle.open(make_bundle("f32", table, "-nan")), {"full": 6}, Placement(threads=1))
    tokens_of_runs = executor.program.run(decode(executor.program, [5, 6], runs=8)).tokens
    assert tokens_of_runs is not None and tokens_of_runs.shape == (at + 2, 2)
    assert tokens_of_runs[-1, 0] == NO_TOKEN and tokens_of_runs[-1, 1] == tokens[at + 1, 1]
    np.testing.assert_array_equal(tokens_of_runs[:-1], tokens[: at + 1])


def test_steps_that_can_not_run_several_times(make_bundle: Callable[..., Path]) -> None:
    program = CpuExecutor(Bundle.open(make_bundle("f32")), {"full": 6}, Placement(threads=1)).program
    two = step_input([[1, 2], [3]], groups=["full"], sampling=sampling_batch(2)).changed(runs=2)
    with pytest.raises(RequestError, match="a step with several runs: a request has several tokens"):
        program.run(two)
    short = decode(program, [31, 5], runs=3)
    narrow = short.changed(block_table={"full": short.block_tables["full"][:, :1].copy()})
    with pytest.raises(RequestError, match=r"block_table:full has 1 blocks a request|slots:full\[0\] = -1"):
        program.run(narrow)


def test_executors_without_it(make_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.open(make_bundle("f32"))
    assert CpuExecutor(bundle, {"full": 6}).caps.most_runs == 8
    single = CpuExecutor(bundle, {"full": 6}, Placement(threads=1))
    single.caps = replace(single.caps, most_runs=1)
    engine = Engine(single, SchedulerConfig(runs_seconds=LONG))
    engine.add_request(request := Generation([1, 2], SamplingParams(max_tokens=5, ignore_eos=True)))
    for expected in (3, 4, 5):
        engine.step()
        assert len(request.tokens) == expected
