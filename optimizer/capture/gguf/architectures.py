"""The readable architectures of GGUF files: for each its keys, its tensors and its class of transformers.

A key is used (a function here reads it), harmless (``HARMLESS``, ``NEUTRAL`` and ``Architecture.harmless``), or refused
by name: ``Keys.refuse_unread`` refuses every unread key of the architecture. Defaults and meanings are llama.cpp's:
https://github.com/ggml-org/llama.cpp/tree/master/src/models has one file for each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

from enginewright.runtime.shared.errors import UnsupportedModelError

from . import (
    dense_architectures,
    encoder_architectures,
    gemma_architectures,
    layer_norm_architectures,
    mixture_architectures,
    recurrent_architectures,
)
from .architecture import FULL, Architecture, Description, Fields, Reading, read_experts
from .file import GgufFile
from .keys import NORM, RMS, Keys
from .pooling import KEY, Pooling, read_pooling
from .rope import Rope, read_rope
from .tensors import size_of

ARCHITECTURES: Mapping[str, Architecture] = {
    **dense_architectures.ARCHITECTURES,
    **encoder_architectures.ARCHITECTURES,
    **gemma_architectures.ARCHITECTURES,
    **layer_norm_architectures.ARCHITECTURES,
    **mixture_architectures.ARCHITECTURES,
    **recurrent_architectures.ARCHITECTURES,
}
"""Each architecture by its name in general.architecture."""

_REFUSED = {
    **dict.fromkeys(("nomic-bert-moe", "neo-bert"), "an encoder that transformers has no class for"),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "a diffusion model"),
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), "a model of speech"),
    **dict.fromkeys(("eagle3", "dflash", "gemma4-assistant"), "a draft model, which runs within another"),
    **dict.fromkeys(("t5", "t5encoder"), "an encoder of T5, whose biases of attention aren't read"),
}
"""Architecture that can't be read -> its description, for the error."""


def describe(file: GgufFile) -> Description:
    """Converts all keys of a file to a configuration of transformers.

    Raises:
        UnsupportedModelError: the architecture is unknown, or a key can't be supported.
        SourceError: a key is missing or has another type.
    """
    name = file.architecture
    if (kind := _REFUSED.get(name)) is not None:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture {name!r} is {kind}",
            hint="Pass the GGUF file of a model that generates text, or of an embedding model.",
        )
    known = ARCHITECTURES.get(name)
    if known is None:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture {name!r:.80} can't be read from GGUF files",
            hint="Export from the model's Hugging Face directory.",
        )
    keys = Keys(file)
    reading = _read_common(keys, known)
    for flag, tensor in known.tensor_flags.items():
        reading.fields[flag] = reading.has(f"blk.0.{tensor}")
    if known.experts:
        read_experts(reading, *known.experts)
    if known.read is not None:
        known.read(reading)
    pooling = _read_pooling(reading, known)
    keys.refuse_unread(known.harmless)
    fields, names = reading.fields, dict(known.names)
    if known.layer_norm:
        names["rms_norm_eps"] = known.layer_norm
    ropes: dict[str | None, Rope] = {} if reading.longrope else reading.ropes
    if reading.ropes:
        fields["rope_parameters"] = _rope_parameters(reading)
    return Description(
        reading.model_type,
        {names.get(key, key): value for key, value in fields.items() if names.get(key, key)},
        ropes,
        reading.tensors,
        known.layer_prefix,
        reading.layers,
        tuple(reading.skipped),
        reading.zeros,
        pooling,
    )


def _read_pooling(r: Reading, known: Architecture) -> Pooling | None:
    """Reads the pooling that a file states; None for a model that generates text.

    Raises the errors of ``read_pooling``. Raises UnsupportedModelError for an encoder that is causal, for a
    bidirectional decoder that generates text, and for a recurrent model with a pooling.
    """
    architecture = r.file.architecture
    causal = r.keys.flag("attention.causal", architecture != "gemma-embedding") and architecture != "gemma-embedding"
    pooling = read_pooling(r.keys, encoder=known.encoder, causal=causal, size=r.fields["hidden_size"], head=known.head)
    if pooling is None:
        if not causal:
            raise r.keys.refusal("attention.causal", "is false, and the file has no pooling_type")
        return None
    if architecture in recurrent_architectures.ARCHITECTURES:
        raise r.keys.refusal(KEY, "is of a recurrent model")
    if known.encoder and causal:
        raise r.keys.refusal("attention.causal", "isn't false, as it is for encoders")
    if not causal and not known.encoder:
        if r.fields.get("sliding_window"):
            raise r.keys.refusal("attention.causal", "is false, for a decoder with a sliding window")
        r.fields["is_causal"] = False
    if pooling.task != "embed":
        r.fields["id2label"] = dict(enumerate(pooling.labels or ("score",)))
    r.tensors |= pooling.tensors
    r.skipped += ["output.weight", "output.bias"]  # the head of a language model
    return pooling


def _read_common(keys: Keys, known: Architecture) -> Reading:
    """Reads the keys that all architectures have."""
    file = keys.file
    blocks = keys.integer("block_count")
    layers = blocks - (keys.integer("nextn_predict_layers", 0) if known.drafts else 0)
    if layers < 1:
        raise keys.refusal("nextn_predict_layers", f"leaves {layers} layers of {blocks}")
    hidden, context = keys.integer("embedding_length"), keys.integer("context_length")
    heads, kv, head_dim = _read_heads(keys, known, blocks, hidden) if known.attends else (0, 0, 0)
    fields: Fields = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number(NORM if known.layer_norm else RMS),
        "vocab_size": size_of(file, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "intermediate_size": max(keys.by_layer("feed_forward_length", blocks, 0)),
        **known.fixed,
    }
    if known.attends:
        fields |= {"num_attention_heads": heads, "num_key_value_heads": kv}
    if not known.mixed_layers:
        keys.same_for_all("feed_forward_length", blocks, 0)
    if known.free_heads and known.attends:
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


def _read_heads(keys: Keys, known: Architecture, blocks: int, hidden: int) -> tuple[int, int, int]:
    """Reads the numbers of query heads and of key and value heads, and the width of a head."""
    heads = keys.same_for_all("attention.head_count", blocks)
    kv = max(keys.by_layer("attention.head_count_kv", blocks, heads)) or heads
    if not known.mixed_layers:
        kv = keys.same_for_all("attention.head_count_kv", blocks, heads)
    if not heads or not kv or heads % kv:
        raise keys.refusal("attention.head_count_kv", f"is {kv}, for {heads} heads")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if not known.latent and keys.integer("attention.value_length", hidden // heads) != head_dim:
        raise keys.refusal("attention.value_length", f"differs from the length of keys, {head_dim}")
    if not known.free_heads and head_dim * heads != hidden:
        raise keys.refusal("attention.key_length", f"is {head_dim}, for {heads} heads and {hidden} columns")
    return heads, kv, head_dim


def _rope_parameters(r: Reading) -> Fields:
    common: Fields = r.fields["rope_parameters"]
    if None in r.ropes:
        return common
    parameters = {kind: {**common, "rope_theta": rope.theta} for kind, rope in r.ropes.items() if kind is not None}
    if r.model_type == "gemma4_text":  # all frequencies of a head, of which the file's divisors leave some
        parameters[FULL] |= {"rope_type": "proportional", "partial_rotary_factor": 1.0}
    return parameters
