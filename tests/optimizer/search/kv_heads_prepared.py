"""Tiny models whose key/value heads are searched for, as they are captured and as the search sees them."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.trace import trace
from enginewright.optimizer.pipeline.pipeline import default_pipeline, split_before
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from tests.conftest import make_tiny_model


@cache
def model_with_pairs(layer: int, heads: int = 4, hidden: int = 64) -> PreTrainedModel:
    """In one layer heads 0 and 1 are the same, 2 and 3, and so on: half of them costs nothing there."""
    model = make_tiny_model(
        "Llama", num_key_value_heads=heads, num_attention_heads=heads, hidden_size=hidden, head_dim=16
    )
    with torch.no_grad():
        for name in ("k_proj", "v_proj"):
            weight = model.get_submodule(f"model.layers.{layer}.self_attn.{name}").weight.view(heads // 2, 2, 16, -1)
            weight[:, 1] = weight[:, 0]
    return model


def captured_program(model: PreTrainedModel) -> Program:
    """To be rewritten at will."""
    return _captured(model).copy()


@cache
def _captured(model: PreTrainedModel) -> Program:
    weights = {
        name: Source(name, tuple(value.shape), value.dtype, lambda value=value: value)
        for name, value in model.state_dict().items()
    }
    return trace(build_model(model.config), weights)


def before_grouping(model: PreTrainedModel) -> Program:
    """Behind the passes that stand before ``GroupKvHeads`` and have work."""
    program = captured_program(model)
    passes, _ = split_before(default_pipeline(), "group_kv_heads")
    PassManager([p for p in passes if p.exact]).run(program)
    return program
