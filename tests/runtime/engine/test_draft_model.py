"""A draft model: the tokens of the first model alone, whatever the second one says or does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import enginewright as ew
from enginewright.optimizer.export import export
from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.draft_model import DraftModel
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.block_keys import Namespace
from enginewright.runtime.requests.lookup import PastAnswers
from enginewright.runtime.requests.proposers import NOTHING
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.scheduler.drafts import Drafts
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.step_times import DecodeTimes

PARAMS = ew.SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
PROMPTS = [[9, 40, 22, 7, 80 + i] for i in range(4)]


@pytest.fixture
def costs_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the draft model takes a tenth of the model's; whether that pays doesn't hang on this machine."""
    monkeypatch.setattr(DecodeTimes, "took", lambda *given: None)
    monkeypatch.setattr(DraftModel, "seconds", lambda self, rows: 0.1)


@pytest.fixture(scope="session")
def tiny_int8(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "int8.bundle"
    export(tiny_folder, path, recipe="int8", targets=("cpu",))
    return path


Models = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def another(tiny_folder: Path, tiny_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports one of another family, with a sliding window."""
    folder = tmp_path_factory.mktemp("another")
    tiny_model("Mistral", vocab_size=259).save_pretrained(folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, folder / "source")
    export(folder / "source", folder / "f32.bundle", recipe="f32", targets=("cpu",))
    return folder / "f32.bundle"


@pytest.fixture(params=["same", "int8", "another"])
def draft(request: pytest.FixtureRequest, tiny_bundle: Path, tiny_int8: Path, another: Path) -> Path:
    paths: dict[str, Path] = {"same": tiny_bundle, "int8": tiny_int8, "another": another}
    return paths[request.param]


def draft_model_of(llm: ew.LLM) -> DraftModel:
    (model,) = (one for one in llm.engine.proposers if isinstance(one, DraftModel))
    return model


def all_blocks_are_free(llm: ew.LLM) -> None:
    info = llm.info()
    pools = draft_model_of(llm).cache.pools
    assert info["speculation"]["draft_model"]["kv_blocks_free"] == {n: p.total_blocks for n, p in pools.items()}
    assert info["kv_blocks_free"] == {name: pool.total_blocks for name, pool in llm.engine.pools.items()}


@pytest.mark.usefixtures("costs_are_given")
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_tokens_and_log_probabilities_are_those_without(tiny_bundle: Path, draft: Path, temperature: float) -> None:
    """Alone and in company, with the prefix cache, several answers, biases and penalties."""
    params = [replace(PARAMS, temperature=temperature, seed=seed) for seed in range(4)]
    params[1] = replace(params[1], logit_bias={7: 1.5}, bad_words=[[11]], allowed_token_ids=range(5, 90))
    params[2] = replace(params[2], frequency_penalty=0.5)
    params[3] = replace(params[3], n=2 if temperature else 1)
    with ew.LLM(tiny_bundle, speculate=None) as plain, ew.LLM(tiny_bundle, speculate=draft) as ahead:
        expected = plain.generate(PROMPTS, params)
        for prompt, one, result in zip(PROMPTS, params, expected, strict=True):
            assert ahead.generate([prompt], one) == [result]
        assert ahead.generate(PROMPTS, params) == expected
        longer = [[*result.prompt_token_ids, *result.token_ids, 50] for result in expected]
        assert ahead.generate(longer, params) == plain.generate(longer, params)
        source = ahead.info()["speculation"]["sources"]["model"]
        assert source["drafted"] >= source["accepted"] and source["drafted"] > 0
        assert draft != tiny_bundle or source["accepted"] == source["drafted"], "its cache follows"
        all_blocks_are_free(ahead)


@pytest.mark.usefixtures("costs_are_given")
def test_preemption_and_cancelling(tiny_bundle: Path) -> None:
    """With the same model, all of whose guesses are right; no room for four requests, and less in its cache."""
    single = ew.LLM(tiny_bundle, memory="1MiB", speculate=None)
    groups = single._executor.cache_groups
    executor = CpuExecutor(Bundle.open(tiny_bundle), {group.name: 5 for group in groups}, Placement(threads=1))
    small = CpuExecutor(Bundle.open(tiny_bundle), {group.name: 4 for group in groups}, Placement(threads=1))
    model = DraftModel(small, 1000)
    engine = Engine(executor, SchedulerConfig(4, prefix_cache=True, speculate=True), [model])
    params = replace(PARAMS, max_tokens=50)
    generations = [Generation(prompt, params) for prompt in PROMPTS]
    for request in generations:
        engine.add_request(request)
    steps = 0
    while engine.has_work():
        for request in engine.step():
            request.take_piece()
        if (steps := steps + 1) == 4:
            engine.abort(generations[1])
    expected = single.generate(PROMPTS, params)
    for request, result in zip(generations, expected, strict=True):
        if request is not generations[1]:
            output = request.to_output()
            assert (output.token_ids, output.logprobs) == (result.token_ids, result.logprobs)
    assert engine.preemptions and isinstance(engine.scheduler.drafts, Drafts)
    drafted, accepted = engine.scheduler.drafts.by_source["model"]
    assert drafted == accepted > 0
    for pool in (*engine.pools.values(), *model.cache.pools.values()):
        assert pool.free_blocks == pool.total_blocks
    engine.close()
    single.close()


@pytest.mark.usefixtures("costs_are_given")
def test_a_draft_model_that_fails_is_switched_off(tiny_bundle: Path, tiny_int8: Path) -> None:
    with ew.LLM(tiny_bundle, speculate=None) as plain, ew.LLM(tiny_bundle, speculate=tiny_int8) as ahead:
        expected = plain.generate(PROMPTS, PARAMS)
        executor, calls = draft_model_of(ahead)._executor, 0
        submit = executor.submit

        def failing(step: object) -> object:
            nonlocal calls
            calls += 1
            if calls > 5:
                raise OSError("the file is gone")
            return submit(step)

        executor.submit = failing
        with pytest.warns(RuntimeWarning, match=r"speculate: .*the file is gone"):
            assert ahead.generate(PROMPTS, PARAMS) == expected
        assert calls == 6 and "the file is gone" in ahead.info()["speculation"]["draft_model"]["off"]
        all_blocks_are_free(ahead)


def test_a_draft_model_that_is_slower_is_left_alone(
    tiny_bundle: Path, tiny_int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeTimes, "took", lambda *given: None)  # a step of each takes a second
    with ew.LLM(tiny_bundle, speculate=tiny_int8) as llm:
        assert llm.info()["speculation"]["draft_model"]["off"] is None
        llm.generate(PROMPTS[:1], PARAMS)
        first = llm.info()["speculation"]["sources"]["model"]
        monkeypatch.setattr(DraftModel, "seconds", lambda self, rows: 1.1)
        llm.generate(PROMPTS[:1], PARAMS)
        speculation = llm.info()["speculation"]
    assert speculation["sources"]["model"] == first and 0 < first["drafted"] <= 16 + 8
    assert speculation["draft_model"]["off"] == "a step of it takes 1100.00 ms, and one of the model 1000.00 ms"


@pytest.mark.usefixtures("costs_are_given")
def test_what_a_tenant_said_is_forgotten(tiny_bundle: Path, tiny_int8: Path) -> None:
    with ew.LLM(tiny_bundle, speculate=tiny_int8) as llm:
        llm.generate([PROMPTS[0] * 20], PARAMS, tenant="a")
        index = draft_model_of(llm).cache.index
        assert index is not None
        assert index.find(Namespace("a"), PROMPTS[0] * 20, 99).tokens > 0
        llm.delete_prefixes(tenant="a")
        assert index.find(Namespace("a"), PROMPTS[0] * 20, 99).tokens == 0
        (answers,) = (one for one in llm.engine.proposers if isinstance(one, PastAnswers))
        assert answers.next("a", PROMPTS[0] * 20, 9) == NOTHING


@pytest.mark.matrix
def test_bad_bundles_are_named(tiny_bundle: Path, tiny_int8: Path, tiny_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ew.BundleError, match=r"speculate: .*nowhere doesn't exist"):
        ew.LLM(tiny_bundle, speculate=tmp_path / "nowhere")
    shutil.copytree(tiny_int8, damaged := tmp_path / "damaged.bundle")
    (damaged / "manifest.json").write_text("{")
    with pytest.raises(ew.BundleError, match=r"speculate: .*manifest.json"):
        ew.LLM(tiny_bundle, speculate=str(damaged))
    shutil.copytree(tiny_int8, untargeted := tmp_path / "no-cpu.bundle")
    manifest = json.loads((untargeted / "manifest.json").read_text())
    assert "cpu" in manifest["targets"]
    manifest["targets"] = []
    (untargeted / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ew.BundleError, match=r"speculate: .*cpu"):
        ew.LLM(tiny_bundle, speculate=untargeted)
    export(tiny_model("Llama", vocab_size=300), tmp_path / "larger.bundle", recipe="f32", targets=("cpu",))
    with pytest.raises(ew.RequestError, match=r"speculate: .*another vocabulary.*: 300 tokens, and 259 there"):
        ew.LLM(tiny_bundle, speculate=tmp_path / "larger.bundle")
    shutil.copytree(tiny_int8, renamed := tmp_path / "renamed.bundle")
    tokenizer = renamed / "tokenizer" / "tokenizer.json"
    name = ew.LLM(tiny_bundle).tokenizer.vocabulary[200]
    tokenizer.write_bytes(tokenizer.read_bytes().replace(f'"{name}"'.encode(), '"\u03a9"'.encode()))  # as long
    with pytest.raises(ew.RequestError, match=f"speculate: .*: token 200 is '\u03a9', and '{name}' there"):
        ew.LLM(tiny_bundle, speculate=renamed)
    with pytest.raises(ew.CapacityError, match=r"speculate: memory of 64.0 KiB doesn't hold .* weights of .* both KV"):
        ew.LLM(tiny_bundle, speculate=tiny_int8, memory="64KiB")
    with pytest.raises(ew.RequestError, match="speculate: 7 isn't a way"):
        ew.LLM(tiny_bundle, speculate=7)  # type: ignore[arg-type]
