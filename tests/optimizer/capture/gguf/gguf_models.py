"""Tiny models of each architecture, written as GGUF files by the names and keys of llama.cpp's converter.

Nothing here uses the reader under test: names are those of the package ``gguf``, or written out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

Array = npt.NDArray[Any]
Tensors = Iterator[tuple[str, Array]]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

EPSILON = 0.03125
"""No class's default, and large enough to be seen."""


@dataclass(frozen=True)
class Case:
    """A tiny model and its keys.

    Attributes:
        model_type: transformers' configuration class.
        config: what differs from ``SIZES``; None leaves one of those out.
        keys: what differs from the common keys, without the architecture; None leaves a key out.
        rename: makes the tensors of the file from one of the model.
        epsilon: the field and the key of the norms' epsilon.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    rename: Callable[[str, Array, Any], Tensors] | None = None
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    names: Mapping[str, str] = field(default_factory=dict)


def build(case: Case, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model with random weights, norms around 1 and random biases."""
    chosen = SIZES | {case.epsilon[0]: EPSILON} | dict(case.config) | config
    fields = {key: value for key, value in chosen.items() if value is not None or key not in SIZES}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[case.model_type](**fields), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if (
                "inv_freq" in name
                or "embed_scale" in name
                or "mup_vector" in name
                or not parameter.is_floating_point()
                or name.endswith("attn.bias")
            ):
                continue
            random = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.1 * random if parameter.dim() < 2 else 0.08 * random)
    model.tie_weights()
    return model.eval()


def common_keys(case: Case, model: PreTrainedModel) -> dict[str, Any]:
    """The keys that every architecture has."""
    config = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True

    def get(name: str, default: Any = None) -> Any:
        return getattr(config, case.names.get(name, name), default)

    heads = get("num_attention_heads", 0)
    head_dim = case.config.get("head_dim") or get("hidden_size") // max(heads, 1)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    keys = {
        "context_length": get("max_position_embeddings", SIZES["max_position_embeddings"]),
        "block_count": get("num_hidden_layers"),
        "embedding_length": get("hidden_size"),
        "feed_forward_length": get("intermediate_size") or 4 * get("hidden_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        case.epsilon[1]: float(getattr(config, case.epsilon[0])),
        "vocab_size": config.vocab_size,
    }
    if rope:
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return keys | dict(case.keys)


