"""Threads with few cores: quotas, more threads than cores, and an affinity that changes while a model answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.plugins.native import executable
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared import threads as module
from enginewright.runtime.shared.step_costs import StepSizes
from tests.waiting import wait_until

CORES = sorted(os.sched_getaffinity(0))
PROMPTS = [list(range(3, 90)), [5, 9, 200], list(range(100, 140))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
SIZES = (StepSizes((70,), (70,)),)


def answers(llm: LLM) -> list[object]:
    return [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, PARAMS)]


@contextmanager
def again_and_again(change: Callable[[int], None]) -> Iterator[list[int]]:
    """Calls ``change`` with 0, 1 .. in another thread until the block ends; yields a list of the last number."""
    count, over = [0], threading.Event()

    def run() -> None:
        while not over.wait(0.001):
            change(count[0])
            count[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()


def put_on(cores: list[int]) -> None:
    """Puts all threads of this process on cores, as ``taskset -a`` does."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has ended


def cpu_seconds_of(seconds: float) -> float:
    """Measures the CPU time that this process uses while it sleeps for `seconds`."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def test_answers_while_the_affinity_changes(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        want = answers(llm)

    def change(number: int) -> None:
        put_on(CORES if number % 2 else CORES[number // 2 % len(CORES) :][:1])

    try:
        with LLM(tiny_bundle, threads=3) as llm, again_and_again(change) as changes:
            while changes[0] < 20:
                assert answers(llm) == want
    finally:
        put_on(CORES)


def test_answers_of_more_threads_than_cores(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        want = answers(llm)
    with LLM(tiny_bundle, threads=4 * len(CORES) + 1) as llm:
        assert answers(llm) == want


def test_a_model_takes_the_threads_of_the_quota(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_quota", lambda root: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert StepRunner(Bundle.open(tiny_bundle), SIZES).program.threads == 2


def test_more_threads_than_a_quota_sleep_at_once(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may spin for 0.3 s here: the CPU time of this process after a step shows if they do."""
    monkeypatch.setattr(executable, "cpu_quota", lambda: 1)
    tuning = {"spin_microseconds": 300_000, "small_work": 1}
    runner = StepRunner(Bundle.open(tiny_bundle), SIZES, threads=2, tuning=tuning)
    runner.fill_caches()
    wait_until(lambda: cpu_seconds_of(0.1) < 0.02)  # a thread that started before the quota was stated may spin now
    runner.program.run(runner.step(SIZES[0]))
    assert cpu_seconds_of(0.2) < 0.05
