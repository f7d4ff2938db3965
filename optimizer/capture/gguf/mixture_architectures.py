"""The architectures of mixtures of experts: their keys, their tensors and their classes of transformers."""

from __future__ import annotations

from collections.abc import Mapping

from .architecture import (
    ATTENTION,
    ATTENTION_APART,
    DENSE,
    FULL,
    HEAD_NORMS,
    HUNYUAN_NORMS,
    NORMS,
    TOP,
    WITHOUT_WINDOW,
    Architecture,
    Reading,
    check_swa_base,
    experts,
    read_window,
    shared_expert,
)
from .dense_architectures import read_granite
from .tensors import Place, experts_transposed, row_matrix


def _read_routing(r: Reading) -> None:
    """Reads the routing of DeepSeek-V3 and similar models: sigmoids with biases, in groups, after some dense layers."""
    gating = r.keys.integer("expert_gating_func", 0)
    if gating != 2 and not (gating == 0 and r.model_type == "glm4_moe"):
        raise r.keys.refusal("expert_gating_func", f"is {gating}")
    groups = r.keys.integer("expert_group_count", 0) or 1
    r.fields |= {
        "n_shared_experts": r.keys.integer("expert_shared_count"),
        "first_k_dense_replace": r.keys.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": r.keys.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": r.keys.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": r.keys.integer("expert_group_used_count", 0) or 1,
    }
    if groups > 1 and r.fields["n_routed_experts"] % groups:
        raise r.keys.refusal("expert_group_count", f"is {groups}")


def read_shared_width(r: Reading) -> None:
    """Reads the width of the expert that all tokens use. If the key is missing, it is the width of a dense layer."""
    default = r.fields["intermediate_size"]
    r.fields["shared_expert_intermediate_size"] = (
        r.keys.integer("expert_shared_feed_forward_length", default) or default
    )


def _read_minimax_m2(r: Reading) -> None:
    width = r.keys.same_for_all("expert_feed_forward_length", r.blocks)
    if width != r.fields["intermediate_size"]:
        raise r.keys.refusal("expert_feed_forward_length", f"is {width}, and feed_forward_length another")
    if (gating := r.keys.integer("expert_gating_func", 0)) != 2:
        raise r.keys.refusal("expert_gating_func", f"is {gating}")


def _read_gpt_oss(r: Reading) -> None:
    r.fields["intermediate_size"] = r.keys.same_for_all("expert_feed_forward_length", r.blocks)
    r.fields["layer_types"] = read_window(r, default=0, period=2)
    check_swa_base(r)


def _read_granite_moe(r: Reading) -> None:
    read_granite(r)
    if shared := r.keys.integer("expert_shared_feed_forward_length", 0):
        r.model_type = "granitemoeshared"
        r.fields["shared_intermediate_size"] = shared
        r.tensors |= {
            "ffn_gate_shexp": Place("shared_mlp.input_linear", None, 0, 0),
            "ffn_up_shexp": Place("shared_mlp.input_linear", None, 1, 0),
            "ffn_down_shexp": Place("shared_mlp.output_linear"),
        }


def _read_ernie_moe(r: Reading) -> None:
    width = r.fields["moe_intermediate_size"]
    shared = r.keys.integer("expert_shared_feed_forward_length", 0)
    if not width or shared % width:
        raise r.keys.refusal("expert_shared_feed_forward_length", f"is {shared}, for experts of {width}")
    if (step := r.keys.integer("interleave_moe_layer_step")) != 1:
        raise r.keys.refusal("interleave_moe_layer_step", f"is {step}")
    count = shared // width
    if r.keys.integer("expert_shared_count", count) != count:
        raise r.keys.refusal("expert_shared_count", f"isn't {count}, as their width says")
    r.fields |= {
        "moe_num_shared_experts": count,
        "moe_layer_start_index": r.keys.integer("leading_dense_block_count", 0),
        "moe_layer_end_index": r.layers - 1,
        "moe_layer_interval": 1,
    }


def _read_dots1(r: Reading) -> None:
    _read_routing(r)
    r.fields["layer_types"] = [FULL] * r.layers


