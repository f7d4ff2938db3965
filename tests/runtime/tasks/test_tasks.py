"""Tasks give the same result here and through the socket of an engine's process; a new type is one file and a row."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginewright import LLM, SamplingParams
from enginewright.runtime.requests.outputs import RequestMetrics, RequestOutput, StreamPiece
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.server.engines import records
from enginewright.runtime.server.engines.engine_client import Limits, Model
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, RequestError
from enginewright.runtime.tasks.base import Task
from enginewright.runtime.tasks.generate import Finished, Generate, Generated
from enginewright.runtime.tasks.hidden_states import HiddenStates
from enginewright.runtime.tasks.logits import Logits
from enginewright.runtime.tasks.table import TASKS, received, received_result
from tests.runtime.tasks import toy_task
from tests.runtime.tasks.toy_task import NextTokens

PROMPT = list(range(40, 110))
GENERATE = Generate(PROMPT, SamplingParams(max_tokens=6, temperature=0.8, seed=4, n=2, logprobs=2, prompt_logprobs=1))
HELD = Generate(PROMPT, SamplingParams(max_tokens=9, structured_outputs={"choice": ["ab", "cd"]}))


class Engine(records.Engine):
    """An engine's process whose table has the toy."""

    program = (toy_task.__file__,)


def served(bundle: Path, use: Callable[[Model], Awaitable[Any]]) -> Any:
    """Returns what ``use`` returns with a model whose engine has a process of its own."""

    async def serve() -> Any:
        model = Model("m", str(bundle), {}, Limits(), Engine(str(bundle), {}))
        model.start()
        try:
            await model.wait_until_ready()
            return await use(model)
        finally:
            await model.close()

    return asyncio.run(serve())


def test_results_are_the_same_through_the_socket(tiny_bundle: Path) -> None:
    """All types at once, a tenant's and another's; a stream's pieces are the whole answer."""
    prompt_tasks: list[Task[Any]] = [Logits(PROMPT), HiddenStates(PROMPT, [0, -2]), NextTokens(PROMPT, count=3)]
    with LLM(tiny_bundle) as llm:
        expected = [llm.run(task) for task in prompt_tasks]
        answer, held = llm.run(GENERATE), llm.run(HELD)
        assert expected[2] == np.argsort(-llm.logits(PROMPT)[-1], kind="stable")[:3].tolist()
        assert asyncio.run(llm.arun(prompt_tasks[2], tenant="a")) == expected[2]

    async def use(model: Model) -> Any:
        running = [model.run(task, RequestOptions("a")) for task in (*prompt_tasks, GENERATE, HELD)]
        ended = await asyncio.gather(*(one.result() for one in running))
        pieces: dict[int, list[int]] = {0: [], 1: []}
        async for event in model.run(GENERATE, whole=False).events():
            for piece in event if isinstance(event, list) else ():
                pieces[piece.index] += piece.token_ids
        return [one.result for one in ended], [one.metrics for one in ended], pieces

    results, metrics, pieces = served(tiny_bundle, use)
    for result, other in zip(results[:2], expected, strict=False):
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, other)
    assert results[2] == expected[2]
    assert_answers(results[3], answer)
    assert_answers(results[4], held)
    assert pieces == {i: list(one.token_ids) for i, one in enumerate((answer, *answer.others))}
    assert all(min(one.times) >= 0 and one.queued > 0 for one in metrics)


def assert_answers(generated: Generated, expected: RequestOutput) -> None:
    both = (expected, *expected.others)
    assert [(one.text, one.token_ids, one.finish_reason) for one in generated.answers] == [
        (one.text, one.token_ids, one.finish_reason) for one in both
    ]
    for one, alone in zip(generated.answers, both, strict=True):
        logprobs = None if alone.logprobs is None else [(e.token_id, e.logprob, e.top) for e in alone.logprobs]
        assert logprobs == (None if one.logprobs is None else list(one.logprobs))
    assert (generated.prompt_logprobs is None) == (expected.prompt_logprobs is None)


WRONG: list[tuple[Task[Any], str]] = [
    (NextTokens(PROMPT, count=0), "count: 0 is out of range"),
    (NextTokens(PROMPT, count=10**9), "count: 1000000000 is out of range"),
    (NextTokens([1, -1]), "prompt: token -1 is outside the vocabulary"),
    (NextTokens([]), "prompt: it is empty"),
    (Logits("text"), "ids: its token ids are 'text'"),
    (HiddenStates(PROMPT, [99]), "layers: 99 is out of range"),
    (Generate(PROMPT, SamplingParams(allowed_token_ids=[10**6])), "allowed_token_ids: token 1000000 is outside"),
]


def test_a_result_that_no_message_takes_ends_at_its_first_rows(tiny_bundle: Path) -> None:
    tasks = [Logits(PROMPT), HiddenStates(PROMPT, [0, 1])]
    with LLM(tiny_bundle, prefill_chunk=2) as llm:
        for task in tasks:
            size = llm.run(task).nbytes
            for most in (size, size - 1):
                prepared = llm.prepare(task)
                prepared.limit(most)
                ended: queue.Queue[StreamPiece | EnginewrightError] = queue.Queue()
                llm.submit(prepared, ended.put)
                ended.get(timeout=60)
                (request,) = prepared.requests
                if most == size:
                    assert request.error is None and prepared.result().nbytes == size
                else:
                    assert isinstance(request.error, CapacityError) and "prompt: the result for" in str(request.error)
                    assert not prepared.rows.values, "nothing was kept"


def test_bad_input_names_its_field(tiny_bundle: Path) -> None:
    """Errors are the same here and through the socket; only records there have errors of types."""
    with LLM(tiny_bundle) as llm:
        for task, message in WRONG:
            with pytest.raises(RequestError, match=f"^{message}"):
                llm.run(task)

    async def use(model: Model) -> None:
        typed = (NextTokens(PROMPT, count="x"), "count: expected `int`, got `str`")  # type: ignore[arg-type]
        for task, message in (*WRONG, typed):
            with pytest.raises(RequestError, match=f"^{message}"):
                await model.run(task).result()
        assert (await model.run(NextTokens(PROMPT)).result()).result  # it serves on

    served(tiny_bundle, use)


def test_a_replica_passes_tasks_and_results_on_as_they_are() -> None:
    """It reads neither: what it decodes and encodes again is what the engine's process and the front end read."""
    submit = records.Submit(7, HELD, RequestOptions("a"), whole=True, version="h")
    relayed = msgspec.msgpack.Decoder(records.Submit).decode(records.packed(submit)[records.LENGTH_BYTES :])
    assert records.packed(relayed) == records.packed(submit) and records.digest(relayed.task) == records.digest(HELD)
    assert received(relayed.task) == HELD
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    for task, result in ((Logits(PROMPT), logits), (HELD, Generated((Finished("ab", (1, 2), "stop"),)))):
        events = records.Events(ended=[records.Ended(7, result, metrics=RequestMetrics(1.0, drafted=3))])
        for _ in range(2):
            data = records.packed(events)[records.LENGTH_BYTES :]
            events = msgspec.msgpack.Decoder(records.ToFrontEnd).decode(data)
            assert isinstance(events, records.Events)
        (ended,) = events.ended
        np.testing.assert_equal(received_result(task, ended.result), result)
        assert ended.metrics == RequestMetrics(1.0, drafted=3)


def test_a_type_without_a_row_is_refused() -> None:
    assert NextTokens not in TASKS
    with pytest.raises(RequestError, match="type: invalid value 'next_tokens'"):
        received({"type": "next_tokens", "prompt": [1], "count": 1})
