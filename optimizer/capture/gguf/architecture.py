"""The record of an architecture of GGUF files, with the tensors and keys that several architectures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .file import GgufFile
from .keys import Keys
from .pooling import Pooling
from .rope import Rope
from .tensors import (
    Place,
    heads_apart,
    values_of,
)

Fields = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Description:
    """A file's contents in terms of transformers: a class with its fields, and the place of each tensor.

    Attributes:
        model_type: transformers' name of the configuration's class.
        fields: the fields of the configuration.
        ropes: kind of layer -> its rotary embedding; the key None is for all layers. {} for a model without.
        tensors: tensor's name in the file -> its place in the model.
        layer_prefix: prefix of the model's names of layers.
        layers: the number of layers.
        skipped: the names of tensors that aren't weights.
        zeros: the model's name -> the shape, of each weight that the file may omit and that is zero then.
        pooling: the pooling that the file states; None for a model that generates text.
    """

    model_type: str
    fields: Fields
    ropes: dict[str | None, Rope]
    tensors: Mapping[str, Place]
    layer_prefix: str
    layers: int
    skipped: tuple[str, ...] = ("rope_freqs.weight",)
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pooling: Pooling | None = None


@dataclass
class Reading:
    """A ``Description`` while the keys and tensors of a file are read.

    Attributes:
        keys: the keys of the architecture.
        file: the open file.
        blocks: the number of blocks of layers in the file, those of a draft model included.
        layers: the number of the model's layers.
        fields, ropes, tensors, model_type, skipped, zeros: as in ``Description``.
        heads: the number of query heads.
        head_dim: the width of a head.
        longrope: True if the frequencies have divisors for short and for long contexts.
    """

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
    zeros: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Returns True if the file has a tensor of this name."""
        return name in self.file.tensors


@dataclass(frozen=True)
class Architecture:
    """One architecture: its class in transformers, its tensors, and its differences from other architectures' keys.

    Attributes:
        model_type: transformers' name of the configuration's class.
        tensors: the place of each tensor, by the tensor's name in the file.
        layer_prefix: prefix of the model's names of layers.
        names: the class's own names of configuration fields, by the usual name; "" omits a field.
        layer_norm: the class's field for the epsilon of norms that subtract the mean; "" for RMS norms.
        fixed: the values of fields that the architecture implies.
        rotates: True if positions are rotary embeddings.
        partial: True if the class can rotate a part of each head.
        free_heads: True if the class can have heads whose size isn't hidden_size / heads.
        reads_yarn: True if llama.cpp reads YaRN's own parameters.
        drafts: True if blocks after the last layer may be a draft model, which is omitted.
        latent: True if keys and values are computed from a latent vector, which gives several fields its widths.
        longrope: True if the rotary frequencies may have divisors for short and for long contexts.
        mixed_layers: True if layers may differ in their numbers of heads and widths.
        attends: False if no layer has attention.
        harmless: keys that llama.cpp doesn't read for the architecture, or that have no effect here.
        tensor_flags: fields that are True if the first layer has a tensor, by the tensor's name there: "attn_q.bias".
        experts: the fields for the number of experts, for the number of a token's experts and, if the class has one,
            for an expert's width; () if ``read`` reads the experts, or there are none.
        read: the function that reads the other keys, after those of the fields above; None if there are no others.
        encoder: True if a token sees those after it, and the model gives numbers for a whole text.
        head: the activation within the head of a classifier.
    """

    model_type: str
    tensors: Mapping[str, Place]
    layer_prefix: str = "model.layers"
    names: Mapping[str, str] = field(default_factory=dict)
    layer_norm: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rotates: bool = True
    partial: bool = False
    free_heads: bool = True
    reads_yarn: bool = False
    drafts: bool = False
    latent: bool = False
    longrope: bool = False
    mixed_layers: bool = False
    attends: bool = True
    harmless: tuple[str, ...] = ()
    tensor_flags: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    read: Callable[[Reading], None] | None = None
    encoder: bool = False
    head: str = "tanh"


