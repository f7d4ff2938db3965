"""The architectures of GGUF files that can be read: for each its keys, its tensors and its class of transformers.

A key is used (a function here reads it), harmless (``HARMLESS``, ``NEUTRAL`` and ``Architecture.harmless``), or refused
by name: ``Keys.refuse_unread`` does so for every key of the architecture that nothing has read. Defaults and meanings
are llama.cpp's: https://github.com/ggml-org/llama.cpp/tree/master/src/models has one file for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from enginewright.runtime.shared.errors import UnsupportedModelError

from .gguf_file import GgufFile
from .gguf_keys import Keys
from .gguf_rope import Rope, read_rope
from .gguf_tensors import (
    Place,
    experts_transposed,
    grouped_heads,
    heads_apart,
    less_one,
    middle_axis,
    row_matrix,
    size_of,
    transposed,
    values_of,
)

Fields = dict[str, Any]
RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Description:
    """The configuration of a file: model type and fields for transformers, and what to do with the tensors.

    Attributes:
        model_type: transformers' name of the configuration's class.
        fields: the fields of the configuration.
        ropes: the rotary embedding by kind of layer; None for all layers. Empty: none.
        tensors: the place of each tensor.
        layer_prefix: what the model's names of layers begin with.
        layers: the number of layers.
        skipped: tensors that aren't weights.
    """

    model_type: str
    fields: Fields
    ropes: dict[str | None, Rope]
    tensors: Mapping[str, Place]
    layer_prefix: str
    layers: int
    skipped: tuple[str, ...] = ("rope_freqs.weight",)


@dataclass
class Reading:
    """A description that is being made, from the keys and tensors of one file."""

    keys: Keys
    file: GgufFile
    blocks: int
    layers: int
    fields: Fields
    ropes: dict[str | None, Rope]
    tensors: dict[str, Place]
    model_type: str
    heads: int
    head_dim: int
    skipped: list[str] = field(default_factory=lambda: ["rope_freqs.weight"])
    longrope: bool = False

    def has(self, name: str) -> bool:
        """Returns True if the file has this tensor."""
        return name in self.file.tensors


@dataclass(frozen=True)
class Architecture:
    """One architecture: what is common is read from this record, the rest by ``read``.

    Attributes:
        model_type: transformers' name of the configuration's class.
        tensors: the place of each tensor.
        layer_prefix: what the model's names of layers begin with.
        names: the class's own names of configuration fields, by the usual name; "" leaves a field out.
        epsilon: the key of the norms' epsilon.
        fixed: fields that the architecture implies.
        rotates: the positions are rotary embeddings.
        partial: the class can rotate a part of each head.
        free_heads: the class can have heads whose size isn't hidden_size / heads.
        reads_yarn: llama.cpp reads YaRN's own parameters.
        drafts: blocks after the last layer may hold a model for drafts, which is left out.
        latent: keys and values are made of a latent vector: their widths are several fields.
        longrope: the rotary frequencies may have divisors for short and for long contexts.
        mixed_layers: layers may differ in their numbers of heads and widths.
        harmless: keys that llama.cpp doesn't read for the architecture, or that nothing here depends on.
        read: reads the other keys.
    """

    model_type: str
    tensors: Mapping[str, Place]
    layer_prefix: str = "model.layers"
    names: Mapping[str, str] = field(default_factory=dict)
    epsilon: str = RMS
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rotates: bool = True
    partial: bool = False
    free_heads: bool = True
    reads_yarn: bool = False
    drafts: bool = False
    latent: bool = False
    longrope: bool = False
    mixed_layers: bool = False
    harmless: tuple[str, ...] = ()
    read: Callable[[Reading], None] | None = None


_TOP = {
    "token_embd": Place("=model.embed_tokens"),
    "output_norm": Place("=model.norm"),
    "output": Place("=lm_head"),
}
_ATTENTION = {
    "attn_q": Place("self_attn.q_proj"),
    "attn_k": Place("self_attn.k_proj"),
    "attn_v": Place("self_attn.v_proj"),
    "attn_output": Place("self_attn.o_proj"),
}
_ATTENTION_APART = {
    **_ATTENTION,
    "attn_q": Place("self_attn.q_proj", heads_apart("num_attention_heads")),
    "attn_k": Place("self_attn.k_proj", heads_apart("num_key_value_heads")),
}
_NORMS = {"attn_norm": Place("input_layernorm"), "ffn_norm": Place("post_attention_layernorm")}
_HEAD_NORMS = {"attn_q_norm": Place("self_attn.q_norm"), "attn_k_norm": Place("self_attn.k_norm")}
_MLP = {
    "ffn_gate": Place("mlp.gate_proj"),
    "ffn_up": Place("mlp.up_proj"),
    "ffn_down": Place("mlp.down_proj"),
}
_DENSE = {**_TOP, **_ATTENTION, **_NORMS, **_MLP}
_DENSE_APART = {**_TOP, **_ATTENTION_APART, **_NORMS, **_MLP}


def _experts(block: str, router: str) -> dict[str, Place]:
    """The places of a mixture of experts whose gate and up matrices are one weight; the block "" is the layer."""
    block = block and f"{block}."
    merged = f"{block}experts.gate_up_proj"
    return {
        "ffn_gate_inp": Place(f"{block}{router}"),
        "ffn_gate_exps.weight": Place(merged, None, 0, 1, whole=True),
        "ffn_up_exps.weight": Place(merged, None, 1, 1, whole=True),
        "ffn_gate_up_exps.weight": Place(merged, whole=True),
        "ffn_down_exps.weight": Place(f"{block}experts.down_proj", whole=True),
    }


def _shared(block: str) -> dict[str, Place]:
    """The places of an expert that all tokens use."""
    return {
        "ffn_gate_shexp": Place(f"{block}.gate_proj"),
        "ffn_up_shexp": Place(f"{block}.up_proj"),
        "ffn_down_shexp": Place(f"{block}.down_proj"),
    }


def _read_experts(r: Reading, count: str, used: str, width: str | None = None) -> None:
    """Reads the numbers of experts; ``width`` is the field for an expert's width, if the class has its own."""
    experts = r.keys.integer("expert_count")
    chosen = r.keys.same_for_all("expert_used_count", r.blocks)
    if not 0 < chosen <= experts:
        raise r.keys.refusal("expert_used_count", f"is {chosen}, of {experts} experts")
    r.fields |= {count: experts, used: chosen}
    if width is not None:
        default = r.fields.get("intermediate_size", 0) // chosen
        r.fields[width] = r.keys.same_for_all("expert_feed_forward_length", r.blocks, default) or default


