"""Recurrent and hybrid models answer bit for bit the same in any batch and chunks, from a prefix, and with drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.runtime.shared.errors import RequestError, UnsupportedModelError

from .test_families import saved
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
        if options.get("prefill_chunk") in (32, 64):  # steps end with blocks, where states are kept
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
def test_states_are_not_divided_by_tokens(bundle: Path) -> None:
    with pytest.raises(RequestError, match="ring=2: keys are divided by tokens"):
        LLM(bundle, partition="ring=2")


@pytest.mark.matrix
@pytest.mark.parametrize("target", ["cuda", "tvm", "onnx", "stablehlo", "tensorrt"])
def test_other_targets_refuse_recurrent_layers(target: str, tmp_path: Path) -> None:
    source = saved(tiny_family("lfm2"), tmp_path / "saved")
    with pytest.raises(UnsupportedModelError, match=r"recurrent|stored_convolution"):
        export(source, tmp_path / "model.bundle", recipe="f32", targets=[target])
    assert not (tmp_path / "model.bundle").exists()


@pytest.mark.matrix
def test_a_folder_for_prefixes_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prefixes"):
        LLM(bundle, prefix_folder=tmp_path / "kept")
