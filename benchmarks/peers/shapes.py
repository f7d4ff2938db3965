"""The sizes of models, and the GGUF file that a model of random weights has by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

CONTEXT = 8192
CONVOLUTION = 4


class Shape(Protocol):
    """The sizes of a decoder whose head is its table of tokens.

    Attributes:
        architecture: the value of ``general.architecture``.
        keys: keys of the file, without the architecture.
        tensors: the shape of each tensor of the file, rows first.
    """

    @property
    def architecture(self) -> str: ...

    @property
    def keys(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]: ...


def parameters(shape: Shape) -> int:
    """Returns the number of all weights."""
    return sum(math.prod(size) for size in shape.tensors.values())


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama. ``head``: the width of an attention head, where that isn't hidden / heads."""

    architecture: ClassVar[str] = "llama"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    head: int | None = None

    @property
    def keys(self) -> Mapping[str, Any]:
        """Implements ``Shape``."""
        return {
            **_common(self.hidden, self.layers, self.vocabulary),
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "rope.dimension_count": self.head or self.hidden // self.heads,
            "rope.freq_base": 100_000.0,
        }

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Implements ``Shape``."""
        head, hidden = self.head or self.hidden // self.heads, self.hidden
        layer = {
            "attn_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
            "attn_q.weight": (self.heads * head, hidden),
            "attn_k.weight": (self.kv_heads * head, hidden),
            "attn_v.weight": (self.kv_heads * head, hidden),
            "attn_output.weight": (hidden, self.heads * head),
            **_mlp(hidden, self.feed_forward),
        }
        return _whole(hidden, self.vocabulary, [layer] * self.layers)


@dataclass(frozen=True)
class DeltaShape:
    """The sizes of a hybrid like Qwen3.5.

    Attributes:
        every: every layer with this number, counted from 1, has attention; the others have the gated delta rule.
        heads, kv_heads, head: query heads, key and value heads and their width, of attention.
        states: the number of states of a layer with the gated delta rule.
        state: the width of keys and values there; a state is [state, state].
    """

    architecture: ClassVar[str] = "qwen35"
    hidden: int
    layers: int
    every: int
    heads: int
    kv_heads: int
    head: int
    states: int
    state: int
    feed_forward: int
    vocabulary: int

    @property
    def keys(self) -> Mapping[str, Any]:
        """Implements ``Shape``."""
        return {
            **_common(self.hidden, self.layers, self.vocabulary),
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "rope.dimension_count": self.head // 4,
            "rope.dimension_sections": [11, 11, 10, 0],
            "rope.freq_base": 1e7,
            "full_attention_interval": self.every,
            **_state_keys(self.states * self.state, self.state, self.states, self.states),
        }

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Implements ``Shape``."""
        hidden, inner = self.hidden, self.states * self.state
        both = {
            "attn_norm.weight": (hidden,),
            "post_attention_norm.weight": (hidden,),
            **_mlp(hidden, self.feed_forward),
        }
        delta = {
            "attn_qkv.weight": (3 * inner, hidden),
            "attn_gate.weight": (inner, hidden),
            "ssm_alpha.weight": (self.states, hidden),
            "ssm_beta.weight": (self.states, hidden),
            "ssm_conv1d.weight": (3 * inner, CONVOLUTION),
            "ssm_dt.bias": (self.states,),
            "ssm_a": (self.states,),
            "ssm_norm.weight": (self.state,),
            "ssm_out.weight": (hidden, inner),
        }
        attention = {
            "attn_q.weight": (2 * self.heads * self.head, hidden),
            "attn_k.weight": (self.kv_heads * self.head, hidden),
            "attn_v.weight": (self.kv_heads * self.head, hidden),
            "attn_q_norm.weight": (self.head,),
            "attn_k_norm.weight": (self.head,),
            "attn_output.weight": (hidden, self.heads * self.head),
        }
        kinds = [attention if (i + 1) % self.every == 0 else delta for i in range(self.layers)]
        return _whole(hidden, self.vocabulary, [both | kind for kind in kinds])


@dataclass(frozen=True)
class ScanShape:
    """The sizes of a Mamba-2: ``states`` of [head, state] in each layer, whose inputs and outputs are in one group."""

    architecture: ClassVar[str] = "mamba2"
    hidden: int
    layers: int
    states: int
    head: int
    state: int
    vocabulary: int

    @property
    def keys(self) -> Mapping[str, Any]:
        """Implements ``Shape``."""
        return {
            **_common(self.hidden, self.layers, self.vocabulary),
            "feed_forward_length": 0,
            "attention.head_count": 0,
            **_state_keys(self.states * self.head, self.state, self.states, 1),
        }

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Implements ``Shape``."""
        hidden, inner = self.hidden, self.states * self.head
        convolved = inner + 2 * self.state
        layer = {
            "attn_norm.weight": (hidden,),
            "ssm_in.weight": (inner + convolved + self.states, hidden),
            "ssm_conv1d.weight": (convolved, CONVOLUTION),
            "ssm_conv1d.bias": (convolved,),
            "ssm_dt.bias": (self.states,),
            "ssm_a": (self.states, 1),
            "ssm_d": (self.states, 1),
            "ssm_norm.weight": (1, inner),
            "ssm_out.weight": (hidden, inner),
        }
        return _whole(hidden, self.vocabulary, [layer] * self.layers)


def _common(hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    return {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": hidden,
        "vocab_size": vocabulary,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def _state_keys(inner: int, state: int, states: int, groups: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": CONVOLUTION,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": states,
        "ssm.group_count": groups,
    }


def _mlp(hidden: int, feed_forward: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = (feed_forward, hidden), (hidden, feed_forward)
    return {"ffn_gate.weight": wide, "ffn_up.weight": wide, "ffn_down.weight": narrow}


def _whole(hidden: int, vocabulary: int, layers: list[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    blocks = {f"blk.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items()}
    return {"token_embd.weight": (vocabulary, hidden), **blocks, "output_norm.weight": (hidden,)}
