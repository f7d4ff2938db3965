from __future__ import annotations

import json
from pathlib import Path

import pytest
from peers import rounds
from peers.prepare import Contender, Missing
from peers.processes import WorkerError
from peers.rounds import Job, Measured, command_of, measure, plan
from peers.workload import Report, Workload

from tests.benchmarks.peers_results import contender

TWO = [contender("enginewright"), contender("llama.cpp")]


def test_engines_take_turns_and_another_begins_each_round() -> None:
    jobs = plan(TWO, 2, ["speed", "logits"])
    assert [(j.round, j.task, j.contender.engine) for j in jobs] == [
        (0, "speed", "enginewright"),
        (0, "speed", "llama.cpp"),
        (0, "logits", "enginewright"),
        (0, "logits", "llama.cpp"),
        (1, "speed", "llama.cpp"),
        (1, "speed", "enginewright"),
    ]


def test_long_prompts_of_a_large_model_are_measured_as_often_as_it_says() -> None:
    large = [contender("enginewright", "llama-1b")]
    assert [j.task for j in plan(large, 3, ["speed", "long"])] == ["speed", "long", "speed", "speed"]


def test_the_longest_contexts_are_measured_once_and_of_those_who_can() -> None:
    three = [*TWO, contender("ctranslate2")]
    jobs = [(j.task, j.contender.engine) for j in plan(three, 2, ["far", "start"])]
    assert jobs[:2] == [("far", "enginewright"), ("far", "llama.cpp")]
    assert [task for task, _ in jobs[2:]] == ["start"] * 6


def test_who_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(command: list[str]) -> Report:
        seen.append(command)
        if "peers.workers.llama.cpp" in command and "long" in command:
            raise WorkerError("no such file")
        return Report("e 1", "s", {"prefill": 5.0}, {"peak": len(seen)})

    monkeypatch.setattr(rounds, "run", run)
    measured: dict[Contender, Measured] = {}
    missing: list[Missing] = []
    begun: list[int] = []
    jobs = plan(TWO, 2, ["speed", "long"])
    measure(jobs, Workload(), measured, missing, before=lambda: begun.append(len(seen)))
    assert missing == [Missing("llama.cpp", "smollm2", "int8", "long: no such file")]
    assert len(seen) == len(jobs) - 1  # what failed isn't tried again
    assert begun == [0, 4]
    ours = measured[TWO[0]]
    assert [set(figures) for figures in ours.rounds] == [{"prefill"}, {"prefill"}]
    assert ours.bytes == {"peak": 6}  # the most of those of speed
    assert (ours.engine, ours.settings) == ("e 1", "s")


def test_prompts_change_with_the_round_and_the_prefix_comes_first() -> None:
    one = contender("enginewright")
    prefixed = Contender(one.engine, one.model, one.format, type(one.command)(Path("py"), "ours", ("nice",)), one.path)
    first, second = (command_of(Job(index, "speed", prefixed), Workload()) for index in (0, 1))
    assert first[:4] == ["nice", "py", "-m", "peers.workers.ours"]
    assert [Workload.parse(c[6]).seed for c in (first, second)] == [0, 1]
    start = command_of(Job(0, "start", prefixed), Workload())
    assert start[0] == "nice" and "peers.processes" in start and start.count("nice") == 1


@pytest.mark.parametrize(("most", "attempts"), [(8, [(16, 8), (8,), (8,)]), (1, [(16, 8), (8,), (), ()])])
def test_an_engine_that_fails_at_the_largest_batch_is_measured_without_it(
    most: int, attempts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def run(command: list[str]) -> Report:
        batches = next(tuple(json.loads(part)["batches"]) for part in command if part.startswith("{"))
        tried.append(batches)
        if max(batches, default=0) > most:
            raise WorkerError("no room")
        return Report("e 1", "s", {"prefill": 5.0})

    monkeypatch.setattr(rounds, "run", run)
    measured: dict[Contender, Measured] = {}
    missing: list[Missing] = []
    jobs = plan(TWO[1:], 2, ["speed"])
    measure(jobs, Workload(batches=(16, 8)), measured, missing, before=lambda: None)
    assert tried == attempts
    assert [one.reason for one in missing] == [f"{batch} requests: no room" for batch in (16, 8) if batch > most]
    assert measured[TWO[1]].rounds == [{"prefill": 5.0}, {"prefill": 5.0}]
