"""Tiny embedding models, written as GGUF files by the names and keys of llama.cpp's converter.

Nothing here uses the reader under test. transformers' model of the same weights is the reference; jina-bert-v2, which
transformers doesn't have, has one written out here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModel

from .gguf_models import Array, add_key, interleaved

EPSILON = 0.03125
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_LAYER = re.compile(r"(?:.*\.)?layers?\.(\d+)\.(.+)\Z")
_TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "words": "token_embd",
    "types": "token_types",
    "first_norm": "token_embd_norm",
}
_BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_ATTENTION = {f"self_attn.{one}_proj": f"attn_{'output' if one == 'o' else one}" for one in "qkvo"}
_MLP = {f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")}
_POST = {"post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm"}
_DECODER = {**_ATTENTION, **_MLP, "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_DECODER |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
_GROUPS = {"num_key_value_heads": 2, "head_dim": 16, "type_vocab_size": None, "rms_norm_eps": EPSILON}
NORM, RMS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"


@dataclass(frozen=True)
class Encoder:
    """A tiny embedding model.

    Attributes:
        model_type: transformers' configuration class.
        config: what differs from ``SIZES``; None leaves one of those out.
        names: names of modules in a layer, by the model's.
        keys: what differs from the common keys; None leaves a key out.
        change: changes tensors, by the file's names.
    """

    model_type: str
    config: Mapping[str, Any]
    names: Mapping[str, str]
    keys: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[dict[str, Array]], dict[str, Array]] = dict


def fused(tensors: dict[str, Array]) -> dict[str, Array]:
    """Queries, keys and values as one tensor."""
    result = dict(tensors)
    for name in tensors:
        if ".attn_q." in name:
            parts = [result.pop(name.replace("attn_q", f"attn_{one}")) for one in "qkv"]
            result[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return result


def _interleaved(tensors: dict[str, Array]) -> dict[str, Array]:
    heads = {"attn_q": 4, "attn_k": 2}
    return {name: interleaved(v, heads[n]) if (n := name.split(".")[-2]) in heads else v for name, v in tensors.items()}


def _plus_one(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: value + 1 if "norm" in name else value for name, value in tensors.items()}


def gate_in_up(tensors: dict[str, Array]) -> dict[str, Array]:
    """Gates as the first rows of the tensor ffn_up."""
    result = dict(tensors)
    for name in tensors:
        if ".ffn_gate." in name:
            up = name.replace("gate", "up")
            result[up] = np.concatenate([result.pop(name), result[up]])
    return result


class JinaLayer(torch.nn.Module):
    """A layer of jina-bert-v2."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            setattr(self, name, torch.nn.Linear(size, size))
        for name in ("attn_output_norm", "layer_output_norm"):
            setattr(self, name, torch.nn.LayerNorm(size, EPSILON))
        self.ffn_gate, self.ffn_up = (torch.nn.Linear(size, width, bias=False) for _ in range(2))
        self.ffn_down = torch.nn.Linear(width, size)

    def forward(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Hidden states [S, H] to [S, H]."""
        q, k, v = (m(x).unflatten(-1, (heads, -1)).transpose(0, 1) for m in (self.attn_q, self.attn_k, self.attn_v))
        steps = torch.arange(len(x), dtype=torch.float32)
        slopes = torch.tensor(_slopes(heads))[:, None, None]
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) - slopes * (steps[:, None] - steps).abs()
        x = self.attn_output_norm(x + self.attn_output((scores.softmax(-1) @ v).transpose(0, 1).flatten(1)))
        return self.layer_output_norm(x + self.ffn_down(torch.nn.functional.gelu(self.ffn_gate(x)) * self.ffn_up(x)))


def _slopes(heads: int) -> list[float]:
    """The slopes of ALiBi's own code."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 / heads * (i + 1)) for i in range(heads)]
    power = 2 ** int(math.log2(heads))
    return _slopes(power) + _slopes(2 * power)[0::2][: heads - power]


class Jina(torch.nn.Module):
    """jina-bert-v2, with the interface of transformers' models that is used here."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        size = sizes["hidden_size"]
        self.heads = sizes["num_attention_heads"]
        self.words, self.types = torch.nn.Embedding(sizes["vocab_size"], size), torch.nn.Embedding(2, size)
        self.first_norm = torch.nn.LayerNorm(size, EPSILON)
        self.layers = torch.nn.ModuleList(
            JinaLayer(size, sizes["intermediate_size"]) for _ in range(sizes["num_hidden_layers"])
        )

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        """Ids [1, S] to hidden states [1, S, H]."""
        x = self.first_norm(self.words(input_ids[0]) + self.types.weight[0])
        for layer in self.layers:
            x = layer(x, self.heads)
        return (x[None],)


ENCODERS: Mapping[str, Encoder] = {
    "bert": Encoder("bert", {"layer_norm_eps": EPSILON}, _BERT, {NORM: EPSILON}),
    "nomic-bert": Encoder(
        "nomic_bert",
        {"layer_norm_eps": EPSILON, **_ROPE},
        {**_ATTENTION, **_MLP, **_POST},
        {NORM: EPSILON, "rope.freq_base": 1000.0},
        fused,
    ),
    "jina-bert-v2": Encoder("jina", {"num_attention_heads": 4}, {}, {NORM: EPSILON}, gate_in_up),
    "jina-bert-v3": Encoder(
        "jina_embeddings_v3",
        {"layer_norm_eps": EPSILON, **_ROPE},
        {**_ATTENTION, **_POST, "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
        {NORM: EPSILON, "rope.freq_base": 1000.0},
        fused,
    ),
    "modern-bert": Encoder(
        "modernbert",
        {
            "norm_eps": EPSILON,
            "type_vocab_size": None,
            "local_attention": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {
            "attn_norm": "attn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.Wo": "attn_output",
            "mlp_norm": "ffn_norm",
            "mlp.Wi": "ffn_up",
            "mlp.Wo": "ffn_down",
        },
        {
            NORM: EPSILON,
            RMS: 0.5,  # not read
            "rope.freq_base": 1000.0,
            "rope.freq_base_swa": 500.0,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
        },
    ),
    "eurobert": Encoder(
        "eurobert",
        {**_GROUPS, **_ROPE},
        _DECODER,
        {RMS: EPSILON, "attention.head_count_kv": 2, "rope.freq_base": 1000.0},
    ),
    "gemma-embedding": Encoder(
        "gemma3_text",
        {
            **_GROUPS,
            "sliding_window": 8,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {
            **_DECODER,
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        {
            RMS: EPSILON,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1000.0,
            "rope.freq_base_swa": 500.0,
            "attention.causal": None,
        },
        _plus_one,
    ),
    "llama-embed": Encoder(
        "llama",
        {**_GROUPS, **_ROPE, "is_causal": False},
        _DECODER,
        {RMS: EPSILON, "attention.head_count_kv": 2, "rope.freq_base": 1000.0, "rope.dimension_count": 16},
        _interleaved,
    ),
    "qwen3": Encoder(
        "qwen3",
        {**_GROUPS, **_ROPE},
        _DECODER,
        {
            RMS: EPSILON,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.freq_base": 1000.0,
            "attention.causal": None,
        },
    ),
    "qwen2": Encoder(  # a decoder whose tokens see both sides, as gte-Qwen2
        "qwen2",
        {**_GROUPS, **_ROPE, "head_dim": None, "is_causal": False},
        _DECODER,
        {RMS: EPSILON, "attention.head_count_kv": 2, "rope.freq_base": 1000.0},
    ),
}
"""A tiny model of each architecture."""


def build(architecture: str, seed: int = 0, **config: Any) -> Any:
    """A model with random weights, norms around 1 and random biases."""
    case = ENCODERS[architecture]
    fields = {key: value for key, value in (SIZES | dict(case.config) | config).items() if value is not None}
    if case.model_type == "jina":
        model: Any = Jina(fields)
    else:
        model = AutoModel.from_config(
            CONFIG_MAPPING[case.model_type](**fields), dtype=torch.float32, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.1 * random if parameter.dim() < 2 else 0.12 * random)
    return model.eval()


def hidden_states(model: Any, ids: Sequence[int]) -> Array:
    """The hidden states [S, H] of a text alone."""
    with torch.no_grad():
        states: Array = model(input_ids=torch.tensor([list(ids)]))[0][0].numpy()
    return states


def tensors_of(architecture: str, model: Any) -> dict[str, Array]:
    """The tensors that llama.cpp's converter writes of a model, by name."""
    case, tensors = ENCODERS[architecture], dict[str, Array]()
    for name, value in model.state_dict().items():
        path, _, suffix = name.rpartition(".")
        if path.startswith("pooler"):
            continue
        match = _LAYER.match(path)
        final = _TOP[path] if match is None else f"blk.{match[1]}.{case.names.get(match[2], match[2])}"
        tensors[f"{final}.{suffix}"] = value.numpy()
    return case.change(tensors)


def write_encoder(
    path: Path,
    architecture: str,
    model: Any,
    *,
    pooling: int | None = 1,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
    others: Mapping[str, Any] | None = None,
    quantized: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Writes a file; ``keys`` of the architecture, ``others`` and ``tensors`` are added, or left out if None.

    Args:
        path: the file, which is returned.
        architecture: its architecture.
        model: its model.
        pooling: pooling_type; None leaves it out.
        keys: see above.
        tensors: see above.
        others: see above.
        quantized: the type of the matrices in layers; F32 by default.
    """
    case, writer = ENCODERS[architecture], gguf.GGUFWriter(str(path), architecture)
    heads = case.config.get("num_attention_heads", SIZES["num_attention_heads"])
    common = {
        "context_length": SIZES["max_position_embeddings"],
        "block_count": SIZES["num_hidden_layers"],
        "embedding_length": SIZES["hidden_size"],
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": heads,
        "attention.causal": False,
        "pooling_type": pooling,
        **case.keys,
    }
    types = {"tokenizer.ggml.token_type_count": 2} if "token_types.weight" in tensors_of(architecture, model) else {}
    of_architecture = {f"{architecture}.{key}": value for key, value in (common | dict(keys or {})).items()}
    for key, value in (of_architecture | types | dict(others or {})).items():
        add_key(writer, key, value)
    for name, value in (tensors_of(architecture, model) | dict(tensors or {})).items():
        if value is None:
            continue
        value = np.ascontiguousarray(value, np.float32)
        if quantized is not None and value.ndim > 1 and name.startswith("blk."):
            writer.add_tensor(name, gguf.quantize(value, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