def _read_window(r: Reading, *, default: int | None, period: int) -> list[str] | None:
    """Reads the sliding window and the kind of each layer; None if there is no window."""
    window = r.keys.integer("attention.sliding_window", default or 0)
    kinds = r.keys.flags_by_layer("attention.sliding_window_pattern", r.layers)
    if kinds is None:
        period = r.keys.integer("attention.sliding_window_pattern", period)
        kinds = [period == 0 or i % period < period - 1 for i in range(r.layers)]
    if not window:
        if default is not None:
            raise r.keys.refusal("attention.sliding_window", "is 0")
        return None
    r.fields["sliding_window"] = window
    return [SLIDING if slides else FULL for slides in kinds]


def _read_swa_base(r: Reading, default: float) -> float:
    return r.keys.number("rope.freq_base_swa", default)


def _same_swa_base(r: Reading) -> None:
    """Raises UnsupportedModelError if layers with a sliding window have another base, which the class can't have."""
    theta = r.ropes[None].theta
    if _read_swa_base(r, theta) != theta:
        raise r.keys.refusal("rope.freq_base_swa", f"is another base than {theta}")


def _read_llama(r: Reading) -> None:
    r.fields["attention_bias"] = r.has("blk.0.attn_q.bias")
    r.fields["mlp_bias"] = r.has("blk.0.ffn_gate.bias")
    if r.keys.integer("expert_count", 0):
        r.model_type = "mixtral"
        _read_experts(r, "num_local_experts", "num_experts_per_tok")
        r.fields["sliding_window"] = None
        r.tensors |= _experts("mlp", "gate")


def _read_llama_dense(r: Reading) -> None:
    r.fields["attention_bias"] = r.has("blk.0.attn_q.bias")


def _read_glm4(r: Reading) -> None:
    r.fields["attention_bias"] = r.has("blk.0.attn_q.bias")


