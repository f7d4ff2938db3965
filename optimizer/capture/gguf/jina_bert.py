"""The model of jina-bert-v2, which transformers doesn't have: BERT without positions, with symmetric ALiBi and gates.

Reference: Günther et al., Jina Embeddings 2: 8192-Token General-Purpose Text Embeddings for Long Documents (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@strict
class JinaBertConfig(PreTrainedConfig):
    """The sizes of a model.

    Attributes:
        gated: True if the feed-forward network has a gate.
        up_bias, gate_bias: True if its first two matrices have biases.
        head_norms: True if queries and keys are normalized.
        second_norm: True if the input is added once more after attention, and normalized.
    """

    model_type = "jina_bert_v2"

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 8192
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    gated: bool = True
    up_bias: bool = False
    gate_bias: bool = False
    head_norms: bool = False
    second_norm: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def alibi_slopes(heads: int) -> torch.Tensor:
    """Returns the slope of each head [N]: Press et al., Train Short, Test Long (2022)."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(first + between)


def _with_slopes(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    slopes: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as ``attention_function`` does, with a bias of -slope * distance, for one text without a
    mask.
    """
    positions = torch.arange(query.shape[2])
    distances = (positions[:, None] - positions[None, :]).abs().float()
    scores = query @ key.transpose(2, 3) * scaling - slopes[:, None, None] * distances
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class JinaBertAttention(torch.nn.Module):
    """Bidirectional self-attention with linear biases: a score falls with the distance of query and key."""

    def __init__(self, config: JinaBertConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, False
        size = config.hidden_size
        self.query, self.key, self.value, self.dense = (torch.nn.Linear(size, size) for _ in range(4))
        norms = [torch.nn.LayerNorm(size, config.layer_norm_eps) for _ in range(2)] if config.head_norms else []
        self.query_norm: torch.nn.LayerNorm | None = norms[0] if norms else None
        self.key_norm: torch.nn.LayerNorm | None = norms[1] if norms else None
        self.slopes = torch.nn.Buffer(alibi_slopes(config.num_attention_heads), persistent=False)

    def forward(self, hidden: torch.Tensor, mask: Any) -> torch.Tensor:
        query, key = self.query(hidden), self.key(hidden)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        width = self.config.hidden_size // self.config.num_attention_heads
        heads = [x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (query, key, self.value(hidden))]
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _with_slopes
        )
        result: torch.Tensor = self.dense(
            attend(self, *heads, mask, scaling=width**-0.5, slopes=self.slopes)[0].flatten(2)
        )
        return result


class JinaBertFeedForward(torch.nn.Module):
    """A feed-forward network, by default with a gate."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
        self.up = torch.nn.Linear(size, width, bias=config.up_bias)
        self.gate = torch.nn.Linear(size, width, bias=config.gate_bias) if config.gated else None
        self.down = torch.nn.Linear(width, size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden)
        inner = self.activation(up) if self.gate is None else self.activation(self.gate(hidden)) * up
        result: torch.Tensor = self.down(inner)
        return result


class JinaBertLayer(torch.nn.Module):
    """Attention and a feed-forward network, each added to its input and then normalized."""

    def __init__(self, config: JinaBertConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = JinaBertAttention(config, layer_idx)
        self.feed_forward = JinaBertFeedForward(config)
        self.attention_norm = torch.nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.second_norm = torch.nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.second_norm else None
        self.output_norm = torch.nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor, mask: Any) -> torch.Tensor:
        inner = self.attention_norm(hidden + self.attention(hidden, mask))
        if self.second_norm is not None:
            inner = self.second_norm(hidden + inner)
        result: torch.Tensor = self.output_norm(inner + self.feed_forward(inner))
        return result


class JinaBertModel(PreTrainedModel):
    """The hidden states of texts. Weights have the names that the table of GGUF tensors gives them."""

    config_class = JinaBertConfig
    base_model_prefix = "jina_bert"
    _supports_attention_backend = True
    _supports_sdpa = False

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.words = torch.nn.Embedding(config.vocab_size, size)
        self.types = torch.nn.Embedding(config.type_vocab_size, size)
        self.norm = torch.nn.LayerNorm(size, config.layer_norm_eps)
        self.layers = torch.nn.ModuleList(JinaBertLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.words

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> BaseModelOutput:
        """Returns hidden states [1, S, H] of a text without padding, ids and types [1, S]."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        hidden = self.norm(self.words(input_ids) + self.types(types))
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return BaseModelOutput(last_hidden_state=hidden)
