"""The dense architectures whose norms subtract the mean, such as GPT-2: keys, tensors, classes of transformers."""

from __future__ import annotations

from collections.abc import Mapping

from .architecture import (
    ATTENTION,
    ATTENTION_APART,
    DENSE,
    MLP,
    NORMS,
    TOP,
    Architecture,
    Reading,
    check_swa_base,
    read_window,
)
from .keys import NORM
from .tensors import Place, grouped_heads, less_one, size_of, transposed


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


def _read_olmo(r: Reading) -> None:
    if abs(r.fields.pop("rms_norm_eps") - 1e-5) > 1e-9:
        raise r.keys.refusal(NORM, "isn't 1e-5")
    r.fields["clip_qkv"] = r.keys.number("attention.clamp_kqv", 0.0) or None


def _read_command_r(r: Reading) -> None:
    r.fields["logit_scale"] = r.keys.number("logit_scale", 0.0) or 1.0
    if r.has("blk.0.attn_q_norm.weight"):
        r.fields["use_qk_norm"] = True


def _read_cohere2(r: Reading) -> None:
    r.fields["logit_scale"] = r.keys.number("logit_scale") or 1.0
    r.fields["layer_types"] = read_window(r, default=0, period=4)
    check_swa_base(r)


ARCHITECTURES: Mapping[str, Architecture] = {
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
        layer_norm="layer_norm_epsilon",
        free_heads=False,
        read=_read_falcon,
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
        names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        layer_norm="layer_norm_epsilon",
        rotates=False,
        free_heads=False,
        read=_read_bloom,
    ),
    "stablelm": Architecture(
        "stablelm",
        DENSE,
        layer_norm="layer_norm_eps",
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
        },
        layer_norm="layer_norm_epsilon",
        rotates=False,
        free_heads=False,
        read=_read_gpt2,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**TOP, **ATTENTION, **NORMS, "ffn_up": Place("mlp.c_fc"), "ffn_down": Place("mlp.c_proj")},
        layer_norm="norm_epsilon",
        fixed={"sliding_window": None},
        free_heads=False,
        tensor_flags={"use_bias": "attn_q.bias"},
    ),
    "nemotron": Architecture(
        "nemotron",
        {
            **TOP,
            **ATTENTION,
            "ffn_up": MLP["ffn_up"],
            "ffn_down": MLP["ffn_down"],
            "output_norm.weight": Place("=model.norm", less_one),
            "attn_norm.weight": Place("input_layernorm", less_one),
            "ffn_norm.weight": Place("post_attention_layernorm", less_one),
            "attn_norm": NORMS["attn_norm"],
            "ffn_norm": NORMS["ffn_norm"],
        },
        layer_norm="norm_eps",
        partial=True,
        tensor_flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    ),
    "olmo": Architecture(
        "olmo",
        {"token_embd": TOP["token_embd"], "output": TOP["output"], **ATTENTION_APART, **MLP},
        layer_norm="rms_norm_eps",  # which the class has no field for: see _read_olmo
        free_heads=False,
        read=_read_olmo,
    ),
    "command-r": Architecture(
        "cohere",
        {**TOP, **ATTENTION, **MLP, "attn_norm": NORMS["attn_norm"]},
        layer_norm="layer_norm_eps",
        free_heads=False,
        read=_read_command_r,
    ),
    "cohere2": Architecture(
        "cohere2",
        {**TOP, **ATTENTION, **MLP, "attn_norm": NORMS["attn_norm"]},
        layer_norm="layer_norm_eps",
        read=_read_cohere2,
    ),
    "phi2": Architecture(
        "phi",
        {
            "token_embd": TOP["token_embd"],
            "output_norm": Place("=model.final_layernorm"),
            "output": TOP["output"],
            **ATTENTION,
            "attn_output": Place("self_attn.dense"),
            "attn_norm": NORMS["attn_norm"],
            "ffn_up": Place("mlp.fc1"),
            "ffn_down": Place("mlp.fc2"),
        },
        layer_norm="layer_norm_eps",
        partial=True,
        free_heads=False,
    ),
}