def _read_qwen2moe(r: Reading) -> None:
    _read_experts(r, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    default = r.fields["intermediate_size"]
    r.fields["shared_expert_intermediate_size"] = (
        r.keys.integer("expert_shared_feed_forward_length", default) or default
    )


def _read_qwen3moe(r: Reading) -> None:
    _read_experts(r, "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")


def _query_scale(r: Reading, layers: int) -> float:
    """The square of the divisor of Gemma's attention scores; the largest model of a generation has another one."""
    return r.fields["hidden_size"] // r.heads if r.layers == layers else r.head_dim


def _read_gemma2(r: Reading) -> None:
    r.fields["layer_types"] = _read_window(r, default=4096, period=2)
    r.fields["query_pre_attn_scalar"] = _query_scale(r, 46)
    r.fields["attn_logit_softcapping"] = r.keys.number("attn_logit_softcapping", 50.0)
    r.fields["final_logit_softcapping"] = r.keys.number("final_logit_softcapping", 30.0)
    _same_swa_base(r)


def _read_gemma3(r: Reading) -> None:
    kinds = _read_window(r, default=None, period=6)
    r.fields["layer_types"] = kinds or [FULL] * r.layers
    r.fields["query_pre_attn_scalar"] = _query_scale(r, 62)
    r.fields["final_logit_softcapping"] = r.keys.number("final_logit_softcapping", 0.0) or None
    r.fields["attn_logit_softcapping"] = None
    rope = r.ropes.pop(None)
    r.ropes[FULL], r.ropes[SLIDING] = rope, Rope(_read_swa_base(r, 10000.0))


def _read_gemma4(r: Reading) -> None:
    kinds = r.keys.flags_by_layer("attention.sliding_window_pattern", r.layers)
    if kinds is None:
        raise r.keys.refusal("attention.sliding_window_pattern", "isn't one value for each layer")
    r.fields["sliding_window"] = r.keys.integer("attention.sliding_window")
    r.fields["layer_types"] = [SLIDING if slides else FULL for slides in kinds]
    if not r.fields["sliding_window"] or kinds[-1]:
        raise r.keys.refusal("attention.sliding_window_pattern", "has no window, or one in the last layer")
    width, sliding_width = r.head_dim, r.keys.integer("attention.key_length_swa")
    if r.keys.integer("attention.value_length_swa") != sliding_width:
        raise r.keys.refusal("attention.value_length_swa", f"differs from the length of keys, {sliding_width}")
    for name, expected in (("rope.dimension_count", width), ("rope.dimension_count_swa", sliding_width)):
        if r.keys.integer(name, width) != expected:
            raise r.keys.refusal(name, f"isn't {expected}, the width of a head")
    heads = {True: set[int](), False: set[int]()}
    for slides, count in zip(kinds, r.keys.by_layer("attention.head_count_kv", r.layers, r.heads), strict=True):
        heads[slides].add(count)
    if any(len(counts) > 1 for counts in heads.values()):
        raise r.keys.refusal("attention.head_count_kv", f"is {heads}: layers of one kind that differ in it")
    full = {"head_dim": width, "num_key_value_heads": min(heads[False])}
    shared = r.keys.integer("attention.shared_kv_layers", 0)
    unshared = r.layers - shared
    r.fields |= {
        "head_dim": sliding_width,
        "num_key_value_heads": min(heads[True] or heads[False]),
        "per_layer_config": {i: full for i, slides in enumerate(kinds) if not slides},
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": not r.has(f"blk.{kinds.index(False)}.attn_v.weight"),
        "final_logit_softcapping": r.keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": r.keys.integer("embedding_length_per_layer_input"),
    }
    if shared >= r.layers:
        raise r.keys.refusal("attention.shared_kv_layers", f"is {shared}, of {r.layers} layers")
    for i in range(unshared, r.layers):
        r.skipped += [f"blk.{i}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")]
    widths = r.keys.by_layer("feed_forward_length", r.layers)
    doubled = shared > 0 and widths[-1] == 2 * widths[0]
    if widths != [widths[0] * (1 + (doubled and i >= unshared)) for i in range(r.layers)]:
        raise r.keys.refusal("feed_forward_length", f"is {sorted(set(widths))}: layers that differ in it")
    r.fields |= {"intermediate_size": widths[0], "use_double_wide_mlp": doubled}
    if r.fields["hidden_size_per_layer_input"]:
        r.fields["vocab_size_per_layer_input"] = size_of(r.file, "per_layer_token_embd.weight")
    r.fields["enable_moe_block"] = bool(r.keys.integer("expert_count", 0))
    if r.fields["enable_moe_block"]:
        _read_experts(r, "num_experts", "top_k_experts", "moe_intermediate_size")
    size_of(r.file, "rope_freqs.weight")  # says which frequencies of layers without a window are 0
    rope = r.ropes.pop(None)
    r.ropes[FULL], r.ropes[SLIDING] = rope, Rope(_read_swa_base(r, 10000.0))


def _read_falcon(r: Reading) -> None:
    grouped = r.has("blk.0.attn_norm_2.weight")
    kv = r.fields["num_key_value_heads"]
    r.fields |= {
        "num_kv_heads": kv,
        "new_decoder_architecture": grouped,
        "multi_query": kv == 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        "ffn_hidden_size": r.fields.pop("intermediate_size"),
    }
    del r.fields["num_key_value_heads"]
    if grouped:
        r.tensors |= {"attn_norm": Place("ln_mlp"), "attn_norm_2": Place("ln_attn")}
        r.tensors["attn_qkv"] = Place(
            "self_attention.query_key_value", grouped_heads("num_kv_heads", "num_attention_heads")
        )


def _read_phi3(r: Reading) -> None:
    # llama.cpp reads the window and doesn't apply it: https://github.com/ggml-org/llama.cpp/pull/13676
    r.keys.integer("attention.sliding_window", 0)
    r.fields["sliding_window"] = None
    context = r.fields["max_position_embeddings"]
    original = r.keys.integer("rope.scaling.original_context_length", context) or context
    r.fields["original_max_position_embeddings"] = original
    _read_factors(r)


def _read_bloom(r: Reading) -> None:
    if r.fields["intermediate_size"] != 4 * r.fields["hidden_size"]:
        raise r.keys.refusal("feed_forward_length", f"is {r.fields['intermediate_size']}")
    if r.fields["num_key_value_heads"] != r.heads:
        raise r.keys.refusal("attention.head_count_kv", f"is {r.fields['num_key_value_heads']}")
    for name in ("intermediate_size", "num_key_value_heads"):
        del r.fields[name]


def _read_stablelm(r: Reading) -> None:
    r.fields["use_qkv_bias"] = r.has("blk.0.attn_q.bias")
    r.fields["use_parallel_residual"] = not r.has("blk.0.ffn_norm.weight")
    if r.keys.flag("use_parallel_residual", r.fields["use_parallel_residual"]) != r.fields["use_parallel_residual"]:
        raise r.keys.refusal("use_parallel_residual", "doesn't agree with the tensors")


def _read_gpt2(r: Reading) -> None:
    if r.fields.pop("num_key_value_heads") != r.heads:
        raise r.keys.refusal("attention.head_count_kv", "differs from the number of heads")
    r.fields["n_positions"] = size_of(r.file, "position_embd.weight")


