"""The encoders: their keys, their tensors and their classes of transformers; jina-bert-v2 has a class of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from . import dense_architectures
from .architecture import (
    DENSE,
    FULL,
    SLIDING,
    Architecture,
    Reading,
    read_window,
)
from .gemma_architectures import GEMMA3, rotate_apart
from .keys import RMS
from .tensors import Place, shape_of_tensor

_SPLIT = Place("", split=("attn_q", "attn_k", "attn_v"))
_BLOCK = {
    "attn_q": Place("self_attn.q_proj"),
    "attn_k": Place("self_attn.k_proj"),
    "attn_v": Place("self_attn.v_proj"),
    "attn_qkv": _SPLIT,
    "attn_output": Place("self_attn.o_proj"),
    "attn_output_norm": Place("post_attention_layernorm"),
    "layer_output_norm": Place("post_mlp_layernorm"),
}
_TOP = {
    "token_embd": Place("=embeddings.word_embeddings"),
    "token_types": Place("=embeddings.token_type_embeddings"),
    "token_embd_norm": Place("=embeddings.LayerNorm"),
}
_WITHOUT_GROUPS = {"num_key_value_heads": ""}


def _read_types(r: Reading, table: str = "embeddings.token_type_embeddings.weight") -> None:
    """Reads the number of token types. A file without their table has a table of zeros.

    Raises SourceError if the file states another number than its table has.
    """
    if r.fields.get("num_key_value_heads", r.heads) != r.heads:
        raise r.keys.refusal("attention.head_count_kv", f"is {r.fields['num_key_value_heads']}, for {r.heads} heads")
    shape = shape_of_tensor(r.file, "token_types.weight")
    if shape is None:
        r.fields["type_vocab_size"] = 1
        r.zeros[table] = (1, r.fields["hidden_size"])
        return
    r.fields["type_vocab_size"] = shape[0]
    r.keys.check_number("tokenizer.ggml.token_type_count", shape[0], "rows of the tensor token_types.weight")


def _read_bert(r: Reading) -> None:
    _read_types(r)
    shape = shape_of_tensor(r.file, "position_embd.weight")
    if shape is not None:
        r.keys.check_number("context_length", shape[0], "rows of the tensor position_embd.weight")


def _read_jina_bert_v2(r: Reading) -> None:
    _read_types(r, "types.weight")
    if r.keys.number("attention.max_alibi_bias", 8.0) != 8.0:
        raise r.keys.refusal("attention.max_alibi_bias", "isn't 8")
    up = shape_of_tensor(r.file, "blk.0.ffn_up.weight")
    joined = up is not None and up[0] == 2 * r.fields["intermediate_size"] and not r.has("blk.0.ffn_gate.weight")
    bias = r.has("blk.0.ffn_up.bias")
    if joined:
        r.tensors["ffn_up"] = Place("", split=("ffn_gate", "up"))
    r.fields |= {
        "gated": joined or r.has("blk.0.ffn_gate.weight"),
        "up_bias": bias,
        "gate_bias": bias and joined,
        "head_norms": r.has("blk.0.attn_q_norm.weight"),
        "second_norm": r.has("blk.0.attn_norm_2.weight"),
    }


def _read_modern_bert(r: Reading) -> None:
    activation = r.keys.text("hidden_activation", "gelu")
    if activation not in ("gelu", "silu"):
        raise r.keys.refusal("hidden_activation", f"is {activation!r:.80}")
    r.fields["hidden_activation"] = activation
    window = r.keys.integer("attention.sliding_window", 0)
    kinds = r.keys.flags_by_layer("attention.sliding_window_pattern", r.layers)
    if kinds is None:
        period = r.keys.integer("attention.sliding_window_pattern", 3)
        kinds = [period == 0 or i % period > 0 for i in range(r.layers)]
    r.fields["layer_types"] = [SLIDING if slides and window else FULL for slides in kinds]
    r.fields["local_attention"] = window or r.fields["max_position_embeddings"]
    rotate_apart(r)


def _read_gemma_embedding(r: Reading) -> None:
    r.fields["layer_types"] = read_window(r, default=0, period=6)
    r.fields |= {
        "query_pre_attn_scalar": r.head_dim,
        "use_bidirectional_attention": True,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }
    rotate_apart(r)


ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": Architecture(
        "bert",
        {
            **_TOP,
            "position_embd": Place("=embeddings.position_embeddings"),
            "attn_q": Place("attention.self.query"),
            "attn_k": Place("attention.self.key"),
            "attn_v": Place("attention.self.value"),
            "attn_qkv": _SPLIT,
            "attn_output": Place("attention.output.dense"),
            "attn_output_norm": Place("attention.output.LayerNorm"),
            "ffn_up": Place("intermediate.dense"),
            "ffn_down": Place("output.dense"),
            "layer_output_norm": Place("output.LayerNorm"),
        },
        "encoder.layer",
        names=_WITHOUT_GROUPS,
        layer_norm="layer_norm_eps",
        rotates=False,
        free_heads=False,
        read=_read_bert,
        encoder=True,
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        {
            **_TOP,
            **_BLOCK,
            "ffn_gate": Place("mlp.gate_proj"),
            "ffn_up": Place("mlp.up_proj"),
            "ffn_down": Place("mlp.down_proj"),
        },
        "layers",
        names=_WITHOUT_GROUPS,
        layer_norm="layer_norm_eps",
        fixed={"pad_token_id": 0},  # the class needs one, and no text has padding
        free_heads=False,
        read=_read_types,
        encoder=True,
    ),
    "jina-bert-v2": Architecture(
        "jina_bert_v2",
        {
            "token_embd": Place("=words"),
            "token_types": Place("=types"),
            "token_embd_norm": Place("=norm"),
            "attn_q": Place("attention.query"),
            "attn_k": Place("attention.key"),
            "attn_v": Place("attention.value"),
            "attn_qkv": _SPLIT,
            "attn_q_norm": Place("attention.query_norm"),
            "attn_k_norm": Place("attention.key_norm"),
            "attn_output": Place("attention.dense"),
            "attn_output_norm": Place("attention_norm"),
            "attn_norm_2": Place("second_norm"),
            "ffn_gate": Place("feed_forward.gate"),
            "ffn_up": Place("feed_forward.up"),
            "up": Place("feed_forward.up"),  # a part of ffn_up, if that has the gate as well
            "ffn_down": Place("feed_forward.down"),
            "layer_output_norm": Place("output_norm"),
        },
        "layers",
        names=_WITHOUT_GROUPS,
        layer_norm="layer_norm_eps",
        rotates=False,
        free_heads=False,
        read=_read_jina_bert_v2,
        encoder=True,
    ),
    "jina-bert-v3": Architecture(
        "jina_embeddings_v3",
        {**_TOP, **_BLOCK, "ffn_up": Place("mlp.fc1"), "ffn_down": Place("mlp.fc2")},
        "layers",
        names=_WITHOUT_GROUPS,
        layer_norm="layer_norm_eps",
        free_heads=False,
        read=_read_types,
        encoder=True,
    ),
    "modern-bert": Architecture(
        "modernbert",
        {
            "token_embd": Place("=embeddings.tok_embeddings"),
            "token_embd_norm": Place("=embeddings.norm"),
            "output_norm": Place("=final_norm"),
            "attn_norm": Place("attn_norm"),
            "attn_qkv": Place("attn.Wqkv"),
            "attn_output": Place("attn.Wo"),
            "ffn_norm": Place("mlp_norm"),
            "ffn_up": Place("mlp.Wi"),
            "ffn_down": Place("mlp.Wo"),
        },
        "layers",
        names=_WITHOUT_GROUPS,
        layer_norm="norm_eps",
        free_heads=False,
        harmless=(RMS,),  # written by the converter beside the other, and not read
        read=_read_modern_bert,
        encoder=True,
        head="gelu",
    ),
    "eurobert": Architecture("eurobert", DENSE, encoder=True),
    "gemma-embedding": Architecture("gemma3_text", GEMMA3, read=_read_gemma_embedding, encoder=True),
    "llama-embed": replace(dense_architectures.ARCHITECTURES["llama"], encoder=True, fixed={"is_causal": False}),
}
