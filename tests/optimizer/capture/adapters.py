"""Adapters of tiny models, trained by nobody but saved by PEFT, and what PEFT itself makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import make_tiny_model

IDS = torch.arange(3, 40)[None]
"""Token ids [1, S] of every tiny model."""


def load(base: Path, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The model of a folder, in float32."""
    model: PreTrainedModel = auto.from_pretrained(base, dtype=torch.float32)
    return model.eval()


def save_base(folder: Path, family: str = "Llama", **overrides: Any) -> Path:
    """Saves a tiny model; returns its folder."""
    make_tiny_model(family, **overrides).save_pretrained(folder)
    return folder


def save_adapter(model: PreTrainedModel, folder: Path, *, seed: int = 1, **lora: Any) -> Any:
    """Saves an adapter of a model with random weights; returns PEFT's model, which has it unmerged."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**({"r": 4, "task_type": "CAUSAL_LM"} | lora)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    adapted.save_pretrained(str(folder))
    return adapted.eval()


def merged_by_peft(
    base: Path, adapters: Sequence[tuple[Path, float]], auto: Any = AutoModelForCausalLM
) -> dict[str, torch.Tensor]:
    """The base's tensors plus what PEFT's own merge of each adapter changes, times its weight."""
    from peft import PeftModel

    before = load(base, auto).state_dict()
    after = {name: tensor.clone() for name, tensor in before.items()}
    for folder, weight in adapters:
        merged = PeftModel.from_pretrained(load(base, auto), str(folder)).merge_and_unload().state_dict()
        for name, tensor in merged.items():
            after[name] += weight * (tensor - before[name])
    return after


def logits_of(model: Any) -> torch.Tensor:
    """Logits [S, V] of ``IDS``."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits[0]
    return logits
