"""Fixes rotary frequencies that transformers recomputes for the longest position of each batch.

With dynamic NTK and LongRoPE scaling (``rope_type`` "dynamic" and "longrope"), the frequencies change once a position
of the batch exceeds the original context. One request would then change another's numbers, and cached keys would have
other frequencies than later queries. So a bundle has the frequencies of one context length: by default the original
one, up to which transformers' frequencies are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from enginewright.runtime.shared.errors import UnsupportedModelError

_FIXED = "default"  # a rope_type whose frequencies transformers leaves alone
_DEFAULT_CONTEXT = 2048  # of models that don't say


def freeze_rope(model: PreTrainedModel, context_length: int | None = None) -> int:
    """Fixes the frequencies of ``model``, in place, to those of a context length, and returns that length.

    Args:
        model: any decoder of transformers; one with fixed frequencies isn't changed.
        context_length: in tokens; by default the longest at which the model has its original frequencies.

    Raises:
        UnsupportedModelError: the model's maximum is shorter, or its frequencies can't be fixed.
    """
    model_length = own_context_length(model.config)
    ropes = [(path, m, layer) for path, m in model.named_modules() for layer in _of_the_batch(m)]
    originals = [_original(m, layer, model_length) for _, m, layer in ropes]
    longest = max([model_length, *(n * _factor(m, layer) for n, (_, m, layer) in zip(originals, ropes, strict=True))])
    if context_length is not None and context_length > longest:
        raise UnsupportedModelError(
            f"{type(model).__name__} is made for at most {longest} tokens, and a context_length of {context_length} "
            "was asked for",
            hint="Choose a shorter context_length.",
        )
    length = context_length or min((model_length, *originals))
    for path, module, layer in ropes:
        _freeze(path, module, layer, length)
    return length


def own_context_length(config: PretrainedConfig) -> int:
    """Returns ``max_position_embeddings``, or the family's own field for it; 2048 if there is none."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")  # of most, of speech, of MPT
    lengths = (getattr(text, name, None) for name in names)
    return next((int(length) for length in lengths if length), _DEFAULT_CONTEXT)


def _of_the_batch(module: torch.nn.Module) -> list[str | None]:
    """Returns the kinds of layers for which a module recomputes frequencies in each batch; [None] if it has no
    kinds.
    """
    rope_type: Any = getattr(module, "rope_type", None)
    kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    return [
        layer for layer, kind in kinds.items() if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    ]


def _settings(module: torch.nn.Module, layer_type: str | None) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    settings = getattr(config, "rope_parameters", None) or {}
    of_type = settings.get(layer_type) if layer_type is not None else settings
    return dict(of_type or {})


def _original(module: torch.nn.Module, layer_type: str | None, own: int) -> int:
    """Returns the longest context at which the frequencies of a rotary module aren't scaled.

    Args:
        module: the rotary module.
        layer_type: the kind of layers; None if the module has no kinds.
        own: the result if the module doesn't state it.
    """
    length = _settings(module, layer_type).get("original_max_position_embeddings")
    return int(length or getattr(module, "original_max_seq_len", None) or own)


def _factor(module: torch.nn.Module, layer_type: str | None) -> int:
    factor = _settings(module, layer_type).get("factor")
    return max(1, int(factor)) if isinstance(factor, int | float) else 1


def _freeze(path: str, module: torch.nn.Module, layer_type: str | None, length: int) -> None:
    """Makes a module compute its frequencies for a context of ``length`` tokens, and never change them afterwards.

    Args:
        path: the module's path, for messages.
        module: the rotary module.
        layer_type: the kind of layers; None if the module has no kinds.
        length: the context in tokens.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    longest = torch.tensor([[length - 1]])
    try:
        with torch.no_grad():
            getattr(module, f"{prefix}inv_freq").copy_(getattr(module, f"{prefix}original_inv_freq"))
            module(torch.zeros(1, 1, 1), longest, *(() if layer_type is None else (layer_type,)))
    except (AttributeError, TypeError, RuntimeError, KeyError, ValueError) as e:
        raise UnsupportedModelError(
            f"{path}: its frequencies depend on the longest position in the batch, and can't be fixed: {e}",
            hint="Choose a model, or set rope_parameters to a scaling, with fixed frequencies.",
        ) from e
    rope_type: Any = module.rope_type
    if isinstance(rope_type, dict):
        rope_type[layer_type] = _FIXED
    else:
        module.rope_type = _FIXED  # type: ignore[assignment]