def _read_starcoder2(r: Reading) -> None:
    r.fields["use_bias"] = r.has("blk.0.attn_q.bias")


def _read_nemotron(r: Reading) -> None:
    r.fields["attention_bias"] = r.has("blk.0.attn_q.bias")
    r.fields["mlp_bias"] = r.has("blk.0.ffn_up.bias")


def _read_lfm2(r: Reading) -> None:
    kv = r.keys.by_layer("attention.head_count_kv", r.layers, r.heads)
    r.fields["num_key_value_heads"] = max(kv)
    r.fields["layer_types"] = [FULL if n else "conv" for n in kv]
    if len(set(kv) - {0}) > 1:
        raise r.keys.refusal("attention.head_count_kv", f"is {sorted(set(kv))}: layers that differ in it")
    r.fields["conv_L_cache"] = r.keys.integer("shortconv.l_cache")


def _read_minimax_m2(r: Reading) -> None:
    _read_experts(r, "num_local_experts", "num_experts_per_tok")
    width = r.keys.same_for_all("expert_feed_forward_length", r.blocks)
    if width != r.fields["intermediate_size"]:
        raise r.keys.refusal("expert_feed_forward_length", f"is {width}, and feed_forward_length another")
    if (gating := r.keys.integer("expert_gating_func", 0)) != 2:
        raise r.keys.refusal("expert_gating_func", f"is {gating}")


def _read_gpt_oss(r: Reading) -> None:
    _read_experts(r, "num_local_experts", "num_experts_per_tok")
    r.fields["intermediate_size"] = r.keys.same_for_all("expert_feed_forward_length", r.blocks)
    r.fields["layer_types"] = _read_window(r, default=0, period=2)
    _same_swa_base(r)


def _read_factors(r: Reading) -> None:
    """Reads the tensors with a divisor for each frequency, for contexts up to the original one and for longer ones."""
    context = r.fields["max_position_embeddings"]
    original = r.keys.integer("rope.scaling.original_context_length", context) or context
    long, short = values_of(r.file, "rope_factors_long.weight"), values_of(r.file, "rope_factors_short.weight")
    if long is None or short is None:
        return
    r.skipped += ["rope_factors_long.weight", "rope_factors_short.weight"]
    r.fields["rope_parameters"] |= {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "attention_factor": r.ropes[None].attention_factor,
        "original_max_position_embeddings": original,
    }
    if r.ropes[None].factor != 1:
        raise r.keys.refusal("rope.scaling.factor", "divides frequencies that have factors of their own")
    r.longrope = True


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