def write_model(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
    general: Mapping[str, Any] | None = None,
    keep: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Writes a file; ``keys``, ``tensors`` and ``general`` are added, or left out if None.

    Returns ``path``.
    """
    case = CASES[architecture]
    writer = gguf.GGUFWriter(str(path), architecture)
    whole: dict[str, Any] = {"general.name": "tiny"}
    whole |= {f"{architecture}.{key}": value for key, value in (common_keys(case, model) | dict(keys or {})).items()}
    for key, value in (whole | dict(general or {})).items():
        add_key(writer, key, value)
    for name, value in (tensors_of(architecture, model) | dict(tensors or {})).items():
        if value is not None and keep(name):
            writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a key by the type of its value; None adds nothing, a pair names the type."""
    if value is None:
        return
    if isinstance(value, tuple):
        getattr(writer, f"add_{value[0]}")(key, value[1])
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tensors_of(architecture: str, model: PreTrainedModel) -> dict[str, Array]:
    """The tensors that llama.cpp's converter writes of a model, by name."""
    case = CASES[architecture]
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = int(getattr(model.config, case.names.get("num_hidden_layers", "num_hidden_layers")))
    table = gguf.get_tensor_name_map(kind, layers)
    tied = bool(model.config.tie_word_embeddings)
    tensors: dict[str, Array] = {}
    for name, value in model.state_dict().items():
        if (tied and name == "lm_head.weight") or name.endswith((".attn.bias", "inv_freq", "embed_scale")):
            continue
        array = value.float().numpy()
        for renamed, part in case.rename(name, array, model.config) if case.rename else [(name, array)]:
            final = table.get_name(renamed, try_suffixes=(".weight", ".bias")) or renamed
            assert final.startswith(("blk.", "token", "output", "position", "per_layer")), (name, final)
            tensors[final] = part
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = np.array([1.0] * 6 + [1e30] * 6, np.float32)
    return tensors


def interleaved(weight: Array, heads: int) -> Array:
    """The order of rows for llama.cpp's rotation of neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _llama(name: str, value: Array, config: Any) -> Tensors:
    if ".q_proj." in name:
        value = interleaved(value, config.num_attention_heads)
    elif ".k_proj." in name:
        value = interleaved(value, config.num_key_value_heads)
    yield name, value


def _plus_one(name: str, value: Array, config: Any) -> Tensors:
    yield name, value + 1 if "norm" in name and name.endswith(".weight") else value


def _experts(name: str, value: Array, config: Any) -> Tensors:
    """Gate and up of all experts apart."""
    if name.endswith("experts.gate_up_proj"):
        block = name.split(".")[2]
        gate, up = np.split(value, 2, axis=1)
        yield f"blk.{block}.ffn_gate_exps.weight", gate
        yield f"blk.{block}.ffn_up_exps.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", value
    elif name.endswith("e_score_correction_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", value.reshape(-1)
    elif name.endswith("shared_expert_gate.weight"):
        yield name, value[0]
    else:
        yield name, value


def _mixtral(name: str, value: Array, config: Any) -> Tensors:
    for renamed, part in _experts(name, value, config):
        yield from _llama(renamed, part, config)


def _falcon(name: str, value: Array, config: Any) -> Tensors:
    if "query_key_value" in name:
        kv = config.num_kv_heads if config.new_decoder_architecture else 1
        size = config.hidden_size // config.num_attention_heads
        groups = value.reshape(kv, config.num_attention_heads // kv + 2, size, -1)
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        value = np.concatenate([part.reshape(-1, value.shape[-1]) for part in parts])
    yield name, value


def _bloom(name: str, value: Array, config: Any) -> Tensors:
    if "query_key_value" in name:
        parts = value.reshape(config.n_head, 3, config.hidden_size // config.n_head, -1)
        value = parts.swapaxes(0, 1).reshape(value.shape)
    yield name.removeprefix("transformer."), value


def _gpt2(name: str, value: Array, config: Any) -> Tensors:
    yield (
        name,
        value.T if value.ndim > 1 and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else value,
    )


def _gpt_oss(name: str, value: Array, config: Any) -> Tensors:
    block = name.split(".")[2] if ".layers." in name else ""
    if ".experts.gate_up_proj" in name:
        suffix = "bias" if name.endswith("_bias") else "weight"
        for part, kind in ((value[..., ::2], "gate"), (value[..., 1::2], "up")):
            yield f"blk.{block}.ffn_{kind}_exps.{suffix}", part if suffix == "bias" else part.swapaxes(1, 2)
    elif name.endswith("experts.down_proj"):
        yield f"blk.{block}.ffn_down_exps.weight", value.swapaxes(1, 2)
    elif name.endswith("experts.down_proj_bias"):
        yield f"blk.{block}.ffn_down_exps.bias", value
    elif name.endswith("self_attn.sinks"):
        yield f"blk.{block}.attn_sinks.weight", value
    else:
        yield name, value


def _block(name: str) -> str:
    return name.split(".")[2]


def _seed_oss(name: str, value: Array, config: Any) -> Tensors:
    if name.endswith("post_attention_layernorm.weight"):
        name = f"blk.{_block(name)}.post_attention_norm.weight"
    yield name, value


def _glm4(name: str, value: Array, config: Any) -> Tensors:
    names = {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    }
    part = name.split(".")[-2]
    yield f"blk.{_block(name)}.{names[part]}.weight" if part in names else name, value


def _glm4_moe(name: str, value: Array, config: Any) -> Tensors:
    for renamed, part in _seed_oss(name, value, config):
        yield from _experts(renamed, part, config)


def _granite_moe(name: str, value: Array, config: Any) -> Tensors:
    if name.endswith("router.weight"):
        yield f"blk.{_block(name)}.ffn_gate_inp.weight", value
    elif name.endswith("shared_mlp.input_linear.weight"):
        for part, kind in zip(np.split(value, 2), ("gate", "up"), strict=True):
            yield f"blk.{_block(name)}.ffn_{kind}_shexp.weight", part
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{_block(name)}.ffn_down_shexp.weight", value
    else:
        yield from _mixtral(name, value, config)


def _hunyuan_moe(name: str, value: Array, config: Any) -> Tensors:
    if name.endswith("gate.wg.weight"):
        name = f"blk.{_block(name)}.ffn_gate_inp.weight"
    yield from _experts(name, value, config)


def _gemma4(name: str, value: Array, config: Any) -> Tensors:
    places = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "router.proj.weight": "ffn_gate_inp.weight",
    }
    for end, place in places.items():
        if name.endswith(end):
            yield f"blk.{_block(name)}.{place}", value
            return
    yield from _experts(name, value, config)


def _state(name: str, value: Array, config: Any) -> Tensors:
    """Tensors of recurrent layers of Mamba and Mamba-2: A for its logarithm, and shapes that ggml broadcasts."""
    if name.endswith(".A_log"):
        value = -np.exp(value)
    if name.endswith((".A_log", ".D")) and config.model_type not in ("mamba", "falcon_mamba", "jamba"):
        value = value.reshape(-1, 1)
    elif name.endswith(".dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        value = value[:, 0]
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        value = value.reshape(config.n_groups if hasattr(config, "n_groups") else config.mamba_n_groups, -1)
    yield name, value


def _nemotron_h(name: str, value: Array, config: Any) -> Tensors:
    if ".experts." in name:
        kind = "up" if "up_proj" in name else "down"
        yield f"blk.{_block(name)}.ffn_{kind}_exps.weight", value
        return
    for renamed, part in _state(name, value, config):
        for final, whole in _experts(renamed, part, config):
            yield final.replace("model.", "backbone.", 1), whole


def _jamba(name: str, value: Array, config: Any) -> Tensors:
    for renamed, part in _state(name, value, config):
        yield from _experts(renamed, part, config)


def _kimi_linear(name: str, value: Array, config: Any) -> Tensors:
    """Tensors of Kimi Linear: a convolution for each of queries, keys and values, and keys and values apart."""
    block, name = _block(name) if ".layers." in name else "", name.replace("forget_gate.", "")
    if name.endswith(".conv1d.weight"):
        for part, kind in zip(np.split(value, 3), "qkv", strict=True):
            yield f"blk.{block}.ssm_conv1d_{kind}.weight", part[None]
    elif name.endswith("kv_b_proj.weight"):
        heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        yield f"blk.{block}.attn_k_b.weight", heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
        yield f"blk.{block}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif name.endswith(".A_log"):
        yield f"blk.{block}.ssm_a", -np.exp(value)
    elif name.endswith(".dt_bias"):
        yield f"blk.{block}.ssm_dt.bias", value
    else:
        yield from _experts(name, value, config)


def _granite_hybrid(name: str, value: Array, config: Any) -> Tensors:
    if "shared_mlp" in name and not config.num_local_experts:
        parts = zip(np.split(value, 2), ("gate", "up"), strict=True) if "input" in name else [(value, "down")]
        yield from ((f"blk.{_block(name)}.ffn_{kind}.weight", part) for part, kind in parts)
    elif ".mamba." in name:
        yield from _state(name, value, config)
    else:
        yield from _granite_moe(name, value, config)


def _falcon_h1(name: str, value: Array, config: Any) -> Tensors:
    if name.endswith("pre_ff_layernorm.weight"):
        name = f"blk.{_block(name)}.ffn_norm"  # which has no suffix
    yield from _state(name, value, config)


def _lfm2(name: str, value: Array, config: Any) -> Tensors:
    if name.endswith("expert_bias"):
        name = f"blk.{_block(name)}.exp_probs_b.bias"
    yield from _experts(name, value[:, 0] if ".conv.conv." in name else value, config)


def _delta(name: str, value: Array, config: Any) -> Tensors:
    """Tensors of layers with the gated delta rule, in the order of Qwen3-Next's files."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    if name.endswith("in_proj_qkvz.weight"):
        heads = value.reshape(keys, 2 * size + 2 * values, -1)
        ends = np.cumsum([0, size, size, values, values])
        q, k, v, z = (heads[:, a:b].reshape(-1, value.shape[1]) for a, b in pairwise(ends))
        yield f"blk.{_block(name)}.attn_qkv.weight", np.concatenate([q, k, v])
        yield f"blk.{_block(name)}.attn_gate.weight", z
        return
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    elif name.endswith(".A_log"):
        value = -np.exp(value)
    elif name.endswith(".dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        value = value[:, 0]
    yield from _experts(name, value, config)


def _tiled_delta(name: str, value: Array, config: Any) -> Tensors:
    """Tensors of such layers in the order of Qwen3.5's files: the first value head of each key, then the second."""
    keys, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    order = np.arange(heads).reshape(keys, -1).T.reshape(-1)
    rows = (order[:, None] * width + np.arange(width)).reshape(-1)
    if ".in_proj_qkv." in name or ".conv1d." in name:
        first = 2 * keys * config.linear_key_head_dim
        value = np.concatenate([value[:first], value[first:][rows]])
    elif ".in_proj_z." in name:
        value = value[rows]
    elif name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        value = value[order]
    elif ".linear_attn.out_proj." in name:
        value = value[:, rows]
    yield from _delta(name, value, config)


_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000000.0},
    },
}
_GEMMA4_KEYS = {
    "attention.sliding_window": 8,
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count": 24,
    "rope.dimension_count_swa": 16,
    "embedding_length_per_layer_input": 16,
}
_GRANITE = {"logit_scale": 4.0, "residual_scale": 0.5, "embedding_scale": 3.0, "attention.scale": 0.2}
_ROUTED = {
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
_MOE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

_MAMBA2_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
_NO_HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), None)
_NO_HEADS_KEYS = {
    "attention.head_count": 0,
    "feed_forward_length": 0,
    **dict.fromkeys(("attention.head_count_kv", "attention.key_length", "attention.value_length"), None),
}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **_LINEAR_FIRST,
    "rms_norm_eps": 1e-6,  # llama.cpp has this in the norms of queries and keys too, where the class has 1e-6
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_DELTA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 192,
    "attention.recurrent_layers": [True, False],
    "full_attention_interval": 2,
}
_DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_SECTIONS = {"rope.dimension_sections": [1, 1, 0, 0]}
_LFM2 = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
_LFM2_KEYS = {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}

