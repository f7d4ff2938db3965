"""Recurrent and hybrid models answer bit for bit the same in any batch and chunks, from a prefix, and with drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.runtime.shared.errors import RequestError, SourceError, UnsupportedModelError

from ..families import RECURRENT
from .driver import Driver
from .test_families import TOLERANCE, expected_logits, saved
from .tiny_configs import tiny_family

FAMILIES = ["lfm2", "falcon_h1", "qwen3_5_text", "mamba"]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True, logprobs=2)

WAYS: list[dict[str, Any]] = [
    {},
    {"prefill_chunk": 7},
    {"prefill_chunk": 32, "max_requests": 3},
    {"prefix_cache": False, "threads": 2},
    {"speculate": "lookup", "prefill_chunk": 64},
    {"ranks": 2, "speculate": "lookup", "prefill_chunk": 32},
    {"partition": "pipeline=2", "speculate": "lookup", "prefill_chunk": 32},
]


@pytest.fixture(scope="module", params=FAMILIES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    export(saved(tiny_family(request.param), folder / "saved"), folder / "model.bundle", recipe="f32")
    return folder / "model.bundle"


def prompts() -> list[list[int]]:
    """Prompts of which several begin alike, at and around the ends of blocks, and some repeat themselves."""
    rng = np.random.default_rng(11)
    common = rng.integers(3, 250, 96).tolist()
    return [
        *(common[:n] + rng.integers(3, 250, m).tolist() for n, m in ((96, 5), (64, 31), (70, 3), (33, 1), (96, 40))),
        rng.integers(3, 250, 8).tolist() * 6,
        [7],
    ]


def answers(bundle: Path, together: bool = True, **options: Any) -> list[Any]:
    """Tokens and log-probabilities of every prompt, in one call or one after the other, twice in one engine."""
    options = {"threads": 1, "speculate": None, **options}
    with LLM(bundle, **options) as llm:
        rounds = []
        for _ in range(2):
            batches = [prompts()] if together else [[prompt] for prompt in prompts()]
            results = [one for batch in batches for one in llm.generate(batch, PARAMS)]
            rounds.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in results])
        assert rounds[0] == rounds[1], "the second round finds prefixes"
        if options.get("prefix_cache", True):
            assert llm.info()["prefix_cache"]["hits"] > 0
    return rounds[0]


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_answers_do_not_depend_on_the_way(bundle: Path, way: dict[str, Any]) -> None:
    alone = answers(bundle, together=False, prefix_cache=False)
    assert answers(bundle, **way) == alone


@pytest.mark.matrix
def test_beams_and_samples_have_states_of_their_own(bundle: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, ignore_eos=True)
    with LLM(bundle, threads=1) as llm:
        (several,) = llm.generate([prompts()[1]], params)
    with LLM(bundle, threads=1, prefix_cache=False, prefill_chunk=5) as llm:
        (again,) = llm.generate([prompts()[1]], params)
    assert [o.token_ids for o in several.outputs] == [o.token_ids for o in again.outputs]


@pytest.mark.matrix
def test_a_prompt_resumes_at_the_odd_token_where_two_others_diverged(bundle: Path) -> None:
    """Three prompts share 77 tokens. The counts say how many of the 113 the third one computes: 36 of them."""
    texts = diverging()
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)

    def generated(**options: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        answers_of, counts = list[Any](), list[dict[str, Any]]()
        with LLM(bundle, threads=1, speculate=None, **options) as llm:
            for text in texts:
                (result,) = llm.generate([text], params)
                answers_of.append((result.outputs[0].token_ids, result.outputs[0].logprobs))
                counts.append(llm.info()["prefix_cache"])
        return answers_of, counts

    results, counts = generated()
    assert results == generated(prefix_cache=False)[0]
    assert (counts[2]["tokens"] - counts[1]["tokens"], counts[2]["reused"] - counts[1]["reused"]) == (113, 77)


@pytest.mark.matrix
def test_the_memory_of_snapshots_is_an_option(bundle: Path) -> None:
    """Two snapshots besides the states of four requests. Answers are the same without any."""
    with LLM(bundle, max_requests=4, states_memory=0) as llm:
        states = [pool.total_blocks for name, pool in llm.engine.pools.items() if name.startswith("state")]
        assert set(states) == {4}
        state_bytes = sum(kind.bytes_of(kind.group) for kind in llm._cache.kinds.values() if kind.fixed)
    with LLM(bundle, max_requests=4, states_memory=2 * state_bytes) as llm:
        states = [pool.total_blocks for name, pool in llm.engine.pools.items() if name.startswith("state")]
        assert set(states) == {6}
    options = {"max_requests": 4, "prefill_chunk": 32}
    assert answers(bundle, states_memory=0, prefix_cache=False, **options) == answers(bundle, **options)
    with pytest.raises(RequestError, match="states_memory"):
        LLM(bundle, states_memory="many")


@pytest.mark.matrix
@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_logits_are_the_same_in_any_chunks_and_on_ranks(family: str, tmp_path: Path) -> None:
    """Logits of a prompt are transformers', and bit for bit the same in one piece and in chunks of 1, 7 and 64.

    Answers are bit for bit the same on two ranks.
    """
    model = tiny_family(family)
    export(saved(model, tmp_path / "saved"), tmp_path / "model.bundle", recipe="f32")
    ids = np.random.default_rng(4).integers(3, 250, 70).tolist()
    results = []
    for chunk in (len(ids), 1, 7, 64):
        with Driver(tmp_path / "model.bundle", 1, 3) as driver:
            steps = [driver.step({0: ids[i : i + chunk]})[0] for i in range(0, len(ids), chunk)]
        results.append(np.concatenate(steps))
    assert all(np.array_equal(results[0], other) for other in results[1:])
    np.testing.assert_allclose(results[0], expected_logits(model, ids), atol=TOLERANCE, rtol=0)
    outputs = []
    for options in ({}, {"partition": "tensor=2"}, {"partition": "pipeline=2"}):
        with LLM(tmp_path / "model.bundle", threads=1, **options) as llm:  # type: ignore[arg-type]
            (result,) = llm.generate([ids], PARAMS)
            outputs.append((result.outputs[0].token_ids, result.outputs[0].logprobs))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.matrix
def test_states_are_not_divided_by_tokens(bundle: Path) -> None:
    with pytest.raises(RequestError, match="ring=2: keys are divided by tokens"):
        LLM(bundle, partition="ring=2")


@pytest.mark.matrix
def test_more_requests_than_states_are_refused(bundle: Path) -> None:
    with pytest.raises(RequestError, match=r"max_requests: 2,048 requests have 2,048 states .* can have 2,047") as e:
        LLM(bundle, max_requests=2048)
    assert e.value.hint == "Pass max_requests of 2,047 or less."
    with LLM(bundle, max_requests=2047, threads=1) as llm:
        assert llm.generate([prompts()[3]], PARAMS)[0].error is None


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_that_is_not_finite_ends_its_request_alone(family: str, tmp_path: Path) -> None:
    """A token overflows in the first layer. Its requests end with an error; others, also later, have their answers."""
    token, params = 4000, SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True, logprobs=1)
    model = tiny_family(family, vocab_size=4096)  # so that verification draws no such token
    overflowing(model, token)
    export(saved(model, tmp_path / "saved"), tmp_path / "model.bundle", recipe="f32")
    healthy = [prompt for prompt in prompts() if token not in prompt]
    bad = [[*healthy[0][:65], token, *healthy[0][65:]], [token], [*healthy[3], token]]
    with LLM(tmp_path / "model.bundle", threads=1, max_requests=2, prefix_cache=False) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in healthy]
    for prefix_cache in (False, True):
        options: dict[str, Any] = {"threads": 1, "prefill_chunk": 32, "prefix_cache": prefix_cache}
        with LLM(tmp_path / "model.bundle", max_requests=3, **options) as llm:
            for _ in range(3):  # every state is a failed request's at some time
                mixed = [one for pair in zip(healthy, bad * 3, strict=False) for one in pair]
                results = llm.generate(mixed, params)
                assert all("are NaN or infinite" in str(one.error) for one in results[1::2])
                assert [one.outputs[0].token_ids for one in results[::2]] == alone
            forced = SamplingParams(max_tokens=4, ignore_eos=True, allowed_token_ids=[token])
            drawn, answer = llm.generate([healthy[0], healthy[1]], [forced, params])
            assert "are NaN or infinite" in str(drawn.error) and drawn.outputs[0].token_ids == (token,)
            assert answer.outputs[0].token_ids == alone[1]


def overflowing(model: Any, token: int) -> None:
    """Makes the first layer's input products of ``token`` infinite, and leaves those of other tokens as they are."""
    table = model.get_input_embeddings().weight
    layers = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    with torch.no_grad():
        table[:, 0] = 0
        table[token] = torch.eye(table.shape[1])[0]
        for name, module in layers[0].named_modules():
            if name.rpartition(".")[2].startswith("in_proj"):
                module.weight[:, 0] = 3e38


