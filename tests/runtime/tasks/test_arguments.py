"""Arguments that callers pass, as they pass them to other libraries, and errors that name what is wrong."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import EnginewrightError, RequestError
from enginewright.runtime.tasks.arguments import encode_within
from enginewright.runtime.text.tokenizer import Tokenizer

MakeLLM = Callable[..., LLM]
Toy = Callable[..., Any]


def test_prompts_as_people_pass_them(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    expected = llm.generate(["abc", [1, 2]], params)
    text: dict[str, Any] = {"prompt": "abc"}
    several: list[Any] = [
        ("abc", [1, 2]),
        iter(["abc", (1, 2)]),
        (p for p in ("abc", range(1, 3))),
        [text, {"prompt_token_ids": np.array([1, 2])}],
        ["abc", array("i", [1, 2])],
        [{"prompt": "abc", "multi_modal_data": None}, {"prompt_token_ids": [1, 2], "prompt": "?"}],
        ["abc", iter([1, 2])],
        np.array(["abc", [1, 2]], object),
    ]
    for prompts in several:
        assert llm.generate(prompts, params) == expected
    for one in (text, {"prompt_token_ids": (97, 98, 99)}, iter([97, 98, 99]), [np.int64(97), 98, np.uint8(99)]):
        assert llm.generate(one, params) == expected[:1]
    assert llm.generate(np.array([[1, 2], [1, 2]]), params) == [expected[1], expected[1]]
    assert list(llm.stream(text, params))[-1] == list(llm.stream("abc", params))[-1]
    assert llm.generate(iter(()), params) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts: None is of type NoneType"),
        (5, "prompts: 5 is of type int"),
        (b"ab", "prompts: b'ab' is of type bytes"),
        ({"a", "b"}, "prompts: .* is of type set"),
        (object, "prompts: .* is of type type"),
        (np.array(3), "prompts: 3 is of type int"),
        ([[True]], r"prompts\[0\]: True at place 0 isn't a token id"),
        ([True], r"prompt: True at place 0 isn't"),
        ([b"ab"], r"prompts\[0\]: b'ab' is of type bytes"),
        ([{3: 4}], r"prompts\[0\]: there is no key 3"),
        ({3: 4}, "prompt: there is no key 3"),
        ({}, "prompt: it has neither text nor token ids"),
        ({"prompt": 5}, "prompt: its text is 5"),
        ({"prompt_token_ids": "abc"}, "prompt: its token ids are 'abc'"),
        ({"prompt_token_ids": 7}, "prompt: 7 is of type int"),
        ({"prompt": "a", "multi_modal_data": {}}, "there is no key 'multi_modal_data'"),
        (["a", None], r"prompts\[1\]: None is of type NoneType"),
        (["a", 1.5], r"prompts\[1\]: 1.5 is of type float"),
        ([["a", "b"]], r"prompts\[0\]: 'a' at place 0 isn't a token id"),
        ([[[1], [2]]], r"prompts\[0\]: \[1\] at place 0 isn't a token id"),
        ([1, "a"], "prompt: 'a' at place 1 isn't a token id"),
        ([1, None], "prompt: None at place 1 isn't"),
        (np.array([1.0, 2.0]), r"prompts\[0\]: 1.0 is of type float"),
        ([np.array([[1, 2]])], r"prompts\[0\]: \[1, 2\] at place 0 isn't"),
        (np.array([True, False]), "prompt: True at place 0 isn't"),
    ],
)
def test_wrong_types_of_prompts(make_llm: MakeLLM, toy: Toy, prompts: Any, message: str) -> None:
    executor = toy()
    with pytest.raises(RequestError, match=message):
        make_llm(executor).generate(prompts)
    assert executor.steps == []


def test_wrong_types_elsewhere(make_llm: MakeLLM, toy: Toy, tmp_path: Path) -> None:
    llm = make_llm(toy())
    wrong: Any
    for wrong in (None, 5, "abc", b"ab", {3: 4}, [True], ["a"], [[1]], [1.5], np.array(2), np.array([1.5])):
        with pytest.raises(RequestError, match=r"^ids: "):
            llm.logits(wrong)
    for wrong in (None, 5, b"ab", {3: 4}, [True], ["a", "b"], [[1]]):
        for stream in (llm.stream, llm.astream):
            with pytest.raises(RequestError, match=r"^prompt: "):
                stream(wrong)
    for wrong in (None, 5, "hi", {"role": "user"}, ["hi"], [[{"role": "user", "content": "a"}], "b"], b"ab", [5]):
        with pytest.raises(RequestError, match=r"^messages"):
            llm.chat(wrong)
    for wrong in (5, "x", {"max_tokens": 3}, [{"max_tokens": 3}], [None, 5]):
        with pytest.raises(RequestError, match=r"^sampling_params"):
            llm.generate(["a", "b"][: len(wrong) if isinstance(wrong, list) else 2], sampling_params=wrong)
    with pytest.raises(RequestError, match="two names of one argument"):
        llm.generate("a", SamplingParams(), sampling_params=SamplingParams())
    for name in ("progress", "use_tqdm"):
        with pytest.raises(RequestError, match=f"^{name}: 'yes' isn't"):
            llm.generate("a", **{name: "yes"})
    with pytest.raises(RequestError, match=r"^chat_template_kwargs: 5 is of type int"):
        llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs=5)  # type: ignore[arg-type]
    conversation = [{"role": "user", "content": "a"}]
    for chat in (llm.chat, llm.stream_chat, llm.astream_chat):
        for name, wrong in (
            ("chat_template", 5),
            ("chat_template", ["default"]),
            ("continue_final_message", np.array([])),
            ("add_generation_prompt", "no"),
        ):
            with pytest.raises(RequestError, match=f"^{name}: "):
                chat(conversation, **{name: wrong})
    with pytest.raises(RequestError, match=r"^chat_template_kwargs: 3 is of type int"):
        llm.chat(conversation, chat_template_kwargs={3: 4})  # type: ignore[dict-item]
    with pytest.raises(RequestError, match=r"^raise_errors: 'no' is of type str"):
        llm.generate("a", raise_errors="no")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^params: .* is of type int"):
        llm.generate("a", np.array(1))  # type: ignore[arg-type]
    options: list[tuple[str, Any]] = [
        ("target", 5),
        ("isa", b"avx2"),
        ("provider", ["cpu"]),
        ("context", "4096"),
        ("context", True),
        ("memory", 1.5),
        ("memory", True),
        ("buckets", None),
        ("verify", "yes"),
        ("threads", "2"),
        ("max_requests", None),
        ("prefill_chunk", 1.5),
    ]
    for name, value in options:
        with pytest.raises(RequestError, match=f"^{name}: "):
            LLM(tmp_path, **{name: value})
    for path in (None, 5, b"path"):
        with pytest.raises(RequestError, match=r"^path: "):
            LLM(path)  # type: ignore[arg-type]


def test_parameters_under_vllm_s_name(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)]
    assert llm.generate(["a", "b"], sampling_params=params) == llm.generate(["a", "b"], params)
    assert llm.generate("a", sampling_params=params[0]) == llm.generate("a", params[0])
    assert llm.generate(["a", "b"], sampling_params=iter([params[0], None]))[0] == llm.generate("a", params[0])[0]
    message = [{"role": "user", "content": "hi"}]
    assert llm.chat([message, message], sampling_params=params) == llm.chat([message, message], params)
    assert llm.chat(iter(message), chat_template_kwargs={"bos_token": "<|bos|>"}, use_tqdm=False) == llm.chat(message)


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(make_llm: MakeLLM, toy: Toy, monkeypatch: Any) -> None:
    llm = make_llm(toy())
    encode, seen = llm.tokenizer.encode, []

    def counted(text: str, **options: Any) -> list[int]:
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", counted)
    for call in (llm.generate, llm.stream):
        with pytest.raises(
            RequestError, match=r"prompt: the first 2,550 of its 5,000,000 characters have 2,550 tokens"
        ):
            call("a" * 5_000_000)
    with pytest.raises(RequestError, match=r"messages: the first .* characters have"):
        llm.chat([{"role": "user", "content": "a" * 5_000_000}])
    assert max(seen) < 10_000
    with pytest.raises(RequestError, match="it has 2030 tokens; the context of 128 tokens has room for 127"):
        llm.generate("a" * 2030)  # short enough to count


def test_a_long_text_of_few_tokens_is_taken() -> None:
    """Characters that a tokenizer drops or joins don't count: only tokens do."""
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(TokenizerFiles(words.to_str(), None, {}))
    text = " " * 200_000 + "x" * 200_000 + " a"
    assert encode_within(tokenizer.encode, text, 10) == [1, 0]


