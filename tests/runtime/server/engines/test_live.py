"""The data of the live view, with an engine that is held in the middle of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM, SamplingParams
from enginewright.runtime.server.engines.live import Live
from enginewright.runtime.tasks.base import Prepared
from enginewright.runtime.tasks.generate import Generate
from tests.waiting import Held, wait_until

SCHEDULING = {"classes": {"chat": {"ttft": "500s"}, "batch": {"priority": 1}}}
PROMPT = list(range(40, 120))


@pytest.fixture
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, scheduling=SCHEDULING, max_requests=3, speculate=None) as opened:
        yield opened


class Submits:
    """An executor's ``submit``, under the name that ``Held`` holds."""

    def __init__(self, llm: LLM) -> None:
        self._executor = llm.engine.executor
        self.submit = self._executor.submit

    @property
    def run(self) -> Any:
        return self.submit

    @run.setter
    def run(self, held: Any) -> None:
        self._executor.submit = held  # type: ignore[method-assign]


def started(llm: LLM, ended: list[Prepared[Any]], **options: Any) -> Prepared[Any]:
    params = SamplingParams(max_tokens=options.pop("max_tokens", 4), ignore_eos=True)
    prepared = llm.prepare(Generate(options.pop("prompt", PROMPT), params), **options)
    llm.submit(prepared, lambda event: ended.append(prepared) if event.finish_reason else None)  # type: ignore[union-attr]
    return prepared


def counts(found: dict[str, Any]) -> list[int]:
    (blocks,) = found["blocks"].values()
    assert sum(length for _, length in blocks["runs"]) == blocks["total"]
    return [sum(length for state, length in blocks["runs"] if state == which) for which in range(4)]


def test_an_engine_in_the_middle_of_a_step(llm: LLM) -> None:
    """80 tokens are two blocks of 32 and a part of one; one request waits as three run."""
    ended: list[Prepared[Any]] = []
    live = Live(llm)
    first = started(llm, ended, tenant="secret-tenant")
    wait_until(lambda: len(ended) == 1)
    live.left(first)
    idle = live.now([])
    assert (idle["running"], idle["waiting"], idle["batch"], idle["requests"]) == (0, 0, None, [])
    assert idle["tokens"] == 4 and idle["prompt_tokens"] == 80
    assert counts(idle)[1:] == [0, 0, 3]  # 83 tokens have keys and values
    held = Held(Submits(llm), 1)
    names, tenant = ("chat", "chat", "batch", "batch"), "secret-tenant"
    going = llm._loop.call(  # between two steps, so that all come to the same one
        lambda: [started(llm, ended, tenant=tenant, request_class=name) for name in names]
    )
    wait_until(lambda: llm.pulse().steps and llm.pulse().step_seconds and len(llm.engine.scheduler.running) == 3)
    now = live.now(going)
    assert now["running"] == 3 and now["waiting"] == 1
    assert counts(now)[2] == 2  # the two whole blocks of the prompt
    rows = now["requests"]
    assert [row["state"] for row in rows].count("waits") == 1
    assert {row["cached"] for row in rows if row["state"] != "waits"} == {79}
    assert now["batch"]["decodes"] + now["batch"]["prompt"] >= 1
    of = {row["name"]: row for row in now["classes"]}
    assert (of["chat"]["running"], of["batch"]["running"] + of["batch"]["waiting"]) == (2, 2)
    assert of["chat"]["ttft_target"] == 500.0 and of[""]["ended"] == 1
    assert now["prefix_cache"]["reused"] >= 3 * 79 and now["speculation"] is None
    assert "secret-tenant" not in json.dumps(now)
    held.release()
    wait_until(lambda: len(ended) == 5)
    for prepared in going:
        live.left(prepared)
    last = live.now([])
    assert last["tokens"] == 5 * 4 and last["prompt_tokens"] >= 80
    assert {row["name"]: row["ended"] for row in last["classes"]} == {"": 1, "chat": 2, "batch": 2}
    for row in last["classes"]:
        (middle, late), times = row["ttft"], row["tpot"]
        assert 0 < middle <= late and 0 < times[0] <= times[1]


def test_who_is_aborted_is_counted_but_not_timed(llm: LLM) -> None:
    live, ended = Live(llm), list[Prepared[Any]]()
    held = Held(Submits(llm), 3)
    one = started(llm, ended, max_tokens=50)
    wait_until(lambda: one.requests[0].output_length >= 2)
    llm.abort(one)
    held.release()
    wait_until(lambda: not llm.engine.has_work())
    written = one.requests[0].output_length
    live.left(one)
    state = live.now([])
    assert state["tokens"] == written and state["classes"] == []
