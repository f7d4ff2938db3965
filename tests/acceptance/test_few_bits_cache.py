"""KV caches of few bits through the user's door: the context that fits, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe, with_cache
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import CapacityError, TargetError, UnsupportedModelError

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