@pytest.mark.matrix
@pytest.mark.parametrize("target", ["tvm", "onnx", "stablehlo", "tensorrt"])
def test_other_targets_refuse_recurrent_layers(target: str, tmp_path: Path) -> None:
    source = saved(tiny_family("lfm2"), tmp_path / "saved")
    with pytest.raises(UnsupportedModelError, match=r"recurrent|stored_convolution"):
        export(source, tmp_path / "model.bundle", recipe="f32", targets=[target])
    assert not (tmp_path / "model.bundle").exists()


@pytest.mark.matrix
def test_states_in_a_folder_outlive_the_engine(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged ones, and those of another version of the numerics, are computed again."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    alone, folder = answers(bundle, prefix_cache=False), tmp_path / "kept"

    def read() -> tuple[int, int]:
        with LLM(bundle, threads=1, speculate=None, prefix_folder=folder) as llm:
            results = llm.generate(prompts(), PARAMS)
            assert [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in results] == alone
            use = llm.info()["prefix_cache"]
            return use["from_disk"], use["disk"]["refused"]

    assert read() == (0, 0)
    tokens, refused = read()
    assert tokens > 200 and not refused
    for path in folder.glob("*.kv"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.warns(RuntimeWarning, match="computed again"):
        tokens, refused = read()
    assert tokens == 0 < refused
    monkeypatch.setattr("enginewright.plugins.cpu.serve.executor.NUMERICS_VERSION", 1 << 20)
    assert read() == (0, 0)


_LATER = """
import json, sys
from enginewright import LLM, SamplingParams
with LLM(sys.argv[1], threads=1, speculate=None, prefix_folder=sys.argv[2]) as llm:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    for prompt in json.loads(sys.argv[3]):
        result = llm.generate([prompt], params)[0]
    use = llm.info()["prefix_cache"]
    answer = repr((result.outputs[0].token_ids, result.outputs[0].logprobs))
    print(json.dumps([answer, use["from_disk"], use["disk"]["refused"]]))
"""


def diverging() -> list[list[int]]:
    """Three prompts of 113 tokens, of which the first 77 are the same."""
    rng = np.random.default_rng(3)
    common = rng.integers(3, 250, 77).tolist()
    return [[*common, first, *rng.integers(3, 250, 35).tolist()] for first in (10, 11, 12)]


def in_a_process(bundle: Path, folder: Path, prompts: list[list[int]]) -> tuple[str, int, int]:
    """Returns the answer to the last of some prompts, tokens read from the folder, and refused records."""
    command = [sys.executable, "-W", "ignore", "-c", _LATER, str(bundle), str(folder), json.dumps(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer, read, refused = json.loads(done.stdout)
    return answer, read, refused


@pytest.mark.matrix
def test_a_later_process_resumes_within_a_block(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are cut off, changed, or in another's place are computed again, and count for the limit."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder, (*before, last) = tmp_path / "kept", diverging()
    alone = in_a_process(bundle, tmp_path / "empty", [last])[0]
    assert in_a_process(bundle, folder, before)[1:] == (0, 0)
    assert in_a_process(bundle, folder, [last]) == (alone, 77, 0), "the snapshot where the two others diverge"
    contents = {path.name: path.read_bytes() for path in folder.glob("*.kv")}

    def spoiled(change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Changes the contents of all records; no token of any is read then."""
        for name, content in zip(contents, change(list(contents.values())), strict=True):
            (folder / name).write_bytes(content)
        answer, read, refused = in_a_process(bundle, folder, [last])
        assert answer == alone and read == 0 < refused

    spoiled(lambda records: [record[: len(record) // 2] for record in records])
    spoiled(lambda records: [record[:-40] + bytes([record[-40] ^ 1]) + record[-39:] for record in records])
    spoiled(lambda records: records[1:] + records[:1])
    largest = max(map(len, contents.values()))
    with LLM(bundle, prefix_folder=tmp_path / "small", prefix_folder_size=2 * largest, threads=1) as llm:
        llm.generate(diverging(), PARAMS)
    assert 0 < sum(path.stat().st_size for path in (tmp_path / "small").glob("*.kv")) <= 2 * largest


_RECURRENT = {"qwen3_next": "linear_attention", "granitemoehybrid": "linear_attention", "lfm2": "conv"}


@pytest.mark.parametrize("kinds", [(1, 0), (0, 0), (1, 1), (0,), (0, 1, 1), (0, 2), 7])
@pytest.mark.parametrize("family", _RECURRENT)
def test_kinds_of_layers_that_are_not_the_checkpoint_s_are_refused(
    family: str, kinds: tuple[int, ...] | int, tmp_path: Path
) -> None:
    """The saved model has a recurrent layer (0) and one with attention (1); its configuration says something else."""
    names = (_RECURRENT[family], "full_attention", "mystery")
    saved(tiny_family(family), tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    fields = json.loads(file.read_text()) | {
        "layer_types": kinds if isinstance(kinds, int) else [names[k] for k in kinds]
    }
    file.write_text(json.dumps(fields))
    with pytest.raises(SourceError) as error:
        export(tmp_path / "saved", tmp_path / "model.bundle", recipe="f32")
    assert str(tmp_path / "saved") in error.value.message and "layer_types" in error.value.message
    if not isinstance(kinds, int) and len(kinds) == 2 and 2 not in kinds:
        wrong = 0 if kinds[0] else 1
        assert f"whose layer {wrong} is {names[kinds[wrong]]!r} (layer_types)" in error.value.message
    else:
        assert error.value.message.startswith(f"{file}: ")
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]
