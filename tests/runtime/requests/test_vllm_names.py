"""Code that was written for vLLM runs, or is told what to write instead: never a bare TypeError, nothing ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import enginewright as ew
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.requests.vllm_names import OF_CHAT, OF_GENERATE, OF_LLM, OF_SAMPLING, Idle, Only, Renamed
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.text.output_text import OutputText
from enginewright.runtime.text.tokenizer import Tokenizer

MakeLLM = Callable[..., LLM]
Toy = Callable[..., Any]
Saying = Callable[[str | bytes, int], dict[int, int]]
MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_program_written_for_vllm(tiny_bundle: Path) -> None:
    """It is written like vLLM's own examples; only the model's name is a bundle."""
    options: dict[str, Any] = {
        **{"tensor_parallel_size": 1, "dtype": "auto", "gpu_memory_utilization": 0.8, "enforce_eager": True},
        **{"max_model_len": 64, "max_num_seqs": 4, "trust_remote_code": False, "swap_space": 4, "seed": 0},
        **{"enable_prefix_caching": True, "quantization": None, "tokenizer": None, "disable_log_stats": True},
    }
    sampling: dict[str, Any] = {
        **{"temperature": 0.8, "top_p": 0.95, "max_tokens": 4, "skip_special_tokens": True},
        **{"include_stop_str_in_output": False, "detokenize": True, "structured_outputs": None},
        **{"spaces_between_special_tokens": True, "logits_processors": None, "truncate_prompt_tokens": None},
    }
    with ew.LLM(model=str(tiny_bundle), **options) as llm:
        assert llm.info()["context_length"] == 64
        params = ew.SamplingParams(**sampling)
        more: dict[str, Any] = {"lora_request": None, "tokenization_kwargs": None}
        outputs = llm.generate(["Hello", "Hi"], params, use_tqdm=False, **more)
        with ew.LLM(tiny_bundle, context=64) as plain:
            assert (
                plain.generate(["Hello", "Hi"], ew.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)) == outputs
            )
        assert outputs[0].outputs[0].text == outputs[0].text
        chatted = llm.chat(MESSAGES, params, use_tqdm=False, lora_request=None, chat_template_content_format="auto")
        assert chatted == llm.chat(MESSAGES, params)
        tokenizer = llm.get_tokenizer()
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert llm.generate(text, params)[0].token_ids == chatted[0].token_ids
        assert llm.get_default_sampling_params() == llm.default_params()


def test_each_rule_is_kept(make_llm: MakeLLM, toy: Toy, tmp_path: Path) -> None:
    """Options that ask for nothing are taken; others are refused with the name, the reason and the remedy."""
    llm = make_llm(toy())
    calls: list[tuple[dict[str, Any], Callable[..., object]]] = [
        (dict(OF_LLM), lambda **given: LLM(tmp_path / "nowhere", **given)),
        (dict(OF_GENERATE), lambda **given: llm.generate("a", SamplingParams(max_tokens=1), **given)),
        (dict(OF_CHAT), lambda **given: llm.chat(MESSAGES, SamplingParams(max_tokens=1), **given)),
        (dict(OF_SAMPLING), lambda **given: SamplingParams(**given)),
    ]
    for rules, call in calls:
        for name, rule in rules.items():
            values: tuple[object, ...] = (None,) if isinstance(rule, Renamed) else (0.5, "x", None, object())
            for value in rule.values if isinstance(rule, Only) else values:
                try:
                    call(**{name: value})
                except ew.BundleError as e:
                    assert "doesn't exist" in e.message  # noqa: PT017  as far as the arguments are checked
            if isinstance(rule, Only):
                for value in (7, "something", object(), True if False in rule.values else 1.5):
                    with pytest.raises(ew.RequestError, match=f"^{name}: .* is refused: .*") as caught:
                        call(**{name: value})
                    assert caught.value.hint


def test_the_other_names(tiny_bundle: Path) -> None:
    assert {type(rule) for rule in OF_LLM.values()} == {Renamed, Idle, Only}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_model_len": 8, "context": 8}, "context, max_model_len: these are two names"),
        ({"max_model_len": "long"}, "context: 'long'"),
        ({"tensor_parallel_size": 0}, "ranks: 0"),
        ({"tensor_parallel_size": 2, "partition": "pipeline=3"}, "ranks: 2 isn't the 3 of partition"),
        ({"pipeline_parallel_size": 2}, 'pipeline_parallel_size: .*\n  Pass partition="pipeline=N"'),
        ({"data_parallel_size": 2}, "data_parallel_size: .*\n  Use several LLMs, or `optimize serve --replicas N`"),
        ({"max_model_len": 10**9}, "context"),
        ({"model": "x"}, "path, model: these are two names"),
        ({"scheduling_policy": "lottery"}, "lottery"),
        ({"temperature": 1}, "temperature: LLM has no such argument\n  Pass SamplingParams"),
        ({"gpu_memory_utilisation": 1}, "Did you mean gpu_memory_utilization"),
        ({"seed": -1}, "seed: -1"),
    ]
    for options, message in wrong:
        with pytest.raises((ew.RequestError, ew.CapacityError), match=message):
            LLM(tiny_bundle, **options)
    with pytest.raises(ew.RequestError, match="path: None is of type"):
        LLM()


def test_a_size_of_tensor_parallelism_is_a_number_of_ranks(tiny_bundle: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with ew.LLM(tiny_bundle, tensor_parallel_size=2, threads=1) as divided, ew.LLM(tiny_bundle) as whole:
        assert divided.info()["executor"]["partition"] == "tensor=2"
        assert divided.generate("Hello", params)[0].token_ids == whole.generate("Hello", params)[0].token_ids


def test_names_that_nobody_has(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy())
    options: dict[str, Any] = {"temperature": 0.5}
    with pytest.raises(ew.RequestError, match=r"temperature: LLM.generate has no such argument\n.*SamplingParams"):
        llm.generate("a", **options)
    options = {"tempreature": 0.5}
    with pytest.raises(ew.RequestError, match=r"tempreature: SamplingParams has no such argument\n.*mean temperature"):
        SamplingParams(**options)
    options = {"prompt_token_ids": [[1, 2]]}
    with pytest.raises(ew.RequestError, match=r"^prompt_token_ids: .* is refused"):
        llm.generate(**options)


def test_more_arguments_by_place_than_there_are(make_llm: MakeLLM, toy: Toy) -> None:
    """vLLM's chat has use_tqdm as its third."""
    llm = make_llm(toy())
    calls: list[Callable[..., object]] = [llm.chat, llm.generate]
    for call in calls:
        with pytest.raises(ew.RequestError, match=r"3 arguments without a name, and it takes 2\n.*by their names"):
            call(MESSAGES, SamplingParams(), False)


