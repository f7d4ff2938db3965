"""The architectures of Gemma: their keys, their tensors and their classes of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .architecture import (
    ATTENTION,
    FULL,
    HEAD_NORMS,
    MLP,
    SLIDING,
    TOP,
    Architecture,
    Reading,
    check_swa_base,
    experts,
    read_experts,
    read_swa_base,
    read_window,
)
from .rope import Rope
from .tensors import Place, less_one, size_of


def _query_scale(r: Reading, layers: int) -> float:
    """Returns the field query_pre_attn_scalar: attention scores are divided by its square root.

    ``layers``: the number of layers of the largest model of a generation, which has another value.
    """
    return r.fields["hidden_size"] // r.heads if r.layers == layers else r.head_dim


def _read_gemma2(r: Reading) -> None:
    r.fields["layer_types"] = read_window(r, default=4096, period=2)
    r.fields["query_pre_attn_scalar"] = _query_scale(r, 46)
    r.fields["attn_logit_softcapping"] = r.keys.number("attn_logit_softcapping", 50.0)
    r.fields["final_logit_softcapping"] = r.keys.number("final_logit_softcapping", 30.0)
    check_swa_base(r)


def _read_gemma3(r: Reading) -> None:
    kinds = read_window(r, default=None, period=6)
    r.fields["layer_types"] = kinds or [FULL] * r.layers
    r.fields["query_pre_attn_scalar"] = _query_scale(r, 62)
    r.fields["final_logit_softcapping"] = r.keys.number("final_logit_softcapping", 0.0) or None
    r.fields["attn_logit_softcapping"] = None
    rotate_apart(r)


def _read_gemma4(r: Reading) -> None:
    kinds = _gemma4_kinds(r)
    _read_gemma4_heads(r, kinds)
    _read_gemma4_sharing(r)
    r.fields |= {
        "attention_k_eq_v": not r.has(f"blk.{kinds.index(False)}.attn_v.weight"),
        "final_logit_softcapping": r.keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": r.keys.integer("embedding_length_per_layer_input"),
        "enable_moe_block": bool(r.keys.integer("expert_count", 0)),
    }
    if r.fields["hidden_size_per_layer_input"]:
        r.fields["vocab_size_per_layer_input"] = size_of(r.file, "per_layer_token_embd.weight")
    if r.fields["enable_moe_block"]:
        read_experts(r, "num_experts", "top_k_experts", "moe_intermediate_size")
    size_of(r.file, "rope_freqs.weight")  # says which frequencies of layers without a window are 0
    rotate_apart(r)


def _gemma4_kinds(r: Reading) -> list[bool]:
    """Returns True for each layer that has a window, and sets the fields of windows."""
    kinds = r.keys.flags_by_layer("attention.sliding_window_pattern", r.layers)
    if kinds is None:
        raise r.keys.refusal("attention.sliding_window_pattern", "isn't one value for each layer")
    r.fields["sliding_window"] = r.keys.integer("attention.sliding_window")
    r.fields["layer_types"] = [SLIDING if slides else FULL for slides in kinds]
    if not r.fields["sliding_window"] or kinds[-1]:
        raise r.keys.refusal("attention.sliding_window_pattern", "has no window, or one in the last layer")
    return kinds


def _read_gemma4_heads(r: Reading, kinds: Sequence[bool]) -> None:
    """Reads widths and numbers of heads, which differ between layers with a window and those without."""
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
    r.fields |= {
        "head_dim": sliding_width,
        "num_key_value_heads": min(heads[True] or heads[False]),
        "per_layer_config": {i: full for i, slides in enumerate(kinds) if not slides},
    }


def _read_gemma4_sharing(r: Reading) -> None:
    """Reads the number of last layers that use the keys and values of earlier ones.

    Such layers may have wider networks.
    """
    shared = r.keys.integer("attention.shared_kv_layers", 0)
    unshared = r.layers - shared
    if unshared <= 0:
        raise r.keys.refusal("attention.shared_kv_layers", f"is {shared}, of {r.layers} layers")
    for i in range(unshared, r.layers):
        r.skipped += [f"blk.{i}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")]
    widths = r.keys.by_layer("feed_forward_length", r.layers)
    doubled = shared > 0 and widths[-1] == 2 * widths[0]
    if widths != [widths[0] * (1 + (doubled and i >= unshared)) for i in range(r.layers)]:
        raise r.keys.refusal("feed_forward_length", f"is {sorted(set(widths))}: layers that differ in it")
    r.fields |= {"num_kv_shared_layers": shared, "intermediate_size": widths[0], "use_double_wide_mlp": doubled}


def rotate_apart(r: Reading) -> None:
    """Sets separate rotary embeddings for layers with full attention and for layers with a window."""
    r.ropes[FULL], r.ropes[SLIDING] = r.ropes.pop(None), Rope(read_swa_base(r, 10000.0))


_GEMMA = {
    "token_embd": TOP["token_embd"],
    "output": TOP["output"],
    "output_norm": Place("=model.norm", less_one),
    **ATTENTION,
    **MLP,
    "attn_norm": Place("input_layernorm", less_one),
}
_GEMMA2 = {
    **_GEMMA,
    "post_attention_norm": Place("post_attention_layernorm", less_one),
    "ffn_norm": Place("pre_feedforward_layernorm", less_one),
    "post_ffw_norm": Place("post_feedforward_layernorm", less_one),
}
GEMMA3 = {
    **_GEMMA2,
    "attn_q_norm": Place("self_attn.q_norm", less_one),
    "attn_k_norm": Place("self_attn.k_norm", less_one),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture("gemma", {**_GEMMA, "ffn_norm": Place("post_attention_layernorm", less_one)}),
    "gemma2": Architecture("gemma2", _GEMMA2, read=_read_gemma2),
    "gemma3": Architecture("gemma3_text", GEMMA3, read=_read_gemma3),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **TOP,
            **ATTENTION,
            **HEAD_NORMS,
            **MLP,
            **experts("", "router.proj"),
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
}
