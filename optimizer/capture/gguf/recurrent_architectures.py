"""The architectures with recurrent layers: their keys, their tensors and their classes of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .architecture import (
    ATTENTION,
    ATTENTION_APART,
    DENSE,
    FULL,
    MLP,
    NORMS,
    TOP,
    Architecture,
    Reading,
    experts,
    shared_expert,
)
from .dense_architectures import check_latent_epsilon, read_granite_scales
from .mixture_architectures import read_shared_width
from .tensors import (
    Place,
    experts_transposed,
    flat,
    head_axis,
    heads_together,
    less_one,
    middle_axis,
    row_matrix,
    value_heads_together,
)

LINEAR = "linear_attention"
SIGMOID = 2
"""The value of the key expert_gating_func that stands for sigmoids."""


def _part_of(r: Reading, key: str, of: str) -> int:
    """Returns the value of the key ``of`` divided by that of ``key``.

    Raises UnsupportedModelError naming ``of`` if it isn't whole.
    """
    divisor, whole = r.keys.integer(key), r.keys.integer(of)
    if not divisor or not whole or whole % divisor:
        raise r.keys.refusal(of, f"is {whole}, for {r.keys.file.architecture}.{key} of {divisor}")
    return whole // divisor


def _check_layers(r: Reading, key: str, kinds: Sequence[str], tensors: Mapping[str, str]) -> None:
    """Raises UnsupportedModelError, naming ``key``, if a layer's tensors contradict its kind.

    Args:
        r: the reading.
        key: the key from which the kinds of layers follow.
        kinds: the kind of each layer.
        tensors: kind -> a tensor that all layers of this kind have, and no others.
    """
    for layer, kind in enumerate(kinds):
        for other, tensor in tensors.items():
            if r.has(f"blk.{layer}.{tensor}") != (kind == other):
                presence = "is there" if kind != other else "is missing"
                raise r.keys.refusal(
                    key, f"makes layer {layer} one of {kind}, and tensor blk.{layer}.{tensor} {presence}"
                )


def _read_delta(r: Reading) -> None:
    """Reads the sizes of layers with the gated delta rule, and the kind of each layer."""
    recurrent = r.keys.flags_by_layer("attention.recurrent_layers", r.blocks)
    interval = r.keys.integer("full_attention_interval", 4)
    if recurrent is None:
        if not interval:
            raise r.keys.refusal("full_attention_interval", "is 0")
        recurrent = [(layer + 1) % interval != 0 for layer in range(r.layers)]
        key = "full_attention_interval"
    else:
        key = "attention.recurrent_layers"
    kinds = [LINEAR if flag else FULL for flag in recurrent[: r.layers]]
    _check_layers(r, key, kinds, {LINEAR: "ssm_a", FULL: "attn_k.weight"})
    keys, values = r.keys.integer("ssm.group_count"), r.keys.integer("ssm.time_step_rank")
    if not keys or values % keys:
        raise r.keys.refusal("ssm.time_step_rank", f"is {values}, for {keys} heads of keys")
    r.fields |= {
        "layer_types": kinds,
        "linear_conv_kernel_dim": r.keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": r.keys.integer("ssm.state_size"),
        "linear_value_head_dim": _part_of(r, "ssm.time_step_rank", "ssm.inner_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }


def _read_delta_mixture(r: Reading) -> None:
    _read_delta(r)
    read_shared_width(r)


def _read_mamba2_sizes(r: Reading, names: Mapping[str, str]) -> None:
    """Reads the sizes of Mamba-2 layers into the fields that ``names`` has by the part of the key after "ssm."."""
    groups = r.keys.integer("ssm.group_count")
    heads = r.keys.integer("ssm.time_step_rank")
    if not groups or heads % groups:
        raise r.keys.refusal("ssm.group_count", f"is {groups}, for {heads} heads")
    r.fields |= {
        names["conv_kernel"]: r.keys.integer("ssm.conv_kernel"),
        names["state_size"]: r.keys.integer("ssm.state_size"),
        names["group_count"]: groups,
        names["time_step_rank"]: heads,
        names["head_dim"]: _part_of(r, "ssm.time_step_rank", "ssm.inner_size"),
    }
    biases = [r.has(f"blk.{layer}.ssm_conv1d.bias") for layer in range(r.layers)]
    r.fields[names["bias"]] = any(biases)


def _read_expansion(r: Reading, field: str) -> None:
    hidden, inner = r.fields["hidden_size"], r.keys.integer("ssm.inner_size")
    if not hidden or not inner or inner % hidden:
        raise r.keys.refusal("ssm.inner_size", f"is {inner}, for a width of {hidden}")
    r.fields[field] = inner // hidden


_PREFIXED = {
    "conv_kernel": "mamba_d_conv",
    "state_size": "mamba_d_state",
    "group_count": "mamba_n_groups",
    "time_step_rank": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "bias": "mamba_conv_bias",
}


def _read_mamba2(r: Reading) -> None:
    names = {"time_step_rank": "num_heads", "group_count": "n_groups", "bias": "use_conv_bias"}
    _read_mamba2_sizes(r, {name: names.get(name, name) for name in _PREFIXED})
    _read_expansion(r, "expand")


def _read_mamba(r: Reading) -> None:
    if r.keys.flag("ssm.dt_b_c_rms", False):
        r.model_type = "falcon_mamba"
    r.fields |= {
        "conv_kernel": r.keys.integer("ssm.conv_kernel"),
        "state_size": r.keys.integer("ssm.state_size"),
        "time_step_rank": r.keys.integer("ssm.time_step_rank"),
    }
    _read_expansion(r, "expand")


def _read_falcon_h1(r: Reading) -> None:
    _read_mamba2_sizes(r, _PREFIXED)
    r.fields |= {
        "mamba_d_ssm": r.keys.integer("ssm.inner_size"),
        "mamba_rms_norm": r.has("blk.0.ssm_norm.weight"),
    }


def _kinds_by_heads(r: Reading, kind: str, tensor: str, attention: str = "attn_k.weight") -> list[str]:
    """Returns the kind of each layer: ``kind`` for layers without key/value heads, otherwise full attention.

    Args:
        r: the reading.
        kind: the name of the other kind.
        tensor: a tensor that only layers of ``kind`` have.
        attention: a tensor that only layers with attention have.
    """
    key = "attention.head_count_kv"
    heads = r.keys.by_layer(key, r.blocks, r.heads)[: r.layers]
    if len(set(heads) - {0}) > 1:
        raise r.keys.refusal(key, f"is {sorted(set(heads))}: layers that differ in it")
    kinds = [FULL if n else kind for n in heads]
    _check_layers(r, key, kinds, {kind: tensor, FULL: attention})
    return kinds


def _read_granite_hybrid(r: Reading) -> None:
    r.fields["layer_types"] = _kinds_by_heads(r, LINEAR, "ssm_in.weight")
    rotates = r.keys.flag("rope.scaling.finetuned", True)
    read_granite_scales(r)
    r.fields["position_embedding_type"] = "rope" if rotates else None
    _read_mamba2_sizes(r, _PREFIXED)
    _read_expansion(r, "mamba_expand")
    shared = r.keys.integer("expert_shared_feed_forward_length", 0)
    count = r.keys.integer("expert_count", 0)
    used = r.keys.same_for_all("expert_used_count", r.blocks, 0)
    if count and not 0 < used <= count:
        raise r.keys.refusal("expert_used_count", f"is {used}, of {count} experts")
    r.fields |= {"num_local_experts": count, "num_experts_per_tok": used}
    if count and not shared:
        raise r.keys.refusal("expert_shared_feed_forward_length", "is missing")
    r.fields["shared_intermediate_size"] = shared if count else r.fields["intermediate_size"]
    if count:
        r.tensors |= experts("block_sparse_moe", "router")
    suffix = "_shexp" if count else ""
    r.tensors |= {
        f"ffn_gate{suffix}": Place("shared_mlp.input_linear", None, 0, 0),
        f"ffn_up{suffix}": Place("shared_mlp.input_linear", None, 1, 0),
        f"ffn_down{suffix}": Place("shared_mlp.output_linear"),
    }


def _read_nemotron_h(r: Reading) -> None:
    _read_nemotron_layers(r, "mlp", "ffn_up.weight")


def _read_nemotron_h_moe(r: Reading) -> None:
    _read_nemotron_layers(r, "moe", "ffn_gate_inp.weight")
    if (gating := r.keys.integer("expert_gating_func", SIGMOID)) != SIGMOID:
        raise r.keys.refusal("expert_gating_func", f"is {gating}")
    r.fields |= {
        "n_shared_experts": r.keys.integer("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": r.keys.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": r.keys.integer("moe_latent_size", 0) or None,
        "norm_topk_prob": r.keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": r.keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def _read_nemotron_layers(r: Reading, kind: str, tensor: str) -> None:
    """Reads the kind of each layer of Nemotron-H.

    A layer with key/value heads is full attention. Of the others, one with a feed-forward width is of ``kind``, and one
    without is recurrent.

    Args:
        r: the reading.
        kind: the name of the kind of layers with a width.
        tensor: a tensor that only layers of ``kind`` have.
    """
    heads = r.keys.by_layer("attention.head_count_kv", r.blocks, r.heads)[: r.layers]
    widths = r.keys.by_layer("feed_forward_length", r.blocks)[: r.layers]
    kinds = [FULL if n else kind if width else LINEAR for n, width in zip(heads, widths, strict=True)]
    tensors = {LINEAR: "ssm_in.weight", FULL: "attn_k.weight", kind: tensor}
    _check_layers(r, "feed_forward_length", kinds, tensors)
    for key, values in (("attention.head_count_kv", heads), ("feed_forward_length", widths)):
        if len(set(values) - {0}) > 1:
            raise r.keys.refusal(key, f"is {sorted(set(values))}: layers that differ in it")
    del r.fields["num_hidden_layers"]
    r.fields["layers_block_type"] = kinds
    names = {
        "group_count": "n_groups",
        "time_step_rank": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "ssm_state_size",
        "bias": "use_conv_bias",
    }
    _read_mamba2_sizes(r, {name: names.get(name, name) for name in _PREFIXED})
    if r.keys.flag("rope.scaling.finetuned", False):
        raise r.keys.refusal("rope.scaling.finetuned", "is true: a model with rotary embeddings")


def _period(r: Reading, key: str, layers: Sequence[bool]) -> tuple[int, int]:
    """Returns the period and the offset of the layers that are True. Raises UnsupportedModelError naming ``key``."""
    first = [i for i, flag in enumerate(layers) if flag][:2]
    offset = first[0] if first else len(layers)
    period = first[1] - offset if len(first) > 1 else len(layers) + 1
    if [i % period == offset for i in range(len(layers))] != list(layers):
        raise r.keys.refusal(key, "differs between layers without a period")
    return period, offset


def _read_jamba(r: Reading) -> None:
    kinds = _kinds_by_heads(r, LINEAR, "ssm_in.weight")
    attends = _period(r, "attention.head_count_kv", [kind == FULL for kind in kinds])
    mixtures = [r.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(r.layers)]
    period = _period(r, "expert_count", mixtures)
    r.fields |= {
        "attn_layer_period": attends[0],
        "attn_layer_offset": attends[1],
        "expert_layer_period": period[0],
        "expert_layer_offset": period[1],
        "mamba_d_conv": r.keys.integer("ssm.conv_kernel"),
        "mamba_d_state": r.keys.integer("ssm.state_size"),
        "mamba_dt_rank": r.keys.integer("ssm.time_step_rank"),
    }
    _read_expansion(r, "mamba_expand")


def _read_kimi_linear(r: Reading) -> None:
    check_latent_epsilon(r)
    if (gating := r.keys.integer("expert_gating_func")) != SIGMOID:
        raise r.keys.refusal("expert_gating_func", f"is {gating}")
    rotated, latent = r.keys.integer("rope.dimension_count"), r.keys.integer("attention.kv_lora_rank")
    key = r.keys.integer("attention.key_length_mla")
    if r.head_dim != latent + rotated or key <= rotated:
        raise r.keys.refusal("attention.key_length", f"is {r.head_dim}, for {latent} and {rotated} of {key} columns")
    dense = r.keys.integer("leading_dense_block_count", 0)
    r.fields |= {
        "layer_types": _kinds_by_heads(r, LINEAR, "ssm_a", "attn_kv_a_mqa.weight"),
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(r.layers)],
        "num_key_value_heads": r.heads,
        "head_dim": rotated,
        "q_lora_rank": r.keys.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": r.keys.integer("attention.value_length_mla"),
        "linear_num_heads": r.heads,
        "linear_head_dim": r.keys.integer("kda.head_dim"),
        "linear_conv_kernel_dim": r.keys.integer("ssm.conv_kernel"),
        "num_shared_experts": r.keys.integer("expert_shared_count"),
        "routed_scaling_factor": r.keys.number("expert_weights_scale", 0.0) or 1.0,
    }
    if not r.keys.flag("expert_weights_norm", True):
        raise r.keys.refusal("expert_weights_norm", "is false")


def _read_lfm2(r: Reading) -> None:
    r.fields |= {
        "layer_types": _kinds_by_heads(r, "conv", "shortconv.conv.weight"),
        "conv_L_cache": r.keys.integer("shortconv.l_cache"),
    }


def _read_lfm2_mixture(r: Reading) -> None:
    _read_lfm2(r)
    r.fields["num_dense_layers"] = r.keys.integer("leading_dense_block_count", 0)
    if (gating := r.keys.integer("expert_gating_func")) != SIGMOID:
        raise r.keys.refusal("expert_gating_func", f"is {gating}")


def _mamba(module: str) -> dict[str, Place]:
    """Returns the places of a recurrent layer of Mamba and Mamba-2, in the module ``module`` of the layer."""
    return {
        "ssm_in": Place(f"{module}.in_proj"),
        "ssm_conv1d.weight": Place(f"{module}.conv1d.weight", middle_axis, whole=True),
        "ssm_conv1d.bias": Place(f"{module}.conv1d.bias", whole=True),
        "ssm_a": Place(f"{module}.A_log", whole=True, negated_exp=True),
        "ssm_d": Place(f"{module}.D", flat, whole=True),
        "ssm_out": Place(f"{module}.out_proj"),
    }


def _mamba2(module: str) -> dict[str, Place]:
    """Returns the places of a recurrent layer of Mamba-2, in the module ``module`` of the layer."""
    return {
        **_mamba(module),
        "ssm_a": Place(f"{module}.A_log", flat, whole=True, negated_exp=True),
        "ssm_dt.bias": Place(f"{module}.dt_bias", whole=True),
        "ssm_norm.weight": Place(f"{module}.norm.weight", flat, whole=True),
    }


_BACKBONE = {
    "token_embd": Place("=backbone.embeddings"),
    "output_norm": Place("=backbone.norm_f"),
    "output": Place("=lm_head"),
    "attn_norm": Place("norm"),
}
_LESS_ONE = {
    "output_norm": Place("=model.norm", less_one),
    "attn_norm": Place("input_layernorm", less_one),
    "post_attention_norm": Place("post_attention_layernorm", less_one),
    "attn_q_norm": Place("self_attn.q_norm", less_one),
    "attn_k_norm": Place("self_attn.k_norm", less_one),
}
_DELTA = {
    **TOP,
    **ATTENTION,
    **_LESS_ONE,
    "ssm_conv1d.weight": Place("linear_attn.conv1d.weight", middle_axis, whole=True),
    "ssm_dt.bias": Place("linear_attn.dt_bias", whole=True),
    "ssm_a": Place("linear_attn.A_log", whole=True, negated_exp=True),
    "ssm_norm": Place("linear_attn.norm"),
    "ssm_out": Place("linear_attn.out_proj"),
}
_DELTA_REORDERED = {
    **_DELTA,
    "attn_qkv": Place("linear_attn.in_proj_qkv", value_heads_together("linear_value_head_dim", tail=True)),
    "attn_gate": Place("linear_attn.in_proj_z", value_heads_together("linear_value_head_dim")),
    "ssm_beta": Place("linear_attn.in_proj_b", value_heads_together()),
    "ssm_alpha": Place("linear_attn.in_proj_a", value_heads_together()),
    "ssm_conv1d.weight": Place(
        "linear_attn.conv1d.weight",
        lambda weight, config: middle_axis(
            value_heads_together("linear_value_head_dim", tail=True)(weight, config), config
        ),
        whole=True,
    ),
    "ssm_dt.bias": Place("linear_attn.dt_bias", value_heads_together(), whole=True),
    "ssm_a": Place("linear_attn.A_log", value_heads_together(), whole=True, negated_exp=True),
    "ssm_out": Place("linear_attn.out_proj", value_heads_together("linear_value_head_dim", axis=1)),
}
_LFM2 = {
    **ATTENTION,
    "token_embd": TOP["token_embd"],
    "token_embd_norm": Place("=model.embedding_norm"),
    "output": TOP["output"],
    "attn_output": Place("self_attn.out_proj"),
    "attn_q_norm": Place("self_attn.q_layernorm"),
    "attn_k_norm": Place("self_attn.k_layernorm"),
    "attn_norm": Place("operator_norm"),
    "ffn_norm": Place("ffn_norm"),
    "ffn_gate": Place("feed_forward.w1"),
    "ffn_up": Place("feed_forward.w3"),
    "ffn_down": Place("feed_forward.w2"),
    "shortconv.conv": Place("conv.conv", middle_axis),
    "shortconv.in_proj": Place("conv.in_proj"),
    "shortconv.out_proj": Place("conv.out_proj"),
}
_DELTA_EXPERTS = {
    **experts("mlp", "gate"),
    **shared_expert("mlp.shared_expert"),
    "ffn_gate_inp_shexp": Place("mlp.shared_expert_gate", row_matrix),
}
_NEMOTRON = {
    "token_embd": Place("=model.embeddings"),
    "output_norm": Place("=model.norm_f"),
    "output": TOP["output"],
    "attn_norm": Place("norm"),
    **{name: Place(place.name.replace("self_attn", "mixer")) for name, place in ATTENTION.items()},
    **_mamba2("mixer"),
}
_KDA = {
    "ssm_conv1d_q": Place("self_attn.conv1d", middle_axis, 0, 0),
    "ssm_conv1d_k": Place("self_attn.conv1d", middle_axis, 1, 0),
    "ssm_conv1d_v": Place("self_attn.conv1d", middle_axis, 2, 0),
    "ssm_f_a": Place("self_attn.forget_gate.f_a_proj"),
    "ssm_f_b": Place("self_attn.forget_gate.f_b_proj"),
    "ssm_beta": Place("self_attn.b_proj"),
    "ssm_a": Place("self_attn.forget_gate.A_log", head_axis, whole=True, negated_exp=True),
    "ssm_dt.bias": Place("self_attn.forget_gate.dt_bias", whole=True),
    "ssm_g_a": Place("self_attn.g_a_proj"),
    "ssm_g_b": Place("self_attn.g_b_proj"),
    "ssm_norm": Place("self_attn.o_norm"),
}
_LATENT = {
    "attn_q_a": Place("self_attn.q_a_proj"),
    "attn_q_b": Place("self_attn.q_b_proj"),
    "attn_q_a_norm": Place("self_attn.q_a_layernorm"),
    "attn_kv_a_mqa": Place("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": Place("self_attn.kv_a_layernorm"),
    "attn_kv_b": Place("self_attn.kv_b_proj"),
    "attn_k_b": Place("self_attn.kv_b_proj", experts_transposed, 0, 1, flat=True),
    "attn_v_b": Place("self_attn.kv_b_proj", None, 1, 1, flat=True),
}
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_WITHOUT_HEADS = ("attention.head_count", "feed_forward_length")

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen35": Architecture(
        "qwen3_5_text",
        {**_DELTA_REORDERED, **MLP},
        partial=True,
        drafts=True,
        harmless=("rope.dimension_sections",),
        read=_read_delta,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**_DELTA_REORDERED, **_DELTA_EXPERTS},
        names={"intermediate_size": ""},
        partial=True,
        drafts=True,
        harmless=("rope.dimension_sections",),
        experts=_EXPERTS,
        read=_read_delta_mixture,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        {
            **_DELTA,
            **_DELTA_EXPERTS,
            "attn_qkv": Place("linear_attn.in_proj_qkvz", heads_together, 0, 1, flat=True),
            "attn_gate": Place("linear_attn.in_proj_qkvz", heads_together, 1, 1, flat=True),
            "ssm_in": Place("linear_attn.in_proj_qkvz"),
            "ssm_ba": Place("linear_attn.in_proj_ba"),
        },
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        partial=True,
        drafts=True,
        experts=_EXPERTS,
        read=_read_delta_mixture,
    ),
    "lfm2": Architecture(
        "lfm2",
        _LFM2,
        names={"rms_norm_eps": "norm_eps"},
        fixed={"block_auto_adjust_ff_dim": False, "conv_bias": False},
        free_heads=False,
        mixed_layers=True,
        read=_read_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**_LFM2, **experts("feed_forward", "gate"), "exp_probs_b.bias": Place("feed_forward.expert_bias", whole=True)},
        names={"rms_norm_eps": "norm_eps"},
        fixed={"conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        free_heads=False,
        mixed_layers=True,
        experts=_EXPERTS,
        read=_read_lfm2_mixture,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {**DENSE, **ATTENTION_APART, **NORMS, **_mamba2("mamba")},
        free_heads=False,
        mixed_layers=True,
        read=_read_granite_hybrid,
    ),
    "mamba": Architecture(
        "mamba",
        {
            **_BACKBONE,
            **_mamba("mixer"),
            "ssm_x": Place("mixer.x_proj"),
            "ssm_dt": Place("mixer.dt_proj"),
        },
        layer_prefix="backbone.layers",
        names={"rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "", "max_position_embeddings": ""},
        rotates=False,
        attends=False,
        harmless=_WITHOUT_HEADS,
        tensor_flags={"use_conv_bias": "ssm_conv1d.bias", "use_bias": "ssm_in.bias"},
        read=_read_mamba,
    ),
    "mamba2": Architecture(
        "mamba2",
        {**_BACKBONE, **_mamba2("mixer")},
        layer_prefix="backbone.layers",
        names={"rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "", "max_position_embeddings": ""},
        rotates=False,
        attends=False,
        harmless=_WITHOUT_HEADS,
        read=_read_mamba2,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        {
            **DENSE,
            **_mamba2("mamba"),
            "output_norm": Place("=model.final_layernorm"),
            "ffn_norm": Place("pre_ff_layernorm.weight", whole=True),  # in the file its name has no suffix
            "ffn_gate": Place("feed_forward.gate_proj"),
            "ffn_up": Place("feed_forward.up_proj"),
            "ffn_down": Place("feed_forward.down_proj"),
        },
        fixed={"mamba_norm_before_gate": False},
        tensor_flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
        read=_read_falcon_h1,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        {**_NEMOTRON, **{name: Place(place.name.replace("mlp", "mixer")) for name, place in MLP.items()}},
        layer_norm="layer_norm_epsilon",
        rotates=False,
        mixed_layers=True,
        harmless=("rope.dimension_count", "attention.layer_norm_rms_epsilon"),
        read=_read_nemotron_h,
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        {
            **_NEMOTRON,
            "ffn_gate_inp": Place("mixer.gate"),
            "exp_probs_b.bias": Place("mixer.gate.e_score_correction_bias", whole=True),
            "ffn_up_exps.weight": Place("mixer.experts.up_proj", whole=True),
            "ffn_down_exps.weight": Place("mixer.experts.down_proj", whole=True),
            "ffn_latent_down": Place("mixer.fc1_latent_proj"),
            "ffn_latent_up": Place("mixer.fc2_latent_proj"),
            **shared_expert("mixer.shared_experts"),
        },
        names={"intermediate_size": ""},
        layer_norm="layer_norm_epsilon",
        rotates=False,
        drafts=True,
        mixed_layers=True,
        harmless=("rope.dimension_count", "attention.layer_norm_rms_epsilon"),
        experts=("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        read=_read_nemotron_h_moe,
    ),
    "jamba": Architecture(
        "jamba",
        {
            **TOP,
            "output_norm": Place("=model.final_layernorm"),
            **ATTENTION,
            "attn_norm": Place("input_layernorm"),
            "ffn_norm": Place("pre_ff_layernorm"),
            **{name: Place(place.name.replace("mlp", "feed_forward")) for name, place in MLP.items()},
            **experts("feed_forward", "router"),
            **_mamba("mamba"),
            "ssm_x": Place("mamba.x_proj"),
            "ssm_dt": Place("mamba.dt_proj"),
            "ssm_dt_norm": Place("mamba.dt_layernorm"),
            "ssm_b_norm": Place("mamba.b_layernorm"),
            "ssm_c_norm": Place("mamba.c_layernorm"),
        },
        fixed={"mamba_conv_bias": True, "mamba_proj_bias": False},
        free_heads=False,
        rotates=False,
        mixed_layers=True,
        experts=("num_experts", "num_experts_per_tok"),
        read=_read_jamba,
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        {
            **DENSE,
            **_KDA,
            **_LATENT,
            **experts("mlp", "gate"),
            "exp_probs_b.bias": Place("mlp.gate.e_score_correction_bias", whole=True),
            **shared_expert("mlp.shared_experts"),
        },
        rotates=False,
        latent=True,
        mixed_layers=True,
        harmless=("attention.value_length", "rope.freq_base"),
        experts=("num_experts", "num_experts_per_token", "moe_intermediate_size"),
        read=_read_kimi_linear,
    ),
}
