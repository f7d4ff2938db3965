"""The facts about a model that the runtime needs, from its configuration and generation settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from enginewright.runtime.shared.contracts import ModelInfo

from .build_model import architecture
from .generation_settings import generation_defaults, token_ids


def model_info(
    model: PreTrainedModel,
    name: str,
    context_length: int,
    generation: Mapping[str, Any],
    tokenizer_eos: int | None = None,
    *,
    where: str = "generation settings",
) -> ModelInfo:
    """Describes ``model``. Raises SourceError naming a generation setting that has a wrong type.

    Args:
        model: from ``build_model``.
        name: the model's name.
        context_length: in tokens, from ``freeze_rope``.
        generation: generation settings as in generation_config.json.
        tokenizer_eos: the tokenizer's end token, used if neither settings nor configuration have one.
        where: the file of the generation settings, for messages.
    """
    config = model.config.get_text_config()
    named = architecture(model.config) if getattr(model.config, "architectures", None) else type(model).__name__
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer_eos
    bos = generation.get("bos_token_id", getattr(config, "bos_token_id", None))
    return ModelInfo(
        name=name,
        architecture=named,
        vocab_size=int(config.vocab_size),
        context_length=context_length,
        eos_token_ids=token_ids(eos, int(config.vocab_size), f"{where}: eos_token_id"),
        bos_token_id=next(iter(token_ids(bos, int(config.vocab_size), f"{where}: bos_token_id")), None),
        parameters=sum(p.numel() for p in model.parameters()),
        generation_defaults=generation_defaults(generation, where)[0],
    )
