"""Each architecture of GGUF files, against transformers' own model of the same weights."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from enginewright.optimizer.capture.capture_model import build_from_gguf
from enginewright.optimizer.capture.gguf.architectures import ARCHITECTURES, describe
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.capture.gguf.model import read_config
from enginewright.optimizer.export import export
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .gguf_encoders import ENCODERS
from .gguf_models import CASES, build, tensors_of, write_model

TOKENS = 40
UNDECLARED = {
    "bloom": {"max_position_embeddings"},
    **{name: {"head_dim"} for name in ("qwen3moe", "glm4moe", "dots1", "exaone4", "falcon-h1")},
}
"""Fields that aren't declared, and are read: the width of a head, and the longest context."""
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits [S, V] of a file, with its weights put into the model that was built for it."""
    model, weights = build_from_gguf(open_gguf(path))
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, weight in weights.items():
            state[name].copy_(weight.evaluate())
        model.config._attn_implementation = "eager"
        logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def expected(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits [S, V] of transformers' model."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def ids_of(seed: int = 0) -> torch.Tensor:
    """Token ids [S]."""
    return torch.randint(3, 120, (TOKENS,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", CASES)
def test_logits_are_those_of_transformers_model(architecture: str, tmp_path: Path) -> None:
    model = build(CASES[architecture])
    path = write_model(tmp_path / "tiny.gguf", architecture, model)
    torch.testing.assert_close(logits_of(path, ids_of()), expected(model, ids_of()), **TOLERANCE)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SIX = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(
    ("architecture", "keys", "config"),
    [
        ("llama", {"rope.scale_linear": 4.0}, {"rope_parameters": LINEAR}),
        ("llama", {"rope.scaling.factor": 4.0}, {"rope_parameters": LINEAR}),
        ("llama", {"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, {"rope_parameters": LINEAR}),
        ("llama", {"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, {}),
        (
            "llama",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.finetuned": True,
            },
            {"rope_parameters": YARN},
        ),
        (
            "qwen3",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {"rope_parameters": YARN},
        ),
        (
            "gemma3",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6},
            {
                "rope_parameters": {
                    "sliding_attention": PLAIN,
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                }
            },
        ),
        (
            "gemma3",
            {"attention.sliding_window_pattern": 2, "rope.freq_base": 1e6},
            {
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "rope_parameters": {"sliding_attention": PLAIN, "full_attention": PLAIN | {"rope_theta": 1e6}},
            },
        ),
        (
            "gemma3",
            {"rope.freq_base_swa": 500.0, "rope.freq_base": 1e6},
            {
                "rope_parameters": {
                    "sliding_attention": PLAIN | {"rope_theta": 500.0},
                    "full_attention": PLAIN | {"rope_theta": 1e6},
                }
            },
        ),
        ("gemma3", {"attention.sliding_window": None}, {"layer_types": ["full_attention"] * 6}),
        ("gemma2", {"attention.sliding_window_pattern": [False, True]}, {"layer_types": SIX[:-3:-1]}),
        ("gemma2", {"attention.sliding_window": 4}, {"sliding_window": 4}),
        ("stablelm", {"rope.dimension_count": 8}, {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
        ("nemotron", {"attention.layer_norm_epsilon": 0.25}, {"norm_eps": 0.25}),
    ],
)
def test_keys_that_change_the_numbers_are_honoured(
    architecture: str, keys: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    plain = build(CASES[architecture])
    path = write_model(tmp_path / "tiny.gguf", architecture, plain, keys=keys)
    model = build(CASES[architecture], **config)
    logits = logits_of(path, ids_of())
    torch.testing.assert_close(logits, expected(model, ids_of()), **TOLERANCE)
    if config and architecture != "stablelm":
        assert (logits - expected(plain, ids_of())).abs().max() > 1e-3  # the key matters


@pytest.mark.parametrize(
    ("architecture", "config", "keys"),
    [
        ("qwen35", {"linear_num_value_heads": 2}, {"ssm.time_step_rank": 2, "ssm.inner_size": 64}),
        ("qwen35", {}, {"attention.recurrent_layers": None}),
        (
            "granitehybrid",
            {"num_local_experts": 0, "shared_intermediate_size": 96},
            {"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": None},
        ),
        ("granitehybrid", {"position_embedding_type": "rope"}, {"rope.scaling.finetuned": True}),
        ("falcon-h1", {"mamba_rms_norm": False}, {}),
        ("falcon-h1", {"attention_bias": True, "mlp_bias": True, "mamba_conv_bias": False}, {}),
        ("mamba", {"use_conv_bias": False, "use_bias": True}, {}),
        ("mamba2", {"n_groups": 1}, {"ssm.group_count": 1}),
    ],
)
def test_variants_of_recurrent_architectures(
    architecture: str, config: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    model = build(CASES[architecture], **config)
    path = write_model(tmp_path / "tiny.gguf", architecture, model, keys=keys)
    torch.testing.assert_close(logits_of(path, ids_of()), expected(model, ids_of()), **TOLERANCE)


def test_a_mamba_file_whose_inputs_have_norms_is_a_falcon_mamba(tmp_path: Path) -> None:
    model = build(replace(CASES["mamba"], model_type="falcon_mamba"))
    path = write_model(tmp_path / "tiny.gguf", "mamba", model, keys={"ssm.dt_b_c_rms": True})
    assert read_config(open_gguf(path)).model_type == "falcon_mamba"
    torch.testing.assert_close(logits_of(path, ids_of()), expected(model, ids_of()), **TOLERANCE)


def test_gemma_divides_scores_by_the_width_of_its_heads(tmp_path: Path) -> None:
    """The class of transformers has 256 by default, whatever the heads are."""
    model = build(CASES["gemma2"], query_pre_attn_scalar=256)
    path = write_model(tmp_path / "tiny.gguf", "gemma2", model)
    assert (logits_of(path, ids_of()) - expected(model, ids_of())).abs().max() > 1e-3


def test_the_name_of_a_model_changes_nothing(tmp_path: Path) -> None:
    """A model called mistral was given a sliding window."""
    path = write_model(tmp_path / "tiny.gguf", "llama", build(CASES["llama"]), general={"general.name": "mistral"})
    config = read_config(open_gguf(path))
    assert (config.model_type, getattr(config, "sliding_window", None)) == ("llama", None)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "falcon"])
def test_an_output_is_tied_if_it_is_not_in_the_file(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = build(CASES[architecture], tie_word_embeddings=tied)
    path = write_model(tmp_path / "tiny.gguf", architecture, model)
    torch.testing.assert_close(logits_of(path, ids_of()), expected(model, ids_of()), **TOLERANCE)


def test_divisors_of_frequencies_are_honoured(tmp_path: Path) -> None:
    model = build(CASES["llama"])
    divisors = np.linspace(1, 8, 8).astype(np.float32)
    path = write_model(tmp_path / "tiny.gguf", "llama", model, tensors={"rope_freqs.weight": divisors})
    model.model.rotary_emb.inv_freq.div_(torch.from_numpy(divisors))
    torch.testing.assert_close(logits_of(path, ids_of()), expected(model, ids_of()), **TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "residual_scale", 3.0),
        ("llama", "logit_scale", 0.5),
        ("llama", "attention.scale", 0.5),
        ("llama", "attention.sliding_window", 8),
        ("llama", "attention.clamp_kqv", 1.0),
        ("llama", "attention.causal", False),
        ("llama", "rope.dimension_count", 8),
        ("llama", "rope.dimension_sections", [2, 3, 3, 0]),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "rope.scaling.type", "new"),
        ("llama", "attention.value_length", 8),
        ("llama", "attention.head_count_kv", [2, 1]),
        ("llama", "feed_forward_length", [96, 48]),
        ("llama", "expert_shared_count", 1),
        ("llama", "a.key.of.later", 1),
        ("llama", "another", [1, 2]),
        ("qwen3moe", "expert_group_count", 2),
        ("qwen3moe", "expert_weights_scale", 2.5),
        ("qwen3moe", "expert_used_count", 9),
        ("qwen3moe", "nextn_predict_layers", 1),
        ("gemma2", "rope.freq_base_swa", 500.0),
        ("gemma2", "attention.sliding_window", 0),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("falcon", "attention.max_alibi_bias", 8.0),
        ("bloom", "rope.freq_base", 500.0),
        ("bloom", "feed_forward_length", 96),
        ("stablelm", "use_parallel_residual", True),
        ("minimax-m2", "expert_gating_func", 1),
        ("qwen35", "attention.recurrent_layers", [False, True]),
        ("qwen35", "attention.recurrent_layers", [True, True]),
        ("qwen35", "ssm.time_step_rank", 5),
        ("qwen3next", "ssm.inner_size", 193),
        ("lfm2moe", "attention.head_count_kv", [2, 0]),
        ("granitehybrid", "attention.head_count_kv", [2, 2]),
        ("granitehybrid", "ssm.inner_size", 130),
        ("granitehybrid", "ssm.group_count", 3),
        ("nemotron_h", "feed_forward_length", [96, 0, 0, 0]),
        ("mamba", "ssm.inner_size", 100),
        ("mamba2", "ssm.time_step_rank", 6),
    ],
)
def test_keys_that_can_not_be_honoured_are_refused_by_name(
    architecture: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "tiny.gguf", architecture, build(CASES[architecture]), keys={key: value})
    with pytest.raises(UnsupportedModelError, match=re.escape(f"{architecture}.{key} ")) as caught:
        read_config(open_gguf(path))
    assert str(path) in caught.value.message


SIZES_OF_STATES = [
    (architecture, key)
    for architecture, case in CASES.items()
    for key in case.keys
    if key.startswith(("ssm.", "shortconv.")) and not isinstance(case.keys[key], bool)
]


@pytest.mark.parametrize(("architecture", "key"), SIZES_OF_STATES)
def test_a_file_that_lies_about_its_states_is_refused(architecture: str, key: str, tmp_path: Path) -> None:
    model, size = build(CASES[architecture]), CASES[architecture].keys[key]
    for value in (0, size // 2, 2 * size, 2**31 - 1):
        path = write_model(tmp_path / "tiny.gguf", architecture, model, keys={key: value})
        with pytest.raises((SourceError, UnsupportedModelError), match=re.escape(str(path))):
            export(path, tmp_path / "out" / "tiny.bundle", recipe="f32")
        assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("architecture", "value"), [("qwen35", 0.5), ("mamba2", 0.0), ("mamba", float("nan"))], ids=str
)
def test_a_state_that_does_not_decay_is_refused_by_its_tensor(architecture: str, value: float, tmp_path: Path) -> None:
    model = build(CASES[architecture])
    decays = tensors_of(architecture, model)["blk.0.ssm_a"].copy()
    decays.reshape(-1)[1] = value
    path = write_model(tmp_path / "tiny.gguf", architecture, model, tensors={"blk.0.ssm_a": decays})
    with pytest.raises(SourceError, match=re.escape(f"{path}: tensor blk.0.ssm_a ")):
        export(path, tmp_path / "out" / "tiny.bundle", recipe="f32")
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("residual_scale", 1.0),
        ("logit_scale", 0.0),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
        ("attention.causal", True),
        ("rope.scaling.finetuned", False),
        ("rope.scaling.type", "none"),
        ("tensor_data_layout", "Meta AI original pth"),
    ],
)
def test_values_that_change_nothing_are_taken(key: str, value: Any, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", build(CASES["llama"]), keys={key: value})
    read_config(open_gguf(path))


def test_keys_of_other_things_are_taken(tmp_path: Path) -> None:
    general = {"quantize.imatrix.file": "x", "qwen2.context_length": 3, "general.tags": ["a"], "general.license": "mit"}
    path = write_model(tmp_path / "tiny.gguf", "llama", build(CASES["llama"]), general=general)
    read_config(open_gguf(path))


@pytest.mark.parametrize("architecture", CASES)
def test_the_class_has_every_field_that_is_set(architecture: str, tmp_path: Path) -> None:
    """A field of another name would be kept by the configuration, and read by nobody."""
    path = write_model(tmp_path / "tiny.gguf", architecture, build(CASES[architecture]))
    described = describe(open_gguf(path))
    kind = CONFIG_MAPPING[described.model_type]
    known = {item.name for item in fields(kind)} | set(kind.attribute_map) | set(kind().to_dict())
    assert set(described.fields) - known == UNDECLARED.get(architecture, set())


def test_every_architecture_has_a_case() -> None:
    assert set(CASES) | set(ENCODERS) == set(ARCHITECTURES)
