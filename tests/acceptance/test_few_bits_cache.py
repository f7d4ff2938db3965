"""KV caches of few bits through the user's door: the context that fits, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe, with_cache
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import CapacityError, RequestError, TargetError, UnsupportedModelError

TinyModel = Callable[..., PreTrainedModel]


def test_more_context_fits_in_the_memory_of_an_int8_cache(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Heads of 64 have 8.5 bits a number in int8, 6.25 in k8v4, 5.25 in k6v4 and 4.75 in k5v4."""
    model = tiny_model("Llama", head_dim=64, num_hidden_layers=1, max_position_embeddings=8192)
    options = {"memory": "1MiB", "prefill_chunk": 256}
    tokens = {}
    for cache in ("int8", "k8v4", "k6v4", "k5v4"):
        export(model, tmp_path / cache, recipe="f32", targets=["cpu"], kv_cache=cache)
        with LLM(tmp_path / cache, **options) as llm:
            tokens[cache] = llm.info()["kv_cache_tokens"]
            if cache == "int8":
                continue
            # More than int8 has room for: it runs here, and int8 refuses it.
            prompt = np.random.default_rng(0).integers(3, 256, tokens[cache] - 40).tolist()
            [result] = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(result.token_ids) == 4
        with LLM(tmp_path / "int8", **options) as llm, pytest.raises(CapacityError, match="memory: the request"):
            llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    assert tokens["k8v4"] / tokens["int8"] == pytest.approx(8.5 / 6.25, rel=0.02)
    assert tokens["k6v4"] / tokens["int8"] == pytest.approx(8.5 / 5.25, rel=0.02)
    assert tokens["k5v4"] / tokens["int8"] == pytest.approx(8.5 / 4.75, rel=0.02)


def test_ends_of_8_bits_leave_room_for_1_7_times_the_context_of_int8(tiny_model: TinyModel, tmp_path: Path) -> None:
    """k4v4 has 4.25 bits a number, int8 8.5. The ends of a request, and a chunk, are in 8.25 bits besides."""
    model = tiny_model("Llama", head_dim=64, num_hidden_layers=1, max_position_embeddings=16384)
    options: dict[str, Any] = {"memory": "1536KiB", "prefill_chunk": 128, "max_requests": 1}
    tokens = {}
    for cache in ("int8", "k4v4"):
        export(model, tmp_path / cache, recipe="f32", targets=["cpu"], kv_cache=cache)
        with LLM(tmp_path / cache, **options) as llm:
            tokens[cache] = llm.info()["kv_cache_tokens"]
            prompt = np.random.default_rng(0).integers(3, 256, tokens[cache] - 8).tolist()
            [result] = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
            assert len(result.token_ids) == 8
    assert tokens["k4v4"] >= 1.7 * tokens["int8"]


TEXT = np.random.default_rng(5).integers(3, 256, 900).tolist()
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)


def _answer(llm: LLM, prompt: list[int]) -> tuple[object, int]:
    """Returns the tokens with their log-probabilities, and the number of tokens from the prefix cache."""
    [result] = llm.generate([prompt], PARAMS)
    return (result.token_ids, result.logprobs), result.num_cached_tokens or 0


@pytest.fixture(scope="module")
def with_ends(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("ends") / "k4v4.bundle"
    export(tiny_model("Llama", max_position_embeddings=1024), bundle, recipe="f32", targets=["cpu"], kv_cache="k4v4")
    return bundle


def test_a_prefix_is_used_up_to_where_its_last_tokens_have_8_bits(with_ends: Path) -> None:
    """After a whole prompt these are the last blocks, so that the next turn begins behind them. Where another text
    branches off in the middle, blocks between the ends were given back, and once others have them the prefix ends
    earlier. Answers are the same.
    """
    branched = [*TEXT[:500], *TEXT[:100]]
    with LLM(with_ends, prefix_cache=False) as llm:
        want = {tuple(prompt): _answer(llm, prompt)[0] for prompt in (TEXT, [*TEXT, 7, 8], branched)}
    full, ends = map(cache_block_bytes, Bundle.open(with_ends).program("cpu").cache_groups)
    memory = 1024 // 32 * full + (128 + 256 + 64 + 2 * 64) // 32 * ends  # no more than a request needs
    with LLM(with_ends, prefill_chunk=64, max_requests=1, memory=memory) as llm:
        for prompt, least in ((TEXT, 0), ([*TEXT, 7, 8], len(TEXT)), (branched, 0)):
            answer, cached = _answer(llm, prompt)
            assert answer == want[tuple(prompt)]
            assert cached >= least
        assert cached < 500 - 500 % 32, "the blocks before the branch were evicted"


def test_blocks_of_both_caches_come_back_from_a_disk(
    with_ends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    answers = []
    for _ in range(2):
        with LLM(with_ends, prefix_folder=str(tmp_path / "kept")) as llm:
            answers.append(_answer(llm, TEXT))
    assert answers[1][0] == answers[0][0]
    assert (answers[0][1], answers[1][1]) == (0, len(TEXT) // 32 * 32)


def test_a_window_shorter_than_both_ends_has_8_bits(tiny_model: TinyModel, tmp_path: Path) -> None:
    export(tiny_model("Gemma2", sliding_window=64), tmp_path / "x", recipe="f32", targets=["cpu"], kv_cache="k4v4")
    groups = Bundle.open(tmp_path / "x").program("cpu").cache_groups
    stored = {group.name: (group.dtype, group.window, group.first) for group in groups}
    assert stored == {"window64": ("k8v8", 64, 0), "full": ("k4v4", 0, 0), "full-ends": ("k8v8", 256, 128)}


def test_a_ring_of_ranks_refuses_the_second_cache(with_ends: Path) -> None:
    with pytest.raises(RequestError, match="ring: the ends of a request are in a second cache"):
        LLM(with_ends, partition="ring=2")


def test_heads_that_do_not_fill_bytes_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"k6v4 .* multiples of 8 for keys and 2 for values; .* has 12 and 12"
    ):
        export(tiny_model("Llama", head_dim=12), tmp_path / "x", recipe="f32", targets=["cpu"], kv_cache="k6v4")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("target", ["cuda", "onnx"])
def test_other_targets_refuse_it(target: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"target {target}: it has no KV cache of k6v4"):
        export(tiny_model("Llama"), tmp_path / "x", recipe="bf16", targets=[target], kv_cache="k6v4")


def test_blocks_are_not_chosen_by_rotated_keys(tiny_model: TinyModel, tmp_path: Path) -> None:
    recipe = with_cache(load_recipe("f32"), "k6v4").model_copy(update={"adaptive_context": ContextOptions(best=32)})
    with pytest.raises(TargetError, match=r"\[adaptive_context\] .* KV cache of k6v4"):
        export(tiny_model("Llama"), tmp_path / "x", recipe=recipe, targets=["cpu"])
