"""LLM: what a user sees."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, RequestError
from tests.waiting import wait_until

MakeLLM = Callable[..., LLM]
Toy = Callable[..., Any]
Saying = Callable[..., dict[int, int]]


def wait_until_idle(llm: LLM) -> None:
    pools = llm.engine.pools.values()
    wait_until(lambda: all(pool.free_blocks == pool.total_blocks for pool in pools) and not llm.engine.has_work())


def test_one_prompt_or_several_as_text_or_ids(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    one = llm.generate("abc", params)
    assert len(one) == 1 and one[0].prompt_token_ids == (97, 98, 99)
    assert llm.generate([97, 98, 99], params) == one
    assert llm.generate(np.array([97, 98, 99]), params) == one  # type: ignore[arg-type]
    both = llm.generate(["abc", [1, 2]], params)
    assert both[:1] == one and both[1].prompt_token_ids == (1, 2)
    assert llm.generate([], params) == []
    varied = llm.generate(["abc", "abc"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)])
    assert [len(r.token_ids) for r in varied] == [1, 3]
    assert all(one[0].token_ids[: len(r.token_ids)] == r.token_ids for r in varied)


def test_text_ends_at_the_end_token(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    llm = make_llm(toy(script=saying("Paris é 😀", 1)))
    (result,) = llm.generate("?")
    assert (result.text, result.finish_reason) == ("Paris é 😀", "stop")
    assert result.token_ids == (*"Paris é 😀".encode(), 257)
    assert llm.generate("?", SamplingParams(max_tokens=3))[0].text == "Par"
    assert llm.generate("?", SamplingParams(stop=("is",)))[0].text == "Par"


def test_streams_add_up_to_the_output(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    llm = make_llm(toy(script=saying("Grüße, 世界! END of", 1)))
    for params in (SamplingParams(), SamplingParams(stop=("END",)), SamplingParams(max_tokens=4, logprobs=2)):
        (whole,) = llm.generate("?", params)
        pieces = list(llm.stream("?", params))
        assert "".join(p.text for p in pieces) == whole.text
        assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
        assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
        assert not any("\ufffd" in p.text for p in pieces)
        if params.logprobs:
            assert tuple(lp for p in pieces for lp in p.logprobs or ()) == whole.logprobs
            assert whole.logprobs is not None and [lp.token_id for lp in whole.logprobs] == list(whole.token_ids)


def test_closing_a_stream_aborts_its_request(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    stream = llm.stream("abc", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    wait_until_idle(llm)
    assert not llm.engine.has_work()


def test_chat(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    messages = [{"role": "user", "content": "hi"}]
    llm = make_llm(toy())
    assert llm.has_chat_template
    ids = llm.tokenizer.encode_chat(messages)
    llm = make_llm(toy(script=saying("Hello.", len(ids))))
    (answer,) = llm.chat(messages)
    assert (answer.prompt_token_ids, answer.text) == (tuple(ids), "Hello.")
    assert llm.chat([messages, messages]) == [answer, answer]
    assert "".join(p.text for p in llm.stream_chat(messages)) == "Hello."
    with pytest.raises(RequestError, match="no messages"):
        llm.chat([])


@pytest.mark.parametrize("chunk", [2, 512])
def test_logits(make_llm: MakeLLM, toy: Toy, chunk: int) -> None:
    llm = make_llm(toy(), prefill_chunk=chunk)
    ids = [3, 1, 4, 1, 5]
    logits = llm.logits(ids)
    assert logits.shape == (5, 260) and logits.dtype == np.float32
    for n in range(1, 6):
        (result,) = llm.generate(ids[:n], SamplingParams(max_tokens=1))
        assert result.token_ids == (int(logits[n - 1].argmax()),)
    assert llm.logits(range(128)).shape == (128, 260)  # the whole context
    wait_until_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: it is empty"),
        ([[]], r"prompts?(\[\d\])?: it is empty"),
        ([1] * 200, "200 tokens; the context of 128 tokens has room for 127"),
        ([1, 260], "token 260 is outside the vocabulary of 260"),
        ([-1], "token -1 is outside"),
        ([[1.5]], r"prompts?(\[\d\])?: 1.5 at place 0 isn't a token id"),
    ],
)
def test_wrong_prompts(make_llm: MakeLLM, toy: Toy, prompt: Any, message: str) -> None:
    executor = toy()
    llm = make_llm(executor)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt)
    with pytest.raises(RequestError, match=message):
        llm.stream(prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt)
    if isinstance(prompt, list):
        with pytest.raises(RequestError, match=message):
            llm.generate([[1, 2], prompt[0] if not isinstance(prompt[0], int) else prompt])
    assert executor.steps == []  # a wrong prompt among right ones runs none


def test_wrong_prompts_for_logits(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    for ids, message in (([], "empty"), ([1] * 129, "129 tokens; the context of 128"), ([999], "token 999")):
        with pytest.raises(RequestError, match=message):
            llm.logits(ids)


def test_one_set_of_parameters_a_prompt(make_llm: MakeLLM, toy: Toy) -> None:
    with pytest.raises(RequestError, match="params: 2 of them for 1 prompts"):
        make_llm(toy()).generate("a", [SamplingParams(), SamplingParams()])


def test_tokens_end_with_the_context(make_llm: MakeLLM, toy: Toy) -> None:
    (result,) = make_llm(toy()).generate([1] * 120, SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (8, "length")


def test_a_request_that_the_cache_cannot_hold(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy(blocks=4)
    llm = make_llm(executor)
    for call in (llm.generate, llm.stream):
        with pytest.raises(CapacityError, match=r"memory: .* 20 tokens .* holds 16(.|\n)*160 bytes"):
            call([1] * 10, SamplingParams(max_tokens=11))
    with pytest.raises(CapacityError, match="memory: "):
        llm.logits([1] * 17)
    assert executor.steps == []


def test_several_threads(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy(blocks=40), max_requests=8)
    prompts = [[i, i + 1, i + 2] for i in range(40)]
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1)
    expected = [llm.generate(p, params)[0] for p in prompts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda p: llm.generate(p, params)[0], prompts)) == expected
    wait_until_idle(llm)


def test_an_interrupted_generate_aborts_its_requests(make_llm: MakeLLM, toy: Toy, monkeypatch: Any) -> None:
    llm = make_llm(toy())

    class Interrupted:
        def put(self, _: object) -> None:
            pass

        def get(self) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr("queue.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True))
    wait_until_idle(llm)


def test_an_error_of_the_executor_is_raised(make_llm: MakeLLM, toy: Toy) -> None:
    executor = toy()
    executor.fail = ValueError("bad step")
    llm = make_llm(executor)
    for call in (lambda: llm.generate("a"), lambda: list(llm.stream("a")), lambda: llm.logits([1])):
        with pytest.raises(EnginewrightError, match="bad step"):
            call()


def test_closing(toy: Toy, model_info: ModelInfo) -> None:
    executor = toy()
    with LLM.from_executor(executor, model_info) as llm:
        llm.generate([1], SamplingParams(max_tokens=2))
    assert executor.closed
    llm.close()
    with pytest.raises(EnginewrightError, match="closed"):
        llm.generate([1])
    assert not llm._loop._running


def test_without_a_tokenizer(toy: Toy, model_info: ModelInfo) -> None:
    with LLM.from_executor(toy(), model_info) as llm:
        (result,) = llm.generate([1], SamplingParams(max_tokens=2))
        assert (len(result.token_ids), result.text) == (2, "")
        assert not llm.has_chat_template
        with pytest.raises(BundleError, match="no tokenizer"):
            llm.generate("a")
        with pytest.raises(RequestError, match="stop: strings need a tokenizer"):
            llm.generate([1], SamplingParams(stop=("a",)))


def test_what_it_calls_itself(make_llm: MakeLLM, toy: Toy, tiny_bundle: Path) -> None:
    assert repr(make_llm(toy())) == "LLM('toy', target='toy', context=128)"
    llm = LLM(tiny_bundle, memory="1MiB", context=64)
    assert repr(llm) == f"LLM({tiny_bundle.name!r}, target='cpu', context=64)"
    llm.close()
    assert repr(llm) == f"LLM({tiny_bundle.name!r}, target='cpu', context=64)"


def test_default_params(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    assert llm.default_params(max_tokens=3) == SamplingParams(temperature=0.5, top_k=7, max_tokens=3)


def test_info(make_llm: MakeLLM, toy: Toy) -> None:
    info = make_llm(toy(blocks=16)).info()
    assert info["kv_cache"] == "KV cache: 512 B, 16 blocks of 4 tokens = 64 tokens"
    assert (info["kv_cache_bytes"], info["kv_cache_tokens"], info["kv_blocks_free"]) == (512, 64, {"g0": 16})
    assert (info["model"], info["context_length"], info["executor"]) == ("toy", 128, {"target": "toy"})


@pytest.mark.parametrize("options", [{"max_requests": 0}, {"prefill_chunk": 0}, {"prefill_chunk": 9000}])
def test_options_out_of_range(make_llm: MakeLLM, toy: Toy, options: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        make_llm(toy(), **options)


@pytest.mark.parametrize("threads", [-1, 1025, True, 1.0])
def test_threads_out_of_range(threads: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="threads: "):
        LLM(tmp_path, threads=threads)


def test_wrong_types_are_named(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    options: Any = {"max_tokens": 3}
    for call in (llm.generate, llm.stream, llm.astream):
        with pytest.raises(RequestError, match=r"params: .* isn't a SamplingParams"):
            call("a", options)
    message: Any = {"role": "user", "content": "hi"}
    for chat in (llm.chat, llm.stream_chat, llm.astream_chat):
        with pytest.raises(RequestError, match=r"messages: .* isn't a list of messages"):
            chat(message)


def test_weights_that_were_altered_end_requests_as_soon_as_that_is_known(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "b"))
    path = copy / "weights/weights-00000.bin"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 1 for byte in data[middle : middle + 64])
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    whole = Bundle.open(copy)
    whole.hash_weights_beside()
    assert whole._beside is not None
    whole._beside.wait()
    whole.check_unchanged()
    path.write_bytes(data)
    with LLM(copy) as llm:
        beside = llm._executor._bundle._beside  # type: ignore[attr-defined]
        beside.wait()
        with pytest.raises(BundleError, match=r"weights-00000.bin: SHA-256 is not the one"):
            llm.generate([5, 6, 7], params)
        with pytest.raises(BundleError, match=r"weights-00000.bin: SHA-256 is not the one"):
            llm.check_weights()
    with LLM(tiny_bundle) as llm:
        assert llm.check_weights()
    with LLM(copy, verify=False) as llm:
        assert not llm.check_weights()
        assert len(llm.generate([5, 6, 7], params)[0].token_ids) == 2