def _read_routing(r: Reading) -> None:
    """Reads the routing of DeepSeek-V3 and its like: sigmoids with biases, by groups, in layers after dense ones."""
    _read_experts(r, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
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


def _read_glm4moe(r: Reading) -> None:
    _read_routing(r)
    r.fields["attention_bias"] = r.has("blk.0.attn_q.bias")
    r.fields["use_qk_norm"] = r.has("blk.0.attn_q_norm.weight")


def _read_dots1(r: Reading) -> None:
    _read_routing(r)
    r.fields["layer_types"] = [FULL] * r.layers


def _read_granite(r: Reading) -> None:
    r.fields |= {
        "logits_scaling": r.keys.number("logit_scale"),
        "residual_multiplier": r.keys.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": r.keys.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": r.keys.number("attention.scale", 0.0) or r.head_dim**-0.5,
    }
    if not r.fields["logits_scaling"]:
        raise r.keys.refusal("logit_scale", "is 0")
    if not r.keys.flag("rope.scaling.finetuned", True):
        raise r.keys.refusal("rope.scaling.finetuned", "is false: a model without rotary embeddings")


def _read_granite_moe(r: Reading) -> None:
    _read_granite(r)
    _read_experts(r, "num_local_experts", "num_experts_per_tok")
    if shared := r.keys.integer("expert_shared_feed_forward_length", 0):
        r.model_type = "granitemoeshared"
        r.fields["shared_intermediate_size"] = shared
        r.tensors |= {
            "ffn_gate_shexp": Place("shared_mlp.input_linear", None, 0, 0),
            "ffn_up_shexp": Place("shared_mlp.input_linear", None, 1, 0),
            "ffn_down_shexp": Place("shared_mlp.output_linear"),
        }


def _read_ernie_moe(r: Reading) -> None:
    _read_experts(r, "moe_num_experts", "moe_k", "moe_intermediate_size")
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


def _read_exaone4(r: Reading) -> None:
    if r.layers == 64:
        r.fields["layer_types"] = _read_window(r, default=4096, period=4)
        _same_swa_base(r)
        return
    r.keys.integer("attention.sliding_window", 0)  # read, and not applied
    r.fields |= {"layer_types": [FULL] * r.layers, "sliding_window": None, "sliding_window_pattern": None}


def _read_olmo(r: Reading) -> None:
    if abs(r.fields.pop("rms_norm_eps") - 1e-5) > 1e-9:
        raise r.keys.refusal(NORM, "isn't 1e-5")
    r.fields["clip_qkv"] = r.keys.number("attention.clamp_kqv", 0.0) or None


def _read_olmo2(r: Reading) -> None:
    kinds = _read_window(r, default=None, period=4)
    if kinds is None:
        return
    r.model_type = "olmo3"
    r.fields["layer_types"] = kinds
    rope = r.ropes.pop(None)
    # Layers with a window are rotated without scaling, but with YaRN's factor of cosines and sines left out as well.
    r.ropes[FULL], r.ropes[SLIDING] = rope, Rope(_read_swa_base(r, rope.theta))


def _read_olmoe(r: Reading) -> None:
    _read_experts(r, "num_experts", "num_experts_per_tok")


def _read_minicpm3(r: Reading) -> None:
    width = r.fields["rope_width"]
    if r.fields["rms_norm_eps"] > 1.001e-5:  # the class has 1e-6 for the norms of latent vectors, whatever this is
        raise r.keys.refusal(RMS, f"is {r.fields['rms_norm_eps']}")
    r.fields |= {
        "q_lora_rank": r.keys.integer("attention.q_lora_rank"),
        "kv_lora_rank": r.keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": width,
        "qk_nope_head_dim": r.head_dim - width,
        "v_head_dim": r.keys.integer("attention.value_length"),
        "head_dim": width,
    }
    del r.fields["rope_width"]
    _read_factors(r)


def _read_hunyuan(r: Reading) -> None:
    alpha = r.keys.number("rope.scaling.alpha", 0.0)
    if alpha > 0:
        rope = r.ropes[None]
        r.ropes[None] = replace(rope, theta=rope.theta * alpha ** (r.head_dim / (r.head_dim - 2)))
        r.fields["rope_parameters"]["rope_theta"] = r.ropes[None].theta


def _read_hunyuan_moe(r: Reading) -> None:
    _read_experts(r, "num_experts", "moe_topk")
    width = r.fields["intermediate_size"]
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if (r.keys.same_for_all(name, r.blocks, width) or width) != width:
            raise r.keys.refusal(name, "differs from feed_forward_length")


def _read_smollm3(r: Reading) -> None:
    r.fields["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(r.layers)]
    r.fields |= {"attention_bias": r.has("blk.0.attn_q.bias"), "mlp_bias": r.has("blk.0.ffn_gate.bias")}


def _read_seed_oss(r: Reading) -> None:
    r.fields["attention_bias"] = r.has("blk.0.attn_q.bias")
    r.fields["attention_out_bias"] = r.has("blk.0.attn_output.bias")


def _read_command_r(r: Reading) -> None:
    r.fields["logit_scale"] = r.keys.number("logit_scale", 0.0) or 1.0
    if r.has("blk.0.attn_q_norm.weight"):
        r.fields["use_qk_norm"] = True


def _read_cohere2(r: Reading) -> None:
    r.fields["logit_scale"] = r.keys.number("logit_scale") or 1.0
    r.fields["layer_types"] = _read_window(r, default=0, period=4)
    _same_swa_base(r)


_GEMMA = {
    "token_embd": _TOP["token_embd"],
    "output": _TOP["output"],
    "output_norm": Place("=model.norm", less_one),
    **_ATTENTION,
    **_MLP,
    "attn_norm": Place("input_layernorm", less_one),
}
_GEMMA2 = {
    **_GEMMA,
    "post_attention_norm": Place("post_attention_layernorm", less_one),
    "ffn_norm": Place("pre_feedforward_layernorm", less_one),
    "post_ffw_norm": Place("post_feedforward_layernorm", less_one),
}
_HUNYUAN = {"attn_q_norm": Place("self_attn.query_layernorm"), "attn_k_norm": Place("self_attn.key_layernorm")}
_WITHOUT_WINDOW = {"use_sliding_window": False, "sliding_window": None}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _DENSE_APART, read=_read_llama),
    "deci": Architecture("llama", _DENSE_APART, read=_read_llama),
    "qwen2": Architecture("qwen2", _DENSE, fixed=_WITHOUT_WINDOW, free_heads=False),
    "qwen3": Architecture("qwen3", {**_DENSE, **_HEAD_NORMS}, fixed=_WITHOUT_WINDOW),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {
            **_TOP,
            **_ATTENTION,
            **_NORMS,
            **_experts("mlp", "gate"),
            **_shared("mlp.shared_expert"),
            "ffn_gate_inp_shexp": Place("mlp.shared_expert_gate", row_matrix),
        },
        fixed={**_WITHOUT_WINDOW, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        free_heads=False,
        read=_read_qwen2moe,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_TOP, **_ATTENTION, **_NORMS, **_HEAD_NORMS, **_experts("mlp", "gate")},
        fixed={**_WITHOUT_WINDOW, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        read=_read_qwen3moe,
    ),
    "gemma": Architecture("gemma", {**_GEMMA, "ffn_norm": Place("post_attention_layernorm", less_one)}),
    "gemma2": Architecture("gemma2", _GEMMA2, read=_read_gemma2),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **_GEMMA2,
            "attn_q_norm": Place("self_attn.q_norm", less_one),
            "attn_k_norm": Place("self_attn.k_norm", less_one),
        },
        read=_read_gemma3,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **_TOP,
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            **_experts("", "router.proj"),
            "per_layer_token_embd": Place("=model.embed_tokens_per_layer"),
            "per_layer_model_proj": Place("=model.per_layer_model_projection"),
            "per_layer_proj_norm": Place("=model.per_layer_projection_norm"),
            "attn_norm": Place("input_layernorm"),
            "post_attention_norm": Place("post_attention_layernorm"),
            "ffn_norm": Place("pre_feedforward_layernorm"),
            "post_ffw_norm": Place("post_feedforward_layernorm"),
            "post_ffw_norm_1": Place("post_feedforward_layernorm_1"),
            "post_ffw_norm_2": Place("post_feedforward_layernorm_2"),
            "pre_ffw_norm_2": Place("pre_feedforward_layernorm_2"),
            "ffn_gate_inp.scale": Place("router.scale", whole=True),
            "ffn_down_exps.scale": Place("router.per_expert_scale", whole=True),
            "inp_gate": Place("per_layer_input_gate"),
            "proj": Place("per_layer_projection"),
            "post_norm": Place("post_per_layer_input_norm"),
            "layer_output_scale.weight": Place("layer_scalar", whole=True),
        },
        mixed_layers=True,
        read=_read_gemma4,
    ),
    "falcon": Architecture(
        "falcon",
        {
            "token_embd": Place("=transformer.word_embeddings"),
            "output_norm": Place("=transformer.ln_f"),
            "output": Place("=lm_head"),
            "attn_norm": Place("input_layernorm"),
            "attn_qkv": Place("self_attention.query_key_value"),
            "attn_output": Place("self_attention.dense"),
            "ffn_up": Place("mlp.dense_h_to_4h"),
            "ffn_down": Place("mlp.dense_4h_to_h"),
        },
        "transformer.h",
        names={"rms_norm_eps": "layer_norm_epsilon"},
        epsilon=NORM,
        free_heads=False,
        read=_read_falcon,
    ),
    "phi3": Architecture(
        "phi3",
        {
            **_TOP,
            **_NORMS,
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
    "bloom": Architecture(
        "bloom",
        {
            "token_embd": Place("=transformer.word_embeddings"),
            "token_embd_norm": Place("=transformer.word_embeddings_layernorm"),
            "output_norm": Place("=transformer.ln_f"),
            "output": Place("=lm_head"),
            "attn_norm": Place("input_layernorm"),
            "attn_qkv": Place("self_attention.query_key_value", grouped_heads("n_head", "n_head")),
            "attn_output": Place("self_attention.dense"),
            "ffn_norm": Place("post_attention_layernorm"),
            "ffn_up": Place("mlp.dense_h_to_4h"),
            "ffn_down": Place("mlp.dense_4h_to_h"),
        },
        "transformer.h",
        names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "rms_norm_eps": "layer_norm_epsilon"},
        epsilon=NORM,
        rotates=False,
        free_heads=False,
        read=_read_bloom,
    ),
    "stablelm": Architecture(
        "stablelm",
        _DENSE,
        names={"rms_norm_eps": "layer_norm_eps"},
        epsilon=NORM,
        partial=True,
        free_heads=False,
        read=_read_stablelm,
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "token_embd": Place("=transformer.wte"),
            "position_embd": Place("=transformer.wpe"),
            "output_norm": Place("=transformer.ln_f"),
            "output": Place("=lm_head"),
            "attn_norm": Place("ln_1"),
            "attn_qkv": Place("attn.c_attn", transposed),
            "attn_output": Place("attn.c_proj", transposed),
            "ffn_norm": Place("ln_2"),
            "ffn_up": Place("mlp.c_fc", transposed),
            "ffn_down": Place("mlp.c_proj", transposed),
        },
        "transformer.h",
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        epsilon=NORM,
        rotates=False,
        free_heads=False,
        read=_read_gpt2,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**_TOP, **_ATTENTION, **_NORMS, "ffn_up": Place("mlp.c_fc"), "ffn_down": Place("mlp.c_proj")},
        names={"rms_norm_eps": "norm_epsilon"},
        epsilon=NORM,
        fixed={"sliding_window": None},
        free_heads=False,
        read=_read_starcoder2,
    ),
    "nemotron": Architecture(
        "nemotron",
        {
            **_TOP,
            **_ATTENTION,
            "ffn_up": _MLP["ffn_up"],
            "ffn_down": _MLP["ffn_down"],
            "output_norm.weight": Place("=model.norm", less_one),
            "attn_norm.weight": Place("input_layernorm", less_one),
            "ffn_norm.weight": Place("post_attention_layernorm", less_one),
            "attn_norm": _NORMS["attn_norm"],
            "ffn_norm": _NORMS["ffn_norm"],
        },
        names={"rms_norm_eps": "norm_eps"},
        epsilon=NORM,
        partial=True,
        read=_read_nemotron,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            "token_embd": _TOP["token_embd"],
            "token_embd_norm": Place("=model.embedding_norm"),
            "output": _TOP["output"],
            **_ATTENTION,
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
        },
        names={"rms_norm_eps": "norm_eps"},
        fixed={"block_auto_adjust_ff_dim": False, "conv_bias": False},
        free_heads=False,
        mixed_layers=True,
        read=_read_lfm2,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {
            **_TOP,
            **_ATTENTION,
            **_NORMS,
            **_HEAD_NORMS,
            **_experts("mlp", "gate"),
            "exp_probs_b.bias": Place("mlp.e_score_correction_bias", whole=True),
        },
        partial=True,
        read=_read_minimax_m2,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **_TOP,
            **_ATTENTION,
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
        read=_read_gpt_oss,
    ),
    "exaone": Architecture("llama", _DENSE),
    "internlm2": Architecture("llama", _DENSE_APART, read=_read_llama_dense),
    "arcee": Architecture(
        "arcee", {**_TOP, **_ATTENTION_APART, **_NORMS, "ffn_up": _MLP["ffn_up"], "ffn_down": _MLP["ffn_down"]}
    ),
    "mistral3": Architecture("ministral3", _DENSE_APART, reads_yarn=True, read=_read_mistral3),
    "smollm3": Architecture(
        "smollm3",
        _DENSE_APART,
        fixed={**_WITHOUT_WINDOW, "no_rope_layer_interval": 4},
        free_heads=False,
        read=_read_smollm3,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        {**_DENSE, "post_attention_norm": Place("post_attention_layernorm")},
        fixed={"mlp_bias": False},
        read=_read_seed_oss,
    ),
    "granite": Architecture("granite", _DENSE_APART, free_heads=False, read=_read_granite),
    "granitemoe": Architecture(
        "granitemoe",
        {**_TOP, **_ATTENTION_APART, **_NORMS, **_experts("block_sparse_moe", "router")},
        free_heads=False,
        read=_read_granite_moe,
    ),
    "ernie4_5": Architecture("ernie4_5", _DENSE),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **_DENSE,
            **_experts("mlp", "gate"),
            **_shared("mlp.shared_experts"),
            "exp_probs_b.bias": Place("mlp.gate.moe_statics.e_score_correction_bias", row_matrix, whole=True),
        },
        free_heads=False,
        read=_read_ernie_moe,
    ),
    "glm4": Architecture(
        "glm4",
        {
            **_TOP,
            **_ATTENTION,
            "attn_norm": Place("input_layernorm"),
            "post_attention_norm": Place("post_self_attn_layernorm"),
            "ffn_norm": Place("post_attention_layernorm"),
            "post_ffw_norm": Place("post_mlp_layernorm"),
            "ffn_up": Place("mlp.gate_up_proj"),
            "ffn_down": Place("mlp.down_proj"),
        },
        partial=True,
        drafts=True,
        read=_read_glm4,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **_DENSE,
            **_HEAD_NORMS,
            **_experts("mlp", "gate"),
            **_shared("mlp.shared_experts"),
            "post_attention_norm": Place("post_attention_layernorm"),
            "exp_probs_b.bias": Place("mlp.gate.e_score_correction_bias", whole=True),
        },
        partial=True,
        drafts=True,
        read=_read_glm4moe,
    ),
    "dots1": Architecture(
        "dots1",
        {
            **_DENSE,
            **_HEAD_NORMS,
            **_experts("mlp", "gate"),
            **_shared("mlp.shared_experts"),
            "exp_probs_b.bias": Place("mlp.gate.e_score_correction_bias", whole=True),
        },
        fixed={"sliding_window": None, "attention_bias": False},
        read=_read_dots1,
    ),
    "exaone4": Architecture(
        "exaone4",
        {
            **_TOP,
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            "post_attention_norm": Place("post_attention_layernorm"),
            "post_ffw_norm": Place("post_feedforward_layernorm"),
        },
        read=_read_exaone4,
    ),
    "olmo": Architecture(
        "olmo",
        {"token_embd": _TOP["token_embd"], "output": _TOP["output"], **_ATTENTION_APART, **_MLP},
        epsilon=NORM,
        free_heads=False,
        read=_read_olmo,
    ),
    "olmo2": Architecture(
        "olmo2",
        {
            **_TOP,
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            "post_attention_norm": Place("post_attention_layernorm"),
            "post_ffw_norm": Place("post_feedforward_layernorm"),
        },
        free_heads=False,
        read=_read_olmo2,
    ),
    "olmoe": Architecture(
        "olmoe",
        {**_TOP, **_ATTENTION, **_NORMS, **_HEAD_NORMS, **_experts("mlp", "gate")},
        fixed={"norm_topk_prob": False, "clip_qkv": None},
        free_heads=False,
        read=_read_olmoe,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        {
            **_TOP,
            **_NORMS,
            **_MLP,
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
    "hunyuan-dense": Architecture("hunyuan_v1_dense", {**_DENSE, **_HUNYUAN}, read=_read_hunyuan),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {
            **_TOP,
            **_ATTENTION,
            **_NORMS,
            **_HUNYUAN,
            **_experts("mlp", "gate.wg"),
            **_shared("mlp.shared_mlp"),
        },
        read=_read_hunyuan_moe,
    ),
    "command-r": Architecture(
        "cohere",
        {**_TOP, **_ATTENTION, **_MLP, "attn_norm": _NORMS["attn_norm"]},
        names={"rms_norm_eps": "layer_norm_eps"},
        epsilon=NORM,
        free_heads=False,
        read=_read_command_r,
    ),
    "cohere2": Architecture(
        "cohere2",
        {**_TOP, **_ATTENTION, **_MLP, "attn_norm": _NORMS["attn_norm"]},
        names={"rms_norm_eps": "layer_norm_eps"},
        epsilon=NORM,
        read=_read_cohere2,
    ),
    "phi2": Architecture(
        "phi",
        {
            "token_embd": _TOP["token_embd"],
            "output_norm": Place("=model.final_layernorm"),
            "output": _TOP["output"],
            **_ATTENTION,
            "attn_output": Place("self_attn.dense"),
            "attn_norm": _NORMS["attn_norm"],
            "ffn_up": Place("mlp.fc1"),
            "ffn_down": Place("mlp.fc2"),
        },
        names={"rms_norm_eps": "layer_norm_eps"},
        epsilon=NORM,
        partial=True,
        free_heads=False,
    ),
}
"""Each architecture by its name in general.architecture."""