HUGE = 10**5000
"""Python refuses to write such a number out."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm, path: llm.generate([[HUGE]]), r"prompts\[0\]: token <int> is outside"),
        (lambda llm, path: llm.generate([int]), "prompt: <class 'int'> at place 0 isn't a token id"),
        (lambda llm, path: llm.generate([1, int]), "prompt: <class 'int'> at place 1 isn't a token id"),
        (lambda llm, path: llm.generate([[1]], priority=HUGE), "priority: <int> isn't an integer"),
        (lambda llm, path: llm.generate([[1]], tenant="a" * 2000), "tenant: 'aaa"),
        (lambda llm, path: llm.generate([[1]], request_class="\ud800"), r"request_class: '\\ud800' isn't a name"),
        (lambda llm, path: llm.delete_prefixes(tenant=3), "tenant: 3 is of type int"),
        (lambda llm, path: llm.tokenizer.encode(3), "prompt: 3 isn't text"),
        (lambda llm, path: llm.tokenizer.render_chat(3), "messages: 3 isn't a list"),
        (lambda llm, path: llm.tokenizer.chat_template("none"), "chat_template: there is no template 'none'"),
        (lambda llm, path: SamplingParams(max_tokens=HUGE), "max_tokens: <int> is out of range"),
        (lambda llm, path: SamplingParams(stop_token_ids=[HUGE]), "stop_token_ids: <tuple> is out of range"),
        (lambda llm, path: SamplingParams(stop="\ud800"), r"stop: \('\\ud800',\) is out of range"),
        (lambda llm, path: SamplingParams(stop="a" * 5000), "stop: 5000 is out of range"),
        (lambda llm, path: SamplingParams(typical_p=1e-50), "typical_p: 1e-50 is out of range"),
        (lambda llm, path: SamplingParams(bad_words=["\ud800"]), r"bad_words: '\\ud800' is out of range"),
        (lambda llm, path: SamplingParams(bad_words=["a" * 1000] * 1000), "bad_words: 1000000 is out of range"),
        (lambda llm, path: LLM(path, memory="9" * 400), "memory: '999"),
        (lambda llm, path: LLM(path, memory=HUGE), "memory: <int> isn't a size"),
        (lambda llm, path: LLM(path, context=HUGE), "context: <int> is out of range"),
        (lambda llm, path: LLM(path, threads=HUGE), "threads: <int> is out of range"),
        (lambda llm, path: LLM("x" * 300), "path: 'xxx"),
        (lambda llm, path: LLM("a\0b"), r"path: 'a\\x00b' isn't a path"),
        (lambda llm, path: LLM(path, load=np.array(["map", "read"])), "load: array"),
        (lambda llm, path: LLM(path, speculate=np.array(["a", "b"])), "speculate: array"),
        (lambda llm, path: LLM(path, scheduling=np.array(["a", "b"])), "scheduling: array"),
        (lambda llm, path: LLM(path, provider="\ud800"), r"provider: '\\ud800' isn't a name"),
    ],
)
def test_what_once_came_out_untyped(
    make_llm: MakeLLM, toy: Toy, tmp_path: Path, call: Callable[[LLM, Path], object], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        call(make_llm(toy()), tmp_path)


def test_layers_that_are_no_list(tiny_bundle: Path) -> None:
    wrong: Any
    with LLM(tiny_bundle, memory="1MiB") as llm:
        for wrong in (0.5, 3, "0", {}, [], None, np.array([])):
            with pytest.raises(RequestError, match=r"^layers: "):
                llm.hidden_states([1, 2], wrong)
        assert llm.hidden_states([1, 2], np.array([0])).shape[0] == 1


def test_bad_words_are_tokenized_once(make_llm: MakeLLM, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller passes the same list with each request, and on an event loop all others wait for it."""
    llm = make_llm(toy())
    encode, seen = llm.tokenizer.encode, []

    def counted(text: str, **options: Any) -> list[int]:
        seen.append(text)
        return encode(text, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", counted)
    for _ in range(3):
        params = SamplingParams(max_tokens=1, bad_words=[f"word {i}" for i in range(200)])
        llm.generate([[1], [2]], params)
    assert len(seen) == 400


def test_stop_tokens_outside_the_vocabulary_never_come(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    for ids in ([300], [2**31], [2**40, 5]):
        params = SamplingParams(max_tokens=6, min_tokens=2, stop_token_ids=ids, ignore_eos=True)
        expected = SamplingParams(max_tokens=6, min_tokens=2, stop_token_ids=ids[1:], ignore_eos=True)
        assert llm.generate([[1, 2]], params)[0].token_ids == llm.generate([[1, 2]], expected)[0].token_ids


JUNK: list[Any] = [
    *(None, True, 5, 1.5, -1, 2**70, "", "a", "\ud800", "a\x00b", b"a", float("nan"), memoryview(b"ab"), object()),
    *({}, {3: 4}, {"prompt": None}, {"prompt": "a", "x": 1}, {"prompt_token_ids": {}}, {"prompt_token_ids": [None]}),
    *([], [None], [[]], [True], [[True]], [b"x"], [{}], [[[1]]], [1, "a"], (), range(3), set(), {1}, SamplingParams),
    *(np.array(1), np.array([]), np.array([1.5]), np.array([[1]]), np.array(["a"]), np.float32(1), np.int64(3)),
    *([{"role": "user", "content": "x"}], [{"role": 5}], [{"content": b"x"}], {"role": "user", "content": "x"}),
]


@pytest.mark.parametrize("junk", JUNK, ids=[str(i) for i in range(len(JUNK))])
def test_anything_anywhere_works_or_is_a_typed_error(make_llm: MakeLLM, toy: Toy, tmp_path: Path, junk: Any) -> None:
    llm, one = make_llm(toy()), SamplingParams(max_tokens=1)
    conversation = [{"role": "user", "content": "x"}]
    calls: list[Callable[[], object]] = [
        lambda: llm.generate(junk, one),
        lambda: list(llm.stream(junk, one)),
        lambda: llm.chat(junk, one),
        lambda: list(llm.stream_chat(junk, one)),
        lambda: llm.logits(junk),
        lambda: llm.generate("a", junk),
        lambda: llm.generate(["a"], sampling_params=junk),
        *(lambda n=name: llm.generate("a", one, **{n: junk}) for name in ("use_tqdm", "raise_errors")),
        *(lambda n=field.name: SamplingParams(**{n: junk}) for field in fields(SamplingParams)),
        *(
            lambda n=name: llm.chat(conversation, one, **{n: junk})
            for name in ("tools", "documents", "chat_template", "chat_template_kwargs", "continue_final_message")
        ),
        *(
            lambda n=name: LLM(**{"path": tmp_path, n: junk})
            for name in ("path", "target", "threads", "isa", "provider", "context", "memory", "max_requests", "load")
        ),
    ]
    for call in calls:
        with contextlib.suppress(EnginewrightError):
            call()
