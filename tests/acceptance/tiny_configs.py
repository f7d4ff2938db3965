"""A tiny random model of every family of decoders and encoders that transformers has."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Fields of configurations, as regular expressions of their names, and what they become; the first that fits counts.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?", 256),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers", 2),
    (r"num_attention_heads|n_heads?|num_heads|((en|de)coder_)?attention_heads|num_(en|de)coder_attention_heads", 4),
    (r"(num_|n_)(.*_)?(key_value|kv)_heads", 2),
    (r"hidden_size|d_model|n_embd|dim|model_dim|emb_dim|word_embed_proj_dim|embedding_(size|dim)", 64),
    (r"(input|output)_embedding_size", 64),
    (r"moe_.*size|(expert|shared_expert).*_(intermediate|ffn_hidden)_size", 32),
    (r".*intermediate_size.*|((de|en)coder_)?ffn_(hidden_size|dim)|n_inner|d_ff|d_inner|dim_ff|.*ffn_dim", 128),
    (r"head_dim|attention_head_dim|kv_channels|d_kv", 16),
    (r"global_head_dim", 32),
    (r"qk_rope_head_dim", 8),
    (r"qk_nope_head_dim|kv_lora_rank", 16),
    (r"v_head_dim", 24),
    (r"q_lora_rank", 32),
    (r"rotary_dim", 8),
    (r"(num|n|moe_num)_(local_|routed_)?experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_(top_?)?k|top_k_experts|num_selected_experts|experts_per_token", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|moe_layer_start_index", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len(gth)?|seq_length", 512),
    (r"sliding_window|attention_window|local_attention|window_size|attention_chunk_size", 8),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r"mamba_n(um)?_heads|n_mamba_heads|linear_num_(key|value)_heads", 4),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim|linear_(key|value)_head_dim", 32),
    (r"mamba_d_ssm", 128),
    (r"lru_width", 64),
    (r"(mamba_)?(d_state|state_size|ssm_state_size)", 16),
    (r"index_(n_)?heads?", 2),
    (r"index_head_dim", 16),
    (r"index_topk", 8),
)

_ZERO_IS_OFF = frozenset({"n_group", "topk_group", "first_k_dense_replace", "v_head_dim", "sliding_window"})
"""Fields that stay 0 where that is the family's default."""

_MLA = {"head_dim": 8, "num_key_value_heads": 4}
_ENCODER = {"is_decoder": True}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

# What the rules don't give: sizes that must fit together, and parts that a family is known for.
_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}

_OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deberta", "deberta-v2"), _DISENTANGLED),  # as published models have it
    "funnel": {"architectures": ["FunnelModel"], "block_sizes": [1, 1], "n_head": 4, "d_head": 16, "d_inner": 64},
    "perceiver": {"num_latents": 16, "d_latents": 32, "num_self_attends_per_block": 2, "max_position_embeddings": 64},
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"), _MLA),
    "deepseek_v2": _MLA | {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "longcat_flash": _MLA,
    "minicpm3": {"num_key_value_heads": 4},
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
            *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        _ENCODER,
    ),
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "ministral": {"head_dim": 16, **_TWO_KINDS},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _HYBRID | {"num_key_value_heads": 4}),
    "granitemoehybrid": _HYBRID,
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "nemotron_h": {"n_groups": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3_text": {"head_dim": 16, **_TWO_KINDS},
    "hrm_text": {"L_cycles": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, **_TWO_KINDS},
    "smollm3": {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "zamba": {"num_hidden_layers": 4, "n_mamba_heads": 2, "mamba_dt_rank": 4, "attention_head_dim": 32}
    | {"layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "esm": {"vocab_size": 256, "mask_token_id": 3, "position_embedding_type": "rotary"},
    "esmc": {"vocab_size": 256, "mask_token_id": 3, "num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 32)},
    "zamba2": {"num_hidden_layers": 4, "use_mem_rope": True, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}

_MOST_PARAMETERS = 12_000_000
_DEEPER = 4

_NESTED_OVERRIDES: dict[str, dict[str, Any]] = {
    "mllama": {"num_hidden_layers": 4},  # the last one looks at images
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _HYBRID),
    "qwen4_exp": {"layer_types": ["linear_attention", "indexed_attention"], "indexer_budget": 16}
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_compress_ratio": 4},
}
"""Overrides for nested configurations."""

_UNBUILDABLE = (
    *(ValueError, TypeError, AttributeError, LookupError, RuntimeError, ImportError, AssertionError),
    StrictDataclassError,
)


TEXT = {
    **{"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {"image_size": 32, "patch_size": 16}
_QWEN_VISION = {"depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {  # a causal class of its own, windows, a tied table
        "text_config": TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _VISION | _PATCHES,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "tie_word_embeddings": False}
    | {"vision_config": _VISION | _PATCHES | {"head_dim": 16, "model_type": "pixtral"}},
    "llava": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": _VISION | _PATCHES}
    | {"tie_word_embeddings": False},
    # No causal class: the text model and the whole's head. Positions in time, height and width.
    "qwen2_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    },
    "qwen2_5_vl": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": _QWEN_VISION},
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "text_config": TEXT
        | {"sliding_window": 8, "vocab_size_per_layer_input": 259, "hidden_size_per_layer_input": 16}
        | {"global_head_dim": 32, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 16},
    },
    "llama4": {  # chunks
        "text_config": TEXT | {"intermediate_size_mlp": 128, "num_local_experts": 4, "attention_chunk_size": 8},
        "vision_config": _VISION
        | _PATCHES
        | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    },
}
"""Models that take images beside text, tiny: each family with what its names or its text have that others don't."""


class NoTinyModelError(Exception):
    """transformers can't build the family from its defaults made small, or needs what isn't installed."""


def tiny_encoder(model_type: str, auto: Any = transformers.AutoModel, **overrides: Any) -> PreTrainedModel:
    """A random encoder of a family, as ``tiny_family``; ``auto`` is the class of transformers for its head."""
    try:
        encodes = {"is_decoder": False} if hasattr(CONFIG_MAPPING[model_type](), "is_decoder") else {}
    except _UNBUILDABLE as e:
        raise NoTinyModelError(f"{type(e).__name__}: {e}") from e
    return tiny_family(model_type, auto, **encodes | overrides)


def tiny_family(model_type: str, auto: Any = transformers.AutoModelForCausalLM, **overrides: Any) -> PreTrainedModel:
    """A random decoder of a family, the same at every call; norm weights and biases are random too.

    Raises NoTinyModelError.
    """
    try:
        config = _tiny_config(model_type, overrides)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in auto.from_config(config).parameters())
        if parameters > _MOST_PARAMETERS:
            raise NoTinyModelError(f"{parameters:,} parameters")
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32).eval()
    except _UNBUILDABLE as e:
        raise NoTinyModelError(f"{type(e).__name__}: {e}") from e
    generator = torch.Generator().manual_seed(zlib.crc32(model_type.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.125)
            else:
                parameter.copy_(noise * 0.2 + (0 if name.endswith("bias") else 1))
    return model


def _tiny_config(model_type: str, overrides: dict[str, Any]) -> PretrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    fields = _shrunk(default)
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            nested = {k: v for k, v in _NESTED_OVERRIDES.get(model_type, {}).items() if hasattr(value, k)}
            fields[name] = type(value)(**(_shrunk(value) | nested))
    fields |= _OVERRIDES.get(model_type, {}) | overrides
    config: PretrainedConfig = kind(**fields)
    derived = "layer_types" in kind.attribute_map  # from a field with a name of its own
    if getattr(config, "layer_types", None) and "layer_types" not in fields and not derived:
        deeper: PretrainedConfig = kind(**(fields | {"num_hidden_layers": _DEEPER}))
        kinds = list(dict.fromkeys(deeper.layer_types))
        if len(kinds) > len(set(config.layer_types)):  # two layers don't show all of them
            config = kind(**(fields | {"num_hidden_layers": len(kinds), "layer_types": kinds}))
    config._attn_implementation = "eager"
    return config


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a configuration that make it small."""
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
        number = isinstance(value, int) and not isinstance(value, bool)
        special = name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if size is None or not (number or special) or (value == 0 and name in _ZERO_IS_OFF):
            continue
        fields[name] = size
    return fields


def tiny_whole(family: str, **fields: Any) -> PreTrainedModel:
    """A tiny random model with all its parts; norm weights and biases are random too."""
    config = CONFIG_MAPPING[family](**(WHOLES[family] | fields))
    whole: PreTrainedModel = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(family.encode()))
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.125)
            else:
                parameter.copy_(noise * 0.2 + (0 if name.endswith("bias") else 1))
    return whole
