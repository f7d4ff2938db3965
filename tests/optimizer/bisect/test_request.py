"""Models that can't be compared are refused, with what differs; names and numbers of parameters may."""

from __future__ import annotations

from dataclasses import replace

import pytest

from enginewright.optimizer.bisect.request import check_same_cache, check_same_model
from enginewright.runtime.shared.contracts import CacheGroup, ModelInfo
from enginewright.runtime.shared.errors import ComparisonError

INFO = ModelInfo("one", "LlamaForCausalLM", 32_000, 2048)
FULL, WINDOW = CacheGroup("full", (0, 2), 2, 16, 16), CacheGroup("window8", (1, 3), 2, 16, 16, window=8)


def test_models_alike() -> None:
    check_same_model(INFO, "A", replace(INFO, name="two", parameters=7, context_length=64), "B")
    check_same_cache((FULL, WINDOW), "A", (WINDOW, FULL), "B")  # in whatever order groups are


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "GPT2LMHeadModel"}, "architecture LlamaForCausalLM and GPT2LMHeadModel"),
        ({"vocab_size": 32_064}, "vocabulary 32,000 tokens and 32,064 tokens"),
    ],
)
def test_other_models(change: dict[str, object], message: str) -> None:
    with pytest.raises(ComparisonError, match=f"A and B are different models: {message}\n") as caught:
        check_same_model(INFO, "A", replace(INFO, **change), "B")  # type: ignore[arg-type]
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((FULL.model_copy(update={"layers": (0, 2, 4)}), WINDOW), "layers 4 and 5"),
        ((FULL.model_copy(update={"kv_heads": 1}), WINDOW), "key and value heads 2 and 1, 2, 1, 2"),
        (
            (FULL.model_copy(update={"value_head_size": 24}), WINDOW.model_copy(update={"value_head_size": 24})),
            "head size 16/16 and 16/24",
        ),
        ((FULL, WINDOW.model_copy(update={"window": 16})), "window none, 8, none, 8 and none, 16, none, 16"),
    ],
)
def test_other_caches(other: tuple[CacheGroup, ...], message: str) -> None:
    with pytest.raises(ComparisonError, match=message):
        check_same_cache((FULL, WINDOW), "A", other, "B")