_NO_DECODERS = {
    **dict.fromkeys(
        (
            *("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert", "modern-bert"),
            *("eurobert", "gemma-embedding", "llama-embed", "t5encoder"),
        ),
        "an embedding model",
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "a diffusion model"),
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), "a model of speech"),
    **dict.fromkeys(("eagle3", "dflash", "gemma4-assistant"), "a draft model, which runs within another"),
    "t5": "an encoder with a decoder",
}
"""Architectures that aren't decoders of text, and what they are."""


def describe(file: GgufFile) -> Description:
    """Reads all keys of a file.

    Raises:
        UnsupportedModelError: the architecture isn't known, or a key says what can't be honoured.
        SourceError: a key is missing or has another type.
    """
    name = file.architecture
    if (kind := _NO_DECODERS.get(name)) is not None:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture {name!r} is {kind}, not a decoder-only language model",
            hint="Pass the GGUF file of a model that generates text.",
        )
    known = ARCHITECTURES.get(name)
    if known is None:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture {name!r:.80} can't be read from GGUF files",
            hint="Export from the model's Hugging Face directory.",
        )
    keys = Keys(file)
    reading = _read_common(keys, known)
    if known.read is not None:
        known.read(reading)
    keys.refuse_unread(known.harmless)
    fields = reading.fields
    ropes: dict[str | None, Rope] = {} if reading.longrope else reading.ropes
    if reading.ropes:
        fields["rope_parameters"] = _rope_parameters(reading)
    return Description(
        reading.model_type,
        {known.names.get(key, key): value for key, value in fields.items() if known.names.get(key, key)},
        ropes,
        reading.tensors,
        known.layer_prefix,
        reading.layers,
        tuple(reading.skipped),
    )


