"""LLM for coroutines: streams, cancellation, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import EnginewrightError, RequestError
from tests.waiting import HANG, Held

MakeLLM = Callable[..., LLM]
Toy = Callable[..., Any]
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG):
        while not condition():
            await asyncio.sleep(0.001)


async def idle(llm: LLM) -> None:
    pools = llm.engine.pools.values()
    await until(lambda: all(pool.free_blocks == pool.total_blocks for pool in pools) and not llm.engine.has_work())


def test_streams_run_together_and_equal_generate(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    llm = make_llm(executor)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = llm.generate([[1], [2], [3]], params)

    async def collect(prompt: list[int]) -> tuple[int, ...]:
        return tuple([t async for piece in llm.astream(prompt, params) for t in piece.token_ids])

    async def main() -> list[tuple[int, ...]]:
        held = Held(executor, 0)
        tasks = [asyncio.create_task(collect([n])) for n in (1, 2, 3)]
        await asyncio.sleep(0)  # each has asked, and waits for its first piece
        held.release()
        return await asyncio.gather(*tasks)

    executor.steps.clear()
    assert asyncio.run(main()) == [r.token_ids for r in expected]
    assert len(executor.steps) < 40  # 60 if they ran one after the other
    assert llm.engine.pools["g0"].free_blocks == 64


def test_cancelling_the_task_frees_the_blocks(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    llm = make_llm(executor)
    held = Held(executor, 3)
    pieces: list[object] = []

    async def consume() -> None:
        async for piece in llm.astream("abc", LONG):
            pieces.append(piece)

    async def main() -> None:
        task = asyncio.create_task(consume())
        await until(lambda: len(pieces) == 3)
        assert llm.engine.pools["g0"].free_blocks < 64
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.release()
        await idle(llm)
        assert len(pieces) == 3

    asyncio.run(main())


def test_leaving_the_loop_and_closing_frees_the_blocks(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    llm = make_llm(executor)
    held = Held(executor, 2)

    async def main() -> None:
        stream = llm.astream("abc", LONG)
        async for _ in stream:
            break
        await stream.aclose()
        held.release()
        await idle(llm)

    asyncio.run(main())


def test_an_event_loop_that_ends_early_does_no_harm(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    llm = make_llm(executor)
    held = Held(executor, 2)

    async def main() -> None:
        await anext(llm.astream("abc", LONG))

    asyncio.run(main())
    held.release()
    assert len(llm.generate("abc", LONG)[0].token_ids) == 100


def test_an_event_loop_that_is_closed_without_its_generators_does_no_harm(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    llm = make_llm(executor)
    held = Held(executor, 2)
    loop = asyncio.new_event_loop()
    stream = llm.astream("abc", LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    held.release()
    assert len(llm.generate("abd", LONG)[0].token_ids) == 100
    del stream


def test_chat(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    async def main() -> tuple[int, ...]:
        return tuple([t async for piece in llm.astream_chat(messages, params) for t in piece.token_ids])

    assert asyncio.run(main()) == llm.chat(messages, params)[0].token_ids


def test_errors(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    llm = make_llm(executor)
    with pytest.raises(RequestError, match="empty"):
        llm.astream("")  # at once, with no event loop

    async def main() -> None:
        async for _ in llm.astream("a"):
            pass

    executor.fail = ValueError("bad step")
    with pytest.raises(EnginewrightError, match="bad step"):
        asyncio.run(main())


def test_generate_and_chat_can_be_awaited(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    executor.poison = ord("!")
    llm = make_llm(executor)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    message = [{"role": "user", "content": "hi"}]

    async def run() -> None:
        one, many, answers = await asyncio.gather(
            llm.agenerate("abc", params),
            llm.agenerate(["abc", "x!", [1, 2]], sampling_params=params),
            llm.achat([message, message], params, chat_template_kwargs={"bos_token": "<|bos|>"}),
        )
        assert one == llm.generate("abc", params)
        assert many[0] == one[0] and many[1].error is not None
        assert answers == llm.chat([message, message], params)
        with pytest.raises(EnginewrightError, match="NaN"):
            await llm.agenerate("x!", params)
        with pytest.raises(RequestError, match="prompts: None"):
            await llm.agenerate(None)  # type: ignore[arg-type]

    asyncio.run(run())


def test_cancelling_a_generate_frees_its_blocks(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    llm = make_llm(executor)
    held = Held(executor, 2)

    async def run() -> None:
        task = asyncio.create_task(llm.agenerate(["a", "b"], SamplingParams(max_tokens=120, ignore_eos=True)))
        await until(lambda: len(executor.steps) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.release()
        await idle(llm)

    asyncio.run(run())
