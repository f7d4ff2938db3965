"""The output of requests: results, times, the error of one among many, a progress bar."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, MissingDependencyError
from tests.waiting import wait_until

MakeLLM = Callable[..., LLM]
Toy = Callable[..., Any]
Saying = Callable[..., dict[int, int]]


def test_results_under_vllm_s_names(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    (result,) = llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2))
    (output,) = result.outputs
    assert result.prompt == "abc" and result.finished and result.request_id
    assert (output.index, output.text, output.token_ids) == (0, result.text, result.token_ids)
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert result.logprobs is not None and output.logprobs is not None
    for entry, other in zip(result.logprobs, output.logprobs, strict=True):
        assert {token: value.logprob for token, value in other.items()} == dict(entry.top)
        assert [value.rank for value in other.values()] == [1, 2]
        assert other[entry.token_id].logprob == entry.logprob
    assert output.cumulative_logprob == sum(entry.logprob for entry in result.logprobs)
    (plain,) = llm.generate([97, 98, 99], SamplingParams(max_tokens=4, ignore_eos=True))
    assert (plain.prompt, plain.outputs[0].logprobs, plain.cumulative_logprob) == (None, None, None)
    (chosen,) = llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0))
    assert chosen.logprobs is not None and [entry.top for entry in chosen.logprobs] == [()] * 4
    assert [entry.logprob for entry in chosen.logprobs] == [entry.logprob for entry in result.logprobs]
    assert chosen.outputs[0].logprobs is not None and chosen.outputs[0].logprobs[0].keys() == {chosen.token_ids[0]}
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
    assert answer.prompt is not None and tuple(llm.tokenizer.encode(answer.prompt)) == answer.prompt_token_ids


def test_why_it_stopped(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    llm = make_llm(toy(script=saying("Paris is", 1)))
    for params, reason in (
        (SamplingParams(), None),  # the model's own end
        (SamplingParams(stop=["is", "zz"]), "is"),
        (SamplingParams(stop_token_ids=np.array([ord("s")])), ord("s")),  # type: ignore[arg-type]
    ):
        (result,) = llm.generate("?", params)
        assert (result.finish_reason, result.stop_reason) == ("stop", reason)
    assert llm.generate("?", SamplingParams(max_tokens=1))[0].stop_reason is None


def test_as_many_tokens_as_there_is_room_for(make_llm: MakeLLM, toy: Toy) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    assert len(make_llm(toy()).generate([1] * 28, params)[0].token_ids) == 100  # the context of 128
    assert len(make_llm(toy(blocks=10)).generate([1] * 28, params)[0].token_ids) == 13  # 40 in the cache, and the last
    with pytest.raises(CapacityError, match="memory: "):
        make_llm(toy(blocks=10)).generate([1] * 41, params)


def test_when_it_happened(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    before = time.monotonic()
    many = llm.generate(["a", "b"], SamplingParams(max_tokens=5, ignore_eos=True))
    after = time.monotonic()
    for result in many:
        times = result.metrics
        assert times.started is not None and times.first_token is not None and times.last_token is not None
        assert before <= times.queued <= times.started <= times.first_token < times.last_token <= after
        assert times.intervals == 4 and times.interval_seconds == times.last_token - times.first_token
        assert times.interval_seconds / 4 <= times.longest_interval <= times.interval_seconds
        assert times.ttft == times.first_token - times.queued and times.tpot == times.interval_seconds / 4
    [one] = llm.generate("a", SamplingParams(max_tokens=1))
    assert one.metrics.intervals == one.metrics.longest_interval == 0 and one.metrics.tpot is None


def test_an_error_of_one_request(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    executor.poison = ord("!")
    llm = make_llm(executor)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    good = llm.generate(["abc", "def"], params)
    results = llm.generate(["abc", "x!", "def"], params)
    assert [results[0], results[2]] == good
    assert (results[1].finish_reason, results[1].token_ids, results[1].text) == ("error", (), "")
    assert isinstance(results[1].error, EnginewrightError) and "NaN" in str(results[1].error)
    assert llm.generate(["x!"], params)[0].error is not None
    for call in (
        lambda: llm.generate("x!", params),
        lambda: llm.generate(["abc", "x!"], params, raise_errors=True),
        lambda: list(llm.stream("x!", params)),
        lambda: llm.logits([1, ord("!")]),
    ):
        with pytest.raises(EnginewrightError, match="are NaN or infinite"):
            call()
    assert llm.generate("x!", params, raise_errors=False)[0].error is not None
    wait_until(lambda: not llm.engine.has_work())


@pytest.mark.parametrize(
    ("prompts", "terminal", "progress", "shown"),
    [
        (9, True, None, True),
        (9, False, None, False),
        (2, True, None, False),
        (1, False, True, True),
        (9, True, False, False),
    ],
)
def test_a_bar(
    make_llm: MakeLLM, toy: Toy, monkeypatch: Any, prompts: int, terminal: bool, progress: bool | None, shown: bool
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    llm = make_llm(toy())
    llm.generate(["a"] * prompts, params, progress=progress)
    written = stream.getvalue()
    assert bool(written) == shown
    if shown:
        assert f"{prompts}/{prompts}" in written and "tokens/s" in written


def test_a_bar_without_rich(make_llm: MakeLLM, toy: Toy, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingDependencyError, match=r"progress: a bar needs rich(.|\n)*enginewright\[cli\]"):
        make_llm(toy()).generate("a", SamplingParams(max_tokens=1), progress=True)
