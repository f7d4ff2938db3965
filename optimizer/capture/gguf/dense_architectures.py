"""The dense architectures with RMS norms, such as Llama: their keys, their tensors, their classes of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .architecture import (
    ATTENTION,
    ATTENTION_APART,
    DENSE,
    DENSE_APART,
    FULL,
    HEAD_NORMS,
    HUNYUAN_NORMS,
    MLP,
    NORMS,
    SLIDING,
    TOP,
    WITHOUT_WINDOW,
    Architecture,
    Reading,
    check_swa_base,
    experts,
    read_experts,
    read_factors,
    read_swa_base,
    read_window,
)
from .keys import RMS
from .rope import Rope
from .tensors import Place


def _read_llama(r: Reading) -> None:
    if r.keys.integer("expert_count", 0):
        r.model_type = "mixtral"
        read_experts(r, "num_local_experts", "num_experts_per_tok")
        r.fields["sliding_window"] = None
        r.tensors |= experts("mlp", "gate")


def _read_phi3(r: Reading) -> None:
    # llama.cpp reads the window and doesn't apply it: https://github.com/ggml-org/llama.cpp/pull/13676
    r.keys.integer("attention.sliding_window", 0)
    r.fields["sliding_window"] = None
    context = r.fields["max_position_embeddings"]
    original = r.keys.integer("rope.scaling.original_context_length", context) or context
    r.fields["original_max_position_embeddings"] = original
    read_factors(r)


def _read_mistral3(r: Reading) -> None:
    r.fields["sliding_window"] = None
    scale = r.keys.number("attention.temperature_scale", 0.0)
    context = r.fields["max_position_embeddings"]
    original = r.keys.integer("rope.scaling.original_context_length", context) or context
    r.fields["rope_parameters"] |= {
        "llama_4_scaling_beta": scale,
        "original_max_position_embeddings": original,
        "max_position_embeddings": context,
    }


def _read_smollm3(r: Reading) -> None:
    r.fields["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(r.layers)]


def read_granite_scales(r: Reading) -> None:
    """Reads the four factors of Granite models: of embeddings, scores, residuals and logits."""
    r.fields |= {
        "logits_scaling": r.keys.number("logit_scale"),
        "residual_multiplier": r.keys.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": r.keys.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": r.keys.number("attention.scale", 0.0) or r.head_dim**-0.5,
    }
    if not r.fields["logits_scaling"]:
        raise r.keys.refusal("logit_scale", "is 0")


def read_granite(r: Reading) -> None:
    """Reads the keys of Granite models. Raises UnsupportedModelError for one without rotary embeddings."""
    read_granite_scales(r)
    if not r.keys.flag("rope.scaling.finetuned", True):
        raise r.keys.refusal("rope.scaling.finetuned", "is false: a model without rotary embeddings")


def _read_exaone4(r: Reading) -> None:
    if r.layers == 64:
        r.fields["layer_types"] = read_window(r, default=4096, period=4)
        check_swa_base(r)
        return
    r.keys.integer("attention.sliding_window", 0)  # read, and not applied
    r.fields |= {"layer_types": [FULL] * r.layers, "sliding_window": None, "sliding_window_pattern": None}


def _read_olmo2(r: Reading) -> None:
    kinds = read_window(r, default=None, period=4)
    if kinds is None:
        return
    r.model_type = "olmo3"
    r.fields["layer_types"] = kinds
    rope = r.ropes.pop(None)
    # Layers with a window are rotated without scaling, but with YaRN's factor of cosines and sines left out as well.
    r.ropes[FULL], r.ropes[SLIDING] = rope, Rope(read_swa_base(r, rope.theta))


def check_latent_epsilon(r: Reading) -> None:
    """Raises UnsupportedModelError for an epsilon far from 1e-6.

    The classes always use 1e-6 in the norms of latent vectors.
    """
    if r.fields["rms_norm_eps"] > 1.001e-5:
        raise r.keys.refusal(RMS, f"is {r.fields['rms_norm_eps']}")


def _read_minicpm3(r: Reading) -> None:
    width = r.fields["rope_width"]
    check_latent_epsilon(r)
    r.fields |= {
        "q_lora_rank": r.keys.integer("attention.q_lora_rank"),
        "kv_lora_rank": r.keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": width,
        "qk_nope_head_dim": r.head_dim - width,
        "v_head_dim": r.keys.integer("attention.value_length"),
        "head_dim": width,
    }
    del r.fields["rope_width"]
    read_factors(r)


def _read_hunyuan(r: Reading) -> None:
    alpha = r.keys.number("rope.scaling.alpha", 0.0)
    if alpha > 0:
        rope = r.ropes[None]
        r.ropes[None] = replace(rope, theta=rope.theta * alpha ** (r.head_dim / (r.head_dim - 2)))
        r.fields["rope_parameters"]["rope_theta"] = r.ropes[None].theta


_NORMS_AFTER = {
    **TOP,
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    "post_attention_norm": Place("post_attention_layernorm"),
    "post_ffw_norm": Place("post_feedforward_layernorm"),
}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}
_LLAMA = Architecture("llama", DENSE_APART, tensor_flags=_BIASES, read=_read_llama)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "deci": _LLAMA,
    "qwen2": Architecture("qwen2", DENSE, fixed=WITHOUT_WINDOW, free_heads=False),
    "qwen3": Architecture("qwen3", {**DENSE, **HEAD_NORMS}, fixed=WITHOUT_WINDOW),
    "phi3": Architecture(
        "phi3",
        {
            **TOP,
            **NORMS,
            "attn_qkv": Place("self_attn.qkv_proj"),
            "attn_q": Place("self_attn.qkv_proj", None, 0, 0),
            "attn_k": Place("self_attn.qkv_proj", None, 1, 0),
            "attn_v": Place("self_attn.qkv_proj", None, 2, 0),
            "attn_output": Place("self_attn.o_proj"),
            "ffn_up": Place("mlp.gate_up_proj"),
            "ffn_down": Place("mlp.down_proj"),
        },
        partial=True,
        free_heads=False,
        longrope=True,
        read=_read_phi3,
    ),
    "exaone": Architecture("llama", DENSE),
    "internlm2": Architecture("llama", DENSE_APART, tensor_flags={"attention_bias": "attn_q.bias"}),
    "arcee": Architecture(
        "arcee", {**TOP, **ATTENTION_APART, **NORMS, "ffn_up": MLP["ffn_up"], "ffn_down": MLP["ffn_down"]}
    ),
    "mistral3": Architecture("ministral3", DENSE_APART, reads_yarn=True, read=_read_mistral3),
    "smollm3": Architecture(
        "smollm3",
        DENSE_APART,
        fixed={**WITHOUT_WINDOW, "no_rope_layer_interval": 4},
        free_heads=False,
        tensor_flags=_BIASES,
        read=_read_smollm3,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        {**DENSE, "post_attention_norm": Place("post_attention_layernorm")},
        fixed={"mlp_bias": False},
        tensor_flags={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"},
    ),
    "granite": Architecture("granite", DENSE_APART, free_heads=False, read=read_granite),
    "ernie4_5": Architecture("ernie4_5", DENSE),
    "glm4": Architecture(
        "glm4",
        {
            **TOP,
            **ATTENTION,
            "attn_norm": Place("input_layernorm"),
            "post_attention_norm": Place("post_self_attn_layernorm"),
            "ffn_norm": Place("post_attention_layernorm"),
            "post_ffw_norm": Place("post_mlp_layernorm"),
            "ffn_up": Place("mlp.gate_up_proj"),
            "ffn_down": Place("mlp.down_proj"),
        },
        partial=True,
        drafts=True,
        tensor_flags={"attention_bias": "attn_q.bias"},
    ),
    "exaone4": Architecture(
        "exaone4",
        _NORMS_AFTER,
        read=_read_exaone4,
    ),
    "olmo2": Architecture(
        "olmo2",
        _NORMS_AFTER,
        free_heads=False,
        read=_read_olmo2,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        {
            **TOP,
            **NORMS,
            **MLP,
            "attn_q_a": Place("self_attn.q_a_proj"),
            "attn_q_a_norm": Place("self_attn.q_a_layernorm"),
            "attn_q_b": Place("self_attn.q_b_proj"),
            "attn_kv_a_mqa": Place("self_attn.kv_a_proj_with_mqa"),
            "attn_kv_a_norm": Place("self_attn.kv_a_layernorm"),
            "attn_kv_b": Place("self_attn.kv_b_proj"),
            "attn_output": Place("self_attn.o_proj"),
        },
        fixed={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        latent=True,
        longrope=True,
        read=_read_minicpm3,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", {**DENSE, **HUNYUAN_NORMS}, read=_read_hunyuan),
}