def _read_common(keys: Keys, known: Architecture) -> Reading:
    """Reads the keys that all architectures have."""
    file = keys.file
    blocks = keys.integer("block_count")
    layers = blocks - (keys.integer("nextn_predict_layers", 0) if known.drafts else 0)
    if layers < 1:
        raise keys.refusal("nextn_predict_layers", f"leaves {layers} layers of {blocks}")
    hidden, context = keys.integer("embedding_length"), keys.integer("context_length")
    heads = keys.same_for_all("attention.head_count", blocks)
    kv = max(keys.by_layer("attention.head_count_kv", blocks, heads))
    if not known.mixed_layers:
        kv = keys.same_for_all("attention.head_count_kv", blocks, heads)
    if not heads or not kv or heads % kv:
        raise keys.refusal("attention.head_count_kv", f"is {kv}, for {heads} heads")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if not known.latent and keys.integer("attention.value_length", hidden // heads) != head_dim:
        raise keys.refusal("attention.value_length", f"differs from the length of keys, {head_dim}")
    if not known.free_heads and head_dim * heads != hidden:
        raise keys.refusal("attention.key_length", f"is {head_dim}, for {heads} heads and {hidden} columns")
    fields: Fields = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "max_position_embeddings": context,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": keys.number(known.epsilon),
        "vocab_size": size_of(file, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "intermediate_size": max(keys.by_layer("feed_forward_length", blocks, 0)),
        **known.fixed,
    }
    if not known.mixed_layers:
        keys.same_for_all("feed_forward_length", blocks, 0)
    if known.free_heads:
        fields["head_dim"] = head_dim
    ropes: dict[str | None, Rope] = {}
    width = keys.integer("rope.dimension_count", head_dim)
    if known.rotates:
        types = ("none", "linear", "yarn", *(("longrope",) if known.longrope else ()))
        rope = read_rope(keys, context, reads_yarn=known.reads_yarn, types=types)
        ropes[None] = rope
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rope.theta}
        if known.latent:
            fields["rope_width"] = width
        elif known.partial:
            fields["rope_parameters"]["partial_rotary_factor"] = width / head_dim
        elif width != head_dim:
            raise keys.refusal("rope.dimension_count", f"is {width}, for heads of {head_dim}")
        if width % 2 or not 0 < width <= head_dim:
            raise keys.refusal("rope.dimension_count", f"is {width}, for heads of {head_dim}")
    return Reading(keys, file, blocks, layers, fields, ropes, dict(known.tensors), known.model_type, heads, head_dim)


def _rope_parameters(r: Reading) -> Fields:
    common: Fields = r.fields["rope_parameters"]
    if None in r.ropes:
        return common
    parameters = {kind: {**common, "rope_theta": rope.theta} for kind, rope in r.ropes.items() if kind is not None}
    if r.model_type == "gemma4_text":  # all frequencies of a head, of which the file's divisors leave some
        parameters[FULL] |= {"rope_type": "proportional", "partial_rotary_factor": 1.0}
    return parameters