def _read_hunyuan_moe(r: Reading) -> None:
    width = r.fields["intermediate_size"]
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if (r.keys.same_for_all(name, r.blocks, width) or width) != width:
            raise r.keys.refusal(name, "differs from feed_forward_length")


_ROUTED_PLACES = {
    **DENSE,
    **HEAD_NORMS,
    **experts("mlp", "gate"),
    **shared_expert("mlp.shared_experts"),
    "exp_probs_b.bias": Place("mlp.gate.e_score_correction_bias", whole=True),
}
_ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        {
            **TOP,
            **ATTENTION,
            **NORMS,
            **experts("mlp", "gate"),
            **shared_expert("mlp.shared_expert"),
            "ffn_gate_inp_shexp": Place("mlp.shared_expert_gate", row_matrix),
        },
        fixed={**WITHOUT_WINDOW, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        free_heads=False,
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        read=read_shared_width,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**TOP, **ATTENTION, **NORMS, **HEAD_NORMS, **experts("mlp", "gate")},
        fixed={**WITHOUT_WINDOW, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        experts=("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {
            **TOP,
            **ATTENTION,
            **NORMS,
            **HEAD_NORMS,
            **experts("mlp", "gate"),
            "exp_probs_b.bias": Place("mlp.e_score_correction_bias", whole=True),
        },
        partial=True,
        experts=("num_local_experts", "num_experts_per_tok"),
        read=_read_minimax_m2,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **TOP,
            **ATTENTION,
            "attn_norm": Place("input_layernorm"),
            "post_attention_norm": Place("post_attention_layernorm"),
            "attn_sinks.weight": Place("self_attn.sinks", whole=True),
            "ffn_gate_inp": Place("mlp.router"),
            "ffn_gate_exps.weight": Place("mlp.experts.gate_up_proj", experts_transposed, 0, -1, whole=True),
            "ffn_up_exps.weight": Place("mlp.experts.gate_up_proj", experts_transposed, 1, -1, whole=True),
            "ffn_down_exps.weight": Place("mlp.experts.down_proj", experts_transposed, whole=True),
            "ffn_gate_exps.bias": Place("mlp.experts.gate_up_proj_bias", None, 0, -1, whole=True),
            "ffn_up_exps.bias": Place("mlp.experts.gate_up_proj_bias", None, 1, -1, whole=True),
            "ffn_down_exps.bias": Place("mlp.experts.down_proj_bias", whole=True),
        },
        experts=("num_local_experts", "num_experts_per_tok"),
        read=_read_gpt_oss,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        {**TOP, **ATTENTION_APART, **NORMS, **experts("block_sparse_moe", "router")},
        free_heads=False,
        experts=("num_local_experts", "num_experts_per_tok"),
        read=_read_granite_moe,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **DENSE,
            **experts("mlp", "gate"),
            **shared_expert("mlp.shared_experts"),
            "exp_probs_b.bias": Place("mlp.gate.moe_statics.e_score_correction_bias", row_matrix, whole=True),
        },
        free_heads=False,
        experts=("moe_num_experts", "moe_k", "moe_intermediate_size"),
        read=_read_ernie_moe,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {**_ROUTED_PLACES, "post_attention_norm": Place("post_attention_layernorm")},
        partial=True,
        drafts=True,
        tensor_flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        experts=_ROUTED,
        read=_read_routing,
    ),
    "dots1": Architecture(
        "dots1",
        _ROUTED_PLACES,
        fixed={"sliding_window": None, "attention_bias": False},
        experts=_ROUTED,
        read=_read_dots1,
    ),
    "olmoe": Architecture(
        "olmoe",
        {**TOP, **ATTENTION, **NORMS, **HEAD_NORMS, **experts("mlp", "gate")},
        fixed={"norm_topk_prob": False, "clip_qkv": None},
        free_heads=False,
        experts=("num_experts", "num_experts_per_tok"),
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {
            **TOP,
            **ATTENTION,
            **NORMS,
            **HUNYUAN_NORMS,
            **experts("mlp", "gate.wg"),
            **shared_expert("mlp.shared_mlp"),
        },
        experts=("num_experts", "moe_topk"),
        read=_read_hunyuan_moe,
    ),
}