def test_a_seed_of_the_llm_is_one_of_each_request_that_has_none(tiny_bundle: Path) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    seeded = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True, seed=5)

    def tokens(seed: int | None) -> tuple[Any, ...]:
        with ew.LLM(tiny_bundle, seed=seed) as llm:
            first, again, seeded_result = llm.generate(["Hello", "Hello", "Hello"], [params, params, seeded])
        assert first.token_ids == again.token_ids
        return first.token_ids, seeded_result.token_ids

    assert tokens(None) == tokens(0)
    assert tokens(1) == tokens(1)
    assert len({tokens(seed)[0] for seed in (0, 1, 2)}) == 3
    assert tokens(1)[1] == tokens(0)[1]


def test_a_stop_string_may_stay(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    llm = make_llm(toy(script=saying("one, two, three", 1)))
    plain = llm.generate([1], SamplingParams(stop=", t"))[0]
    stopped_output = llm.generate([1], SamplingParams(stop=", t", include_stop_str_in_output=True))[0]
    assert (plain.text, stopped_output.text) == ("one", "one, t")
    assert stopped_output.stop_reason == plain.stop_reason == ", t" and stopped_output.token_ids == plain.token_ids
    streamed = llm.stream([1], SamplingParams(stop=", t", include_stop_str_in_output=True))
    assert "".join(piece.text for piece in streamed) == "one, t"


def test_the_token_that_ends_a_text_may_stay(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    llm = make_llm(toy(script=saying("ab!", 1)))
    stopped = {"stop_token_ids": [ord("!")], "max_tokens": 8}
    assert llm.generate([1], SamplingParams(**stopped))[0].text == "ab"
    with_end = llm.generate([1], SamplingParams(**stopped, include_stop_str_in_output=True))[0]
    assert (with_end.text, with_end.stop_reason) == ("ab!", ord("!"))
    params_with_end = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    assert llm.generate([1], params_with_end)[0].text == "ab!<|eos|>"
    assert llm.generate([1], SamplingParams(include_stop_str_in_output=True))[0].text == "ab!"
    assert llm.generate([1], SamplingParams(skip_special_tokens=False))[0].text == "ab!"


def test_special_tokens_may_stay(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    script = saying("ab", 1) | {2: 258, 3: ord("c"), 4: 257}
    llm = make_llm(toy(script=script))
    assert llm.generate([1])[0].text == "abc"
    with_special = llm.generate([1], SamplingParams(skip_special_tokens=False))[0]
    assert (
        with_special.text
        == "ab<|start|>c"
        == llm.tokenizer.decode(with_special.token_ids[:-1], skip_special_tokens=False)
    )


def test_no_text_at_all(make_llm: MakeLLM, toy: Toy, saying: Saying) -> None:
    llm = make_llm(toy(script=saying("abc", 1)))
    result = llm.generate([1], SamplingParams(detokenize=False))[0]
    assert (result.text, result.token_ids) == ("", (97, 98, 99, 257))
    with pytest.raises(ew.RequestError, match=r"stop: strings .* detokenize=False"):
        SamplingParams(detokenize=False, stop="a")


@pytest.mark.parametrize("text", ["say END now", "EN END", "xEND", "END"])
def test_what_is_kept_is_the_stop_string_and_no_more(tokenizer: Tokenizer, text: str) -> None:
    output = OutputText(tokenizer.detokenizer(), ("END",), keep_stop=True)
    assert any(output.push(byte) for byte in text.encode()) or output.finish()
    assert output.take() == text[: text.index("END") + 3]


def test_beam_search(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle) as llm:
        params = ew.BeamSearchParams(beam_width=3, max_tokens=5)
        [first, second] = llm.beam_search([{"prompt": "Hello"}, {"prompt_token_ids": [1, 2]}], params)
        ours = SamplingParams(num_beams=3, n=3, max_tokens=5, early_stopping="never", logprobs=6)
        [expected] = llm.generate("Hello", ours)
        prompt = list(expected.prompt_token_ids)
        assert [one.tokens for one in first.sequences] == [[*prompt, *one.token_ids] for one in expected.outputs]
        assert [one.cum_logprob for one in first.sequences] == [one.cumulative_logprob for one in expected.outputs]
        best = first.sequences[0]
        assert best.text == llm.tokenizer.decode(best.tokens, skip_special_tokens=False)
        assert len(best.logprobs) == len(best.tokens) - len(prompt) and best.score == expected.score
        assert best.tokens[len(prompt)] in best.logprobs[0]
        assert second.sequences[0].tokens[:2] == [1, 2]
        [alone] = llm.beam_search(["Hello"], ew.BeamSearchParams(1, 5))
        assert alone.sequences[0].tokens == [*prompt, *llm.generate("Hello", SamplingParams(max_tokens=5))[0].token_ids]
        wrong: Any
        for wrong in (None, SamplingParams(num_beams=2), {"beam_width": 2}):
            with pytest.raises(ew.RequestError, match=r"^params: "):
                llm.beam_search(["Hello"], wrong)
        with pytest.raises(ew.RequestError, match=r"^lora_request: 5 is refused"):
            llm.beam_search(["Hello"], params, lora_request=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 33}, "beam_width"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 0.5}, "temperature: 0.5 .*\n.*draws nothing"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs: there is no 'regexp'"),
        ({"ignore_eos": 3}, "ignore_eos"),
    ],
)
def test_wrong_parameters_of_a_beam_search(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ew.RequestError, match=f"^{said}"):
        ew.BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | given)


def test_a_priority_for_each_prompt(make_llm: MakeLLM, toy: Toy) -> None:
    llm = make_llm(toy(), scheduling="priority")
    params = SamplingParams(max_tokens=2)
    assert llm.generate(["a", "b"], params, priority=[2, 1]) == llm.generate(["a", "b"], params)
    with pytest.raises(ew.RequestError, match="priority: 1 of them for 2 prompts"):
        llm.generate(["a", "b"], params, priority=[2])
    with pytest.raises(ew.RequestError, match="priority"):
        llm.generate(["a", "b"], params, priority="ab")


def test_a_model_that_is_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_info: ModelInfo) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ew.BundleError, match=r"optimize export meta/Some-Model.1 -o Some-Model.1.bundle"):
        Bundle.open("meta/Some-Model.1")  # LLM would export it
    near = tmp_path / "smollm2.bundle"
    near.mkdir()
    (near / "manifest.json").write_text("{}")
    with pytest.raises(ew.BundleError, match=r"smolm2.bundle doesn't exist\n.* Did you mean .*smollm2.bundle\?"):
        LLM("smolm2.bundle")
    with pytest.raises(ew.BundleError, match=r"xxx\.\.\. doesn't exist"):
        Bundle.open("x" * 300)