TOP = {
    "token_embd": Place("=model.embed_tokens"),
    "output_norm": Place("=model.norm"),
    "output": Place("=lm_head"),
}
ATTENTION = {
    "attn_q": Place("self_attn.q_proj"),
    "attn_k": Place("self_attn.k_proj"),
    "attn_v": Place("self_attn.v_proj"),
    "attn_output": Place("self_attn.o_proj"),
}
ATTENTION_APART = {
    **ATTENTION,
    "attn_q": Place("self_attn.q_proj", heads_apart("num_attention_heads")),
    "attn_k": Place("self_attn.k_proj", heads_apart("num_key_value_heads")),
}
NORMS = {"attn_norm": Place("input_layernorm"), "ffn_norm": Place("post_attention_layernorm")}
HEAD_NORMS = {"attn_q_norm": Place("self_attn.q_norm"), "attn_k_norm": Place("self_attn.k_norm")}
HUNYUAN_NORMS = {"attn_q_norm": Place("self_attn.query_layernorm"), "attn_k_norm": Place("self_attn.key_layernorm")}
MLP = {
    "ffn_gate": Place("mlp.gate_proj"),
    "ffn_up": Place("mlp.up_proj"),
    "ffn_down": Place("mlp.down_proj"),
}
DENSE = {**TOP, **ATTENTION, **NORMS, **MLP}
DENSE_APART = {**TOP, **ATTENTION_APART, **NORMS, **MLP}
WITHOUT_WINDOW = {"use_sliding_window": False, "sliding_window": None}


def experts(block: str, router: str) -> dict[str, Place]:
    """Returns the places of a mixture of experts whose gate and up matrices are one weight.

    Args:
        block: the module of the mixture within a layer; "" for the layer itself.
        router: the router's name within that module.
    """
    block = block and f"{block}."
    merged = f"{block}experts.gate_up_proj"
    return {
        "ffn_gate_inp": Place(f"{block}{router}"),
        "ffn_gate_exps.weight": Place(merged, None, 0, 1, whole=True),
        "ffn_up_exps.weight": Place(merged, None, 1, 1, whole=True),
        "ffn_gate_up_exps.weight": Place(merged, whole=True),
        "ffn_down_exps.weight": Place(f"{block}experts.down_proj", whole=True),
    }


def shared_expert(block: str) -> dict[str, Place]:
    """Returns the places of an expert that all tokens use; ``block`` is its module within a layer."""
    return {
        "ffn_gate_shexp": Place(f"{block}.gate_proj"),
        "ffn_up_shexp": Place(f"{block}.up_proj"),
        "ffn_down_shexp": Place(f"{block}.down_proj"),
    }


def read_experts(r: Reading, count: str, used: str, width: str | None = None) -> None:
    """Reads the numbers of experts into the fields ``count`` and ``used``, experts in all and experts of a token.

    ``width`` is the field for an expert's width; None if the class has no such field.
    """
    experts = r.keys.integer("expert_count")
    chosen = r.keys.same_for_all("expert_used_count", r.blocks)
    if not 0 < chosen <= experts:
        raise r.keys.refusal("expert_used_count", f"is {chosen}, of {experts} experts")
    r.fields |= {count: experts, used: chosen}
    if width is not None:
        default = r.fields.get("intermediate_size", 0) // chosen
        r.fields[width] = r.keys.same_for_all("expert_feed_forward_length", r.blocks, default) or default


def read_window(r: Reading, *, default: int | None, period: int) -> list[str] | None:
    """Reads the sliding window, and returns the kind of each layer; None if there is no window.

    Args:
        r: the reading. Its field ``sliding_window`` is set.
        default: the window of a file without the key; None if the architecture may be without a window.
        period: the number of layers after which one has full attention, if the file doesn't list the kinds.
    """
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


def read_swa_base(r: Reading, default: float) -> float:
    """Reads the base of the rotary frequencies of layers with a sliding window; ``default`` if the file has none."""
    return r.keys.number("rope.freq_base_swa", default)


def check_swa_base(r: Reading) -> None:
    """Raises UnsupportedModelError if layers with a sliding window have another rotary base than the others.

    It is for architectures whose class has only one base.
    """
    theta = r.ropes[None].theta
    if read_swa_base(r, theta) != theta:
        raise r.keys.refusal("rope.freq_base_swa", f"is another base than {theta}")


def read_factors(r: Reading) -> None:
    """Reads the divisors of the rotary frequencies: a tensor for contexts up to the original one, and one for longer
    ones.

    A file without these tensors changes nothing.
    """
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
