"""Mixtures of experts: their logits through capture, passes, the bundle and the CPU engine are transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.runtime.shared.errors import UnsupportedModelError

from .driver import Driver
from .test_families import compare, expected_logits

_SMALL = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_EXPERTS = {**_SMALL, "num_experts": 6}
_LOCAL = {**_SMALL, "num_local_experts": 6}
_GROUPS = {  # experts are chosen within the best groups; the first layer has none; one is shared by all tokens
    **_SMALL,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
_LATENT = {  # attention through a latent, with values of another size
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    # What each has that those above don't; a family's name, and what is special about the case.
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    "Mixtral all": {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 16},  # every expert for every token
    "Mixtral window": {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 8},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},  # a shared expert with a gate of its own
    "Qwen3Moe": {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "Qwen3Moe sparse": {**_EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "num_hidden_layers": 3},
    "Olmoe": {**_EXPERTS, "clip_qkv": 0.5},
    "GptOss": {**_LOCAL, "head_dim": 16, "sliding_window": 8},  # sinks; interleaved weights, biases, clamps
    "DeepseekV2": {**_LATENT, **_GROUPS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {**_LATENT, **_GROUPS, "q_lora_rank": 16},
    "Glm4Moe": {**_GROUPS, "head_dim": 16},
    "Glm4MoeLite": {**_LATENT, **_GROUPS, "q_lora_rank": 16},
    "Dots1": {**_GROUPS, "head_dim": 16},
    "SolarOpen": {**_GROUPS, "head_dim": 16},
    "GraniteMoe": {**_LOCAL, "residual_multiplier": 0.3},
    "GraniteMoeShared": {**_LOCAL, "shared_intermediate_size": 48},
    "Phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2},  # the second choice comes after the first is masked
    "Ernie4_5_Moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "HunYuanMoEV1": {"num_experts": 6, "moe_topk": 2, "head_dim": 16},
    "FlexOlmo": _EXPERTS,
    "Afmoe": {**_EXPERTS, "head_dim": 16, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 8},
    "MiniMaxM2": {**_EXPERTS, "head_dim": 16},
    "Cohere2Moe": {**_EXPERTS, "logit_scale": 0.5},
    "Laguna": {**_EXPERTS, "head_dim": 16},
    "AriaText": {"moe_num_experts": 6, "moe_topk": 2},  # weights whose axes are exchanged
}

SAVED = ("Mixtral", "Qwen2Moe", "GptOss", "DeepseekV3", "GraniteMoe", "Phimoe", "AriaText")
"""Whose tensors on disk are not the model's parameters, or are so in ways of their own."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "JetMoe": ({"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}, r"model\.layers\.0\.self_att"),
    "LongcatFlash": (
        {**_LATENT, "q_lora_rank": 16, "head_dim": 8, "num_layers": 1, "ffn_hidden_size": 32}
        | {"expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
        r"model\.layers\.0\.mlp\.experts can't be traced",
    ),
    "Llama4Text": ({"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 16}, "neither causal nor causal"),
    "NemotronH": ({"hybrid_override_pattern": "M*"}, "nemotron_h"),
}


def make(tiny_model: Callable[..., PreTrainedModel], case: str) -> PreTrainedModel:
    """A tiny model whose saved buffers, such as corrections of the router's scores, are random too."""
    model = tiny_model(case.partition(" ")[0], **EXPERT_FAMILIES[case])
    generator = torch.Generator().manual_seed(5)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


USUALLY = ("Mixtral", "GptOss", "DeepseekV3")
"""The families, and saved ones, that are tried at every change."""


def _cases(cases: Iterable[str]) -> list[Any]:
    return [case if case in USUALLY else pytest.param(case, marks=pytest.mark.matrix) for case in cases]


@pytest.mark.parametrize("case", _cases(EXPERT_FAMILIES))
def test_prefill_and_decode_equal_transformers(
    case: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    usual = case in USUALLY
    ways = ("best", "portable") if usual else ("best",)
    compare(make(tiny_model, case), tmp_path / "tiny.bundle", (37 if usual else 21, 5, 1), 8, *ways)


@pytest.mark.parametrize("case", _cases(SAVED))
def test_a_saved_model_gives_the_bundle_that_the_model_gives(
    case: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = make(tiny_model, case)
    model.save_pretrained(tmp_path / "saved")
    export(model, tmp_path / "model.bundle")
    export(tmp_path / "saved", tmp_path / "saved.bundle")
    ids = np.random.default_rng(6).integers(3, 256, 30).tolist()
    got = []
    for bundle in ("model.bundle", "saved.bundle"):
        with Driver(tmp_path / bundle, 1, 1) as driver:
            got.append(driver.step({0: ids})[0])
    assert got[0].tobytes() == got[1].tobytes()


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused(family: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    overrides, message = REFUSED[family]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        export(tiny_model(family, **overrides), tmp_path / "tiny.bundle")
    assert caught.value.hint is not None
    assert not list(tmp_path.iterdir())


def test_tolerance_would_show_another_choice_of_experts(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    export(tiny_model("Mixtral", num_local_experts=6, num_experts_per_tok=2), tmp_path / "tiny.bundle")
    ids = np.random.default_rng(2).integers(3, 256, 30).tolist()
    with Driver(tmp_path / "tiny.bundle", 1, 1) as driver:
        got = driver.step({0: ids})[0]
    other = tiny_model("Mixtral", num_local_experts=6, num_experts_per_tok=1)
    assert np.abs(got - expected_logits(other, ids)).max() > 1e-2
