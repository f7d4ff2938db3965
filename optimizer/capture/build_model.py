"""Builds a decoder from its configuration without giving memory to its weights."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from . import attention_interface, experts_interface
from .text_part import find_text_part, is_text_with_head

# What transformers and torch raise for sizes and names that don't fit together.
_UNBUILDABLE: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    RuntimeError,
    ArithmeticError,
)
_UNBUILDABLE += (AssertionError, MemoryError)

_KERNELS = "transformers.integrations.hub_kernels"
"""The module of transformers that logs, for each recurrent function, the advice to install a package for GPUs."""

_DECODERS = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""The names of transformers' classes for causal language models."""


def build_model(
    config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None, *, eager: bool = False
) -> PreTrainedModel:
    """Builds a float32 decoder in eval mode, to be captured or to be run.

    Parameters are allocated but never written, so they use address space and no memory. Buffers that the model computes
    itself (such as rotary frequencies) have their values. ``config`` isn't changed.

    Args:
        config: the configuration of a decoder-only language model.
        model_class: the class to build; by default transformers' class for the configuration.
        eager: False builds a model to capture: its attention and experts call our functions. True builds the model to
            run, with transformers' own eager attention and experts. It can't be changed later, because some classes
            choose their attention when they are built.

    Raises:
        UnsupportedModelError: not a decoder-only language model, or its attention doesn't use transformers' interface.
    """
    check_decoder(config, model_class)
    return _built(config, model_class, eager=eager)


def build_pooled(
    config: PretrainedConfig, model_class: type[PreTrainedModel], *, pools: bool, eager: bool = False
) -> PreTrainedModel:
    """Builds an encoder, or a decoder whose hidden states are pooled, as ``build_model`` builds a decoder.

    Args:
        config: the configuration.
        model_class: the class to build.
        pools: False leaves out a pooling module of the class, whose result isn't used.
        eager: as for ``build_model``.

    Raises the errors of ``build_model``.
    """
    return _built(config, model_class, eager=eager, **({} if pools else without_pooling(model_class)))


def without_pooling(model_class: type[PreTrainedModel]) -> dict[str, bool]:
    """Returns the argument that makes a class omit its pooling module; {} if the class has no such argument."""
    optional = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if optional else {}


def _built(
    config: PretrainedConfig, model_class: type[PreTrainedModel] | None, *, eager: bool, **options: bool
) -> PreTrainedModel:
    logging.getLogger(_KERNELS).addFilter(_is_no_advice)
    config = copy.deepcopy(config)
    config.use_cache = False
    attention_interface.register()
    experts_interface.register()
    try:
        if eager:
            model = _from_config(config, model_class, "eager", "eager", **options)
        else:
            model = _captured_from_config(config, model_class, **options)
    except _UNBUILDABLE as e:
        raise UnsupportedModelError(
            f"transformers can't build {architecture(config)} from its configuration: {e}",
            hint="Its attention must be on transformers' attention interface, and its sizes must fit together.",
        ) from e
    model.tie_weights()
    model.eval().requires_grad_(False)
    return model


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Filters logs: returns False for transformers' advice to install a package for its recurrent functions.

    The packages are for GPUs. Here the model is only captured, sampled from or compared with.
    """
    return "is falling back to its reference PyTorch implementation" not in record.getMessage()


def _captured_from_config(
    config: PretrainedConfig, model_class: type[PreTrainedModel] | None, **options: bool
) -> PreTrainedModel:
    try:
        return _from_config(config, model_class, attention_interface.NAME, experts_interface.NAME, **options)
    except KeyError as e:
        if e.args != (attention_interface.NAME,):
            raise
    # Attention classes of its own: the one that writes attention out, with masks of ours.
    model = _from_config(config, model_class, "eager", experts_interface.NAME, **options)
    model.config._attn_implementation = attention_interface.NAME
    return model


def _from_config(
    config: PretrainedConfig, model_class: type[PreTrainedModel] | None, attention: str, experts: str, **more: bool
) -> PreTrainedModel:
    options: dict[str, Any] = {
        **more,
        "attn_implementation": attention,
        "experts_implementation": experts,
        "dtype": torch.float32,
    }
    with no_init_weights():
        if model_class is None:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        else:
            model = model_class._from_config(config, **options)
    return model


def architecture(config: PretrainedConfig) -> str:
    """Returns the class of transformers named by a configuration, or else the model type."""
    named = getattr(config, "architectures", None)
    return str(named[0]) if named else str(config.model_type)


def check_decoder(config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None) -> None:
    """Raises UnsupportedModelError if the model isn't a decoder-only language model. ``model_class`` is as in
    ``build_model``.
    """
    check_own_code(config)
    if not is_decoder(config, model_class):
        kind = architecture(config) if model_class is None else model_class.__name__
        seq2seq = ": it is an encoder with a decoder" if getattr(config, "is_encoder_decoder", False) else ""
        raise UnsupportedModelError(f"{kind} isn't a decoder-only language model{seq2seq}", hint=_hint(config))


def check_own_code(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError for a model with Python code of its own (``auto_map``), which is never run."""
    if getattr(config, "auto_map", None):
        raise UnsupportedModelError(
            f"{architecture(config)}: the model comes with code of its own (auto_map in config.json), which is never "
            "run",
            hint="Models that transformers itself implements can be compiled.",
        )


def is_decoder(config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None) -> bool:
    """Returns True if the whole model is a decoder-only language model of text.

    ``model_class``: see ``build_model``.
    """
    return not (
        getattr(config, "is_encoder_decoder", False)
        or any(hasattr(config, part) for part in ("vision_config", "audio_config"))
        or (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING if model_class is None else not _is_decoder(model_class))
        or (
            getattr(config, "architectures", None)
            and architecture(config) not in _DECODERS
            and not architecture(config).endswith(("ForCausalLM", "LMHeadModel"))
        )
    )


def class_of_part(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class of a text decoder whose configuration transformers lists only for the whole model.

    For example, ``Emu3ForCausalLM`` has a configuration of its own, but is only listed for the whole Emu3. Returns None
    if the configuration is listed for a decoder, or names no decoder.
    """
    name = architecture(config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or name not in _DECODERS:
        return None
    named = getattr(transformers, name, None)
    return named if isinstance(named, type) and getattr(named, "config_class", None) is type(config) else None


def _hint(config: PretrainedConfig) -> str:
    """Returns the hint for a model that isn't a decoder. It names the model's text part if that can be exported."""
    hint = "Enginewright compiles decoders that write text, and encoders that give vectors, scores or classes for it."
    try:
        part = find_text_part(config, architecture(config))
    except (SourceError, UnsupportedModelError):
        part = None
    if part is None:
        return hint
    decoder = part.model_class.__name__
    return f"{hint} optimize export MODEL --part text takes this one's, {decoder}, and leaves the rest out."


def _is_decoder(model_class: type[PreTrainedModel]) -> bool:
    """Returns True if the class is, or derives from, one of transformers' classes for causal language models."""
    return is_text_with_head(model_class) or any(c.__name__ in _DECODERS for c in model_class.__mro__)
