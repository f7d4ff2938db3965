"""What the runtime must know of a model, from its configuration and generation settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from enginewright.runtime.shared.contracts import ModelInfo

from .build_model import architecture

_DEFAULTS: dict[str, type] = {
    "do_sample": bool,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}


def model_info(
    model: PreTrainedModel,
    name: str,
    context_length: int,
    generation: Mapping[str, Any],
    tokenizer_eos: int | None = None,
) -> ModelInfo:
    """Describes ``model``.

    Args:
        model: from ``build_model``.
        name: what to call it.
        context_length: in tokens, from ``freeze_rope``.
        generation: generation settings as in generation_config.json; what isn't set there is no default.
        tokenizer_eos: the tokenizer's end of text, where neither settings nor configuration have one.
    """
    config = model.config.get_text_config()
    named = architecture(model.config) if getattr(model.config, "architectures", None) else type(model).__name__
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer_eos
    defaults = {
        key: kind(generation[key]) for key, kind in _DEFAULTS.items() if isinstance(generation.get(key), int | float)
    }
    bos = generation.get("bos_token_id", getattr(config, "bos_token_id", None))
    return ModelInfo(
        name=name,
        architecture=named,
        vocab_size=int(config.vocab_size),
        context_length=context_length,
        eos_token_ids=_tokens(eos if isinstance(eos, list | tuple) else [eos], int(config.vocab_size)),
        bos_token_id=next(iter(_tokens([bos], int(config.vocab_size))), None),
        parameters=sum(p.numel() for p in model.parameters()),
        generation_defaults=defaults,
    )


def _tokens(named: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """Those that the model has: configurations name some that it can't give, such as -1."""
    return tuple(int(token) for token in named if token is not None and 0 <= int(token) < vocab_size)
