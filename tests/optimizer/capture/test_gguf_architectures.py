"""Each architecture of GGUF files, against transformers' own model of the same weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from enginewright.optimizer.capture.capture_model import build_from_gguf
from enginewright.optimizer.capture.gguf import open_gguf
from enginewright.optimizer.capture.gguf_architectures import ARCHITECTURES, describe

from .gguf_models import CASES, build, write_model

TOKENS = 40
UNDECLARED = {"qwen3moe": {"head_dim"}, "bloom": {"max_position_embeddings"}}
"""Fields that aren't declared, and are read: the width of a head, and the longest context."""
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits [S, V] of a file, with its weights put into the model that was built for it."""
    model, weights = build_from_gguf(open_gguf(path))
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, weight in weights.items():
            state[name].copy_(weight.evaluate())
        model.config._attn_implementation = "eager"
        logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def expected(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits [S, V] of transformers' model."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def ids_of(seed: int = 0) -> torch.Tensor:
    """Token ids [S]."""
    return torch.randint(3, 120, (TOKENS,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", CASES)
def test_logits_are_those_of_transformers_model(architecture: str, tmp_path: Path) -> None:
    model = build(CASES[architecture])
    path = write_model(tmp_path / "tiny.gguf", architecture, model)
    torch.testing.assert_close(logits_of(path, ids_of()), expected(model, ids_of()), **TOLERANCE)


@pytest.mark.parametrize("architecture", CASES)
def test_the_class_has_every_field_that_is_set(architecture: str, tmp_path: Path) -> None:
    """A field of another name would be kept by the configuration, and read by nobody."""
    path = write_model(tmp_path / "tiny.gguf", architecture, build(CASES[architecture]))
    described = describe(open_gguf(path))
    kind = CONFIG_MAPPING[described.model_type]
    known = {item.name for item in fields(kind)} | set(kind.attribute_map) | set(kind().to_dict())
    assert set(described.fields) - known == UNDECLARED.get(architecture, set())


def test_every_architecture_has_a_case() -> None:
    assert set(CASES) | {"lfm2"} == set(ARCHITECTURES)
