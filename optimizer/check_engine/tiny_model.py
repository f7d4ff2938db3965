"""The tiny model of a check: a random Llama, the same at every call, exported for the cpu target and another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from enginewright.optimizer.export import export

from .engines import REFERENCE, TINY

_SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
}

_RECIPE = """
name = "check"

[weights.default]
storage = "f32"

[engines]
requests = 4
prompts = 2
chunk = 64
"""
"""The recipe of the tiny model, without a type of activations, which is the target's default.

The sizes of the model are small, so that few kernels are compiled.
"""


def export_tiny(folder: Path, target: str, gpus: Sequence[str]) -> Path:
    """Exports a random tiny model for the cpu target and another target, and returns the bundle's path.

    Args:
        folder: an existing folder, which gets the bundle.
        target: the other target.
        gpus: compute capabilities; empty for the target's default.

    Raises the errors of ``export``.
    """
    recipe = folder / "check.toml"
    recipe.write_text(_RECIPE, encoding="utf-8")
    config = transformers.LlamaConfig(**_SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.125 if parameter.dim() > 1 else 1 + noise * 0.2)
    path = folder / "check.bundle"
    export(model, path, recipe=recipe, targets=(REFERENCE, target), gpus=list(gpus) or None, name=TINY)
    return path
