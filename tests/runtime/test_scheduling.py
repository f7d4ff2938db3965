"""``LLM(scheduling=...)``: the arguments of every call, and what becomes of a request that is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.policy import RankedPolicy
from enginewright.runtime.shared.contracts import ExecutorCaps
from enginewright.runtime.shared.errors import OverloadError, RequestError

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hi"}]
CLASSES = {"chat": {"ttft": "30s", "tpot": "10s"}, "batch": {"priority": 1}}


@pytest.mark.parametrize("scheduling", ["fcfs", "priority", "fair", "offline", {"classes": CLASSES}])
def test_results_are_the_same(make_llm: MakeLLM, toy: Callable[..., Any], scheduling: Any) -> None:
    prompts = ["one", "two", "three and more", "four"]
    expected = make_llm(toy()).generate(prompts, PARAMS)
    llm = make_llm(toy(blocks=10), max_requests=3, scheduling=scheduling)
    assert llm.generate(prompts, PARAMS) == expected
    info = llm.info()["scheduling"]
    assert (info is None) == (scheduling == "fcfs") and (info is None or info["refused"] == 0)
    assert llm.logits([1, 2, 3]).shape == (3, 260)


def test_beams_and_samples_are_the_same(make_llm: MakeLLM, toy: Callable[..., Any]) -> None:
    """In a cache so small that they are preempted, beside requests of every class."""
    caps = ExecutorCaps(shared_blocks=True)
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, num_beams=3),
        SamplingParams(max_tokens=12, ignore_eos=True, n=3, temperature=1.0, seed=3),
        SamplingParams(max_tokens=20, ignore_eos=True),
    ] * 3
    prompts = [f"prompt {i}" for i in range(9)]
    expected = make_llm(toy(200, caps=caps)).generate(prompts, params)
    preempted = 0  # by classes they are or aren't, as times are on a busy machine
    for scheduling in ("fair", {"classes": CLASSES | {"default": {"ttft": "20s"}}}):
        llm = make_llm(toy(15, caps=caps), max_requests=5, scheduling=scheduling)
        assert llm.generate(prompts, params) == expected
        preempted += llm.info()["preemptions"]
        policy = llm.engine.scheduler.policy
        assert isinstance(policy, RankedPolicy)
        assert policy.shares is None or not policy.shares.counted, "none is kept"
    assert preempted > 0


def test_every_call_takes_a_class_and_a_priority(make_llm: MakeLLM, toy: Callable[..., Any]) -> None:
    llm = make_llm(toy(), scheduling={"classes": CLASSES})
    terms = {"tenant": "a", "priority": 2, "request_class": "batch"}

    async def coroutines() -> int:
        pieces = [p async for p in llm.astream("a", PARAMS, **terms)]  # type: ignore[arg-type]
        pieces += [p async for p in llm.astream_chat(CHAT, PARAMS, **terms)]  # type: ignore[arg-type]
        results = await llm.agenerate(["a"], PARAMS, **terms)  # type: ignore[arg-type]
        return len(pieces) + len(results + await llm.achat(CHAT, PARAMS, **terms))  # type: ignore[arg-type]

    assert llm.generate("a", PARAMS, **terms) and llm.chat(CHAT, PARAMS, **terms)  # type: ignore[arg-type]
    assert list(llm.stream("a", PARAMS, **terms)) and list(llm.stream_chat(CHAT, PARAMS, **terms))  # type: ignore[arg-type]
    assert asyncio.run(coroutines()) > 4
    calls: list[Callable[..., Any]] = [llm.generate, llm.stream]
    for call in calls:
        with pytest.raises(RequestError, match=r"request_class: there is no class 'caht'\n.*chat, batch"):
            call("a", PARAMS, request_class="caht")
        with pytest.raises(RequestError, match=r"priority: 1\.5 isn't an integer"):
            call("a", PARAMS, priority=1.5)
        with pytest.raises(RequestError, match="request_class: 3 is of type int"):
            call("a", PARAMS, request_class=3)


def test_first_come_first_served_takes_neither(make_llm: MakeLLM, toy: Callable[..., Any]) -> None:
    llm = make_llm(toy())
    for terms in ({"priority": 1}, {"request_class": "chat"}):
        with pytest.raises(RequestError, match="serves first come, first served"):
            llm.generate("a", PARAMS, **terms)  # type: ignore[arg-type]
    assert llm.generate("a", PARAMS, priority=0)


def test_options_are_checked_before_anything_is_opened() -> None:
    with pytest.raises(RequestError, match=r"^scheduling: classes: chat: ttft: 0 isn't a time"):
        LLM("nowhere.bundle", scheduling={"classes": {"chat": {"ttft": 0}}})


def test_a_request_that_is_refused_ends_alone(make_llm: MakeLLM, toy: Callable[..., Any]) -> None:
    llm = make_llm(toy(), max_requests=1, scheduling={"max_waiting": 1})
    results = llm.generate(["a", "b", "c", "d"], SamplingParams(max_tokens=60, ignore_eos=True))
    refused = [r for r in results if r.error is not None]
    assert refused and len(refused) < 4
    for result in refused:
        assert isinstance(result.error, OverloadError) and result.error.retry_after > 0
        assert result.finish_reason == "error" and result.token_ids == () and result.metrics.started is None
    assert all(len(r.token_ids) == 60 for r in results if r.error is None)
    assert llm.info()["scheduling"]["refused"] == len(refused)


def test_a_stream_that_is_refused_raises(make_llm: MakeLLM, toy: Callable[..., Any]) -> None:
    llm = make_llm(toy(), max_requests=1, scheduling={"max_waiting": 0})
    running = llm.stream("a", SamplingParams(max_tokens=100, ignore_eos=True))
    next(running)
    with pytest.raises(OverloadError, match="max_waiting: 0 requests wait already"):
        list(llm.stream("b", PARAMS))
    running.close()
    assert llm.generate("b", PARAMS)


def test_a_target_that_no_machine_time_meets_is_refused(make_llm: MakeLLM, toy: Callable[..., Any]) -> None:
    llm = make_llm(toy(), scheduling={"classes": {"never": {"ttft": "1us"}, "also": {"tpot": "1us"}}})
    llm.generate(["abc"] * 40, PARAMS, progress=False)
    for prompt in "abcdefghijkl":
        llm.generate(prompt + "measured", PARAMS)
    for name, option in (("never", "ttft"), ("also", "tpot")):
        with pytest.raises(RequestError, match=f"request_class: '{name}' has a {option} of 0.001 ms"):
            llm.generate("abc", PARAMS, request_class=name)
    assert llm.generate("abc", PARAMS)