CASES: dict[str, Case] = {
    "llama": Case("llama", {"head_dim": 16}, rename=_llama),
    "deci": Case("llama", {"head_dim": 16}, rename=_llama),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", {"head_dim": 24}),
    "qwen2moe": Case(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        _MOE | {"expert_shared_feed_forward_length": 48},
        _experts,
    ),
    "qwen3moe": Case(
        "qwen3_moe",
        {
            "head_dim": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        _MOE,
        _experts,
    ),
    "gemma": Case("gemma", {"head_dim": 24, "num_key_value_heads": 1}, rename=_plus_one),
    "gemma2": Case(
        "gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 24, **_WINDOWED},
        {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _plus_one,
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 8,
        },
        {"attention.sliding_window": 8},
        _plus_one,
    ),
    "gemma4": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        {
            **_GEMMA4_KEYS,
            "attention.sliding_window_pattern": [True, False, True, False],
            "attention.shared_kv_layers": 2,
            "feed_forward_length": [96, 96, 192, 192],
        },
        _gemma4,
    ),
    "falcon": Case(
        "falcon",
        {"num_key_value_heads": None, "num_kv_heads": 1, "intermediate_size": None, "ffn_hidden_size": 256},
        {"attention.head_count_kv": 1},
        _falcon,
        ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    ),
    "phi3": Case("phi3"),
    "bloom": Case(
        "bloom",
        {
            "n_layer": 2,
            "n_head": 4,
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), None),
            **dict.fromkeys(("intermediate_size", "max_position_embeddings"), None),
        },
        rename=_bloom,
        epsilon=("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    ),
    "stablelm": Case("stablelm", epsilon=("layer_norm_eps", "attention.layer_norm_epsilon")),
    "gpt2": Case(
        "gpt2",
        {_GPT2_NAMES[key]: SIZES[key] for key in _GPT2_NAMES}
        | dict.fromkeys((*_GPT2_NAMES, "num_key_value_heads"), None),
        rename=_gpt2,
        epsilon=("layer_norm_epsilon", "attention.layer_norm_epsilon"),
        names=_GPT2_NAMES,
    ),
    "starcoder2": Case("starcoder2", epsilon=("norm_epsilon", "attention.layer_norm_epsilon")),
    "nemotron": Case(
        "nemotron",
        {"head_dim": 16},
        rename=_plus_one,
        epsilon=("norm_eps", "attention.layer_norm_epsilon"),
    ),
    "minimax-m2": Case(
        "minimax_m2",
        {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        _MOE | {"expert_gating_func": 2},
        _experts,
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
            **_WINDOWED,
        },
        _MOE | {"attention.sliding_window": 8},
        _gpt_oss,
    ),
    "exaone": Case("llama", {"head_dim": 24}),
    "internlm2": Case("llama", {"head_dim": 16}, rename=_llama),
    "arcee": Case("arcee", {"head_dim": 16}, rename=_llama),
    "mistral3": Case(
        "ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 256,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        _llama,
    ),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4}, rename=_llama),
    "seed_oss": Case("seed_oss", {"head_dim": 24}, rename=_seed_oss),
    "granite": Case(
        "granite",
        {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
        _GRANITE,
        _llama,
    ),
    "granitemoe": Case(
        "granitemoeshared",
        {
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
        _GRANITE | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 48},
        _granite_moe,
    ),
    "ernie4_5": Case("ernie4_5", {"head_dim": 24}),
    "ernie4_5-moe": Case(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_end_index": 1},
        _MOE
        | {
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 2,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
        },
        _experts,
    ),
    "glm4": Case("glm4", {"head_dim": 24}, rename=_glm4),
    "glm4moe": Case(
        "glm4_moe",
        {
            "head_dim": 24,
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
        },
        _MOE | _ROUTED,
        _glm4_moe,
    ),
    "dots1": Case(
        "dots1",
        {
            "head_dim": 16,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "layer_types": ["full_attention"] * 2,
            "sliding_window": None,
        },
        _MOE | _ROUTED,
        _experts,
    ),
    "exaone4": Case(
        "exaone4",
        {"head_dim": 16, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    ),
    "olmo": Case(
        "olmo",
        {"clip_qkv": 0.5},
        {"attention.clamp_kqv": 0.5, "attention.layer_norm_epsilon": 1e-5},
        _llama,
        ("rms_norm_eps", "attention.layer_norm_epsilon"),
    ),
    "olmo2": Case("olmo2"),
    "olmoe": Case(
        "olmoe",
        {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
        _MOE | {"expert_feed_forward_length": None},
        _experts,
    ),
    "minicpm3": Case(
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
            "v_head_dim": 12,
            "rms_norm_eps": 1e-5,
        },
        {
            "attention.q_lora_rank": 24,
            "attention.kv_lora_rank": 16,
            "attention.key_length": 24,
            "attention.value_length": 12,
            "rope.dimension_count": 16,
        },
    ),
    "hunyuan-dense": Case("hunyuan_v1_dense", {"head_dim": 24}),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        {"head_dim": 24, "num_experts": 4, "moe_topk": 2},
        _MOE | {"expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96},
        _hunyuan_moe,
    ),
    "command-r": Case(
        "cohere",
        {"logit_scale": 0.25},
        {"logit_scale": 0.25},
        epsilon=("layer_norm_eps", "attention.layer_norm_epsilon"),
    ),
    "cohere2": Case(
        "cohere2",
        {
            "logit_scale": 0.25,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 8,
        },
        {"logit_scale": 0.25, "attention.sliding_window": 8},
        epsilon=("layer_norm_eps", "attention.layer_norm_epsilon"),
    ),
    "phi2": Case("phi", epsilon=("layer_norm_eps", "attention.layer_norm_epsilon")),
    "qwen35": Case("qwen3_5_text", _DELTA, _DELTA_KEYS | _SECTIONS, _tiled_delta),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        {**_DELTA, **_DELTA_EXPERTS, "intermediate_size": None},
        _DELTA_KEYS | _SECTIONS | _MOE | {"expert_shared_feed_forward_length": 48},
        _tiled_delta,
    ),
    "qwen3next": Case(
        "qwen3_next",
        {**_DELTA, **_DELTA_EXPERTS, "norm_topk_prob": True},
        _DELTA_KEYS | _MOE | {"expert_shared_feed_forward_length": 48},
        _delta,
    ),
    "lfm2": Case(
        "lfm2",
        {**_LFM2, "block_auto_adjust_ff_dim": False},
        _LFM2_KEYS,
        _lfm2,
        ("norm_eps", "attention.layer_norm_rms_epsilon"),
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        {
            **_LFM2,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_expert_bias": True,
        },
        _LFM2_KEYS | _MOE | {"leading_dense_block_count": 1, "expert_gating_func": 2},
        _lfm2,
        ("norm_eps", "attention.layer_norm_rms_epsilon"),
    ),
    "granitehybrid": Case(
        "granitemoehybrid",
        {
            **_LINEAR_FIRST,
            **_MAMBA2,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
        {
            **_GRANITE,
            **_MAMBA2_KEYS,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 48,
            "attention.head_count_kv": [0, 2],
            "rope.scaling.finetuned": False,
        },
        _granite_hybrid,
    ),
    "falcon-h1": Case(
        "falcon_h1",
        {**_MAMBA2, "head_dim": 16, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        _MAMBA2_KEYS,
        _falcon_h1,
    ),
    "nemotron_h": Case(
        "nemotron_h",
        {
            "head_dim": 16,
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "n_groups": 2,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
        },
        {**_MAMBA2_KEYS, "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 96, 0, 0]},
        _nemotron_h,
        ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    ),
    "nemotron_h_moe": Case(
        "nemotron_h",
        {
            "head_dim": 16,
            "num_hidden_layers": None,
            "intermediate_size": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_groups": 2,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 24,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        {
            **_MAMBA2_KEYS,
            **_MOE,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 32, 0, 32],
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 48,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_group_count": 1,
            "moe_latent_size": 24,
        },
        _nemotron_h,
        ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    ),
    "jamba": Case(
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_dt_rank": 8,
        },
        {
            "attention.head_count_kv": [0, 2, 0, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.inner_size": 128,
            "ssm.time_step_rank": 8,
            "expert_count": 4,
            "expert_used_count": 2,
        },
        _jamba,
    ),
    "kimi-linear": Case(
        "kimi_linear",
        {
            "rms_norm_eps": 1e-6,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 24,
            "v_head_dim": 20,
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
        },
        {
            **_MOE,
            "attention.head_count_kv": [0, 1],
            "attention.key_length": 24,
            "attention.key_length_mla": 32,
            "attention.value_length": None,
            "attention.value_length_mla": 20,
            "attention.kv_lora_rank": 16,
            "rope.dimension_count": 8,
            "kda.head_dim": 32,
            "ssm.conv_kernel": 4,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
        },
        _kimi_linear,
    ),
    "mamba": Case(
        "mamba",
        {**_NO_HEADS, "state_size": 16, "time_step_rank": 8},
        {
            **_NO_HEADS_KEYS,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.inner_size": 128,
            "ssm.time_step_rank": 8,
            "ssm.dt_b_c_rms": False,
        },
        _state,
        ("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    ),
    "mamba2": Case(
        "mamba2",
        {**_NO_HEADS, "state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2},
        _NO_HEADS_KEYS | _MAMBA2_KEYS,
        _state,
        ("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    ),
}
"""A tiny model of each architecture that the reader knows."""
