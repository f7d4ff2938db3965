"""Tiny random decoders of transformers as captured, and the passes that normalise them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.trace import trace
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.framework.base import Pass, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from tests.conftest import make_tiny_model
from tests.passes.small_programs import random_sequences, whole_inputs


def tiny(family: str, **overrides: Any) -> tuple[PreTrainedModel, Program]:
    """A model and its captured program (copy it before rewriting). ``overrides``: fields of the configuration."""
    return _tiny(family, json.dumps(overrides))


@cache
def _tiny(family: str, overrides: str) -> tuple[PreTrainedModel, Program]:
    model = make_tiny_model(family, **json.loads(overrides))
    weights = {
        name: Source(name, tuple(value.shape), value.dtype, lambda value=value: value)
        for name, value in model.state_dict().items()
    }
    return model, trace(build_model(model.config), weights)


def captured(family: str, **overrides: Any) -> Program:
    """A program as captured, to be rewritten at will."""
    return tiny(family, **overrides)[1].copy()


def normalizing_passes() -> list[Pass]:
    """The pipeline up to the first fusion."""
    return list(takewhile(lambda p: not p.name.startswith("fuse_"), default_pipeline()))


def normalized(family: str, **overrides: Any) -> tuple[Program, list[PassRecord]]:
    """A program after those passes, and what they did."""
    program = captured(family, **overrides)
    return program, PassManager(normalizing_passes()).run(program)


def packed(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Step inputs of whole sequences of random tokens; every token's logits are wanted."""
    sequences = random_sequences(lengths, 250, seed)
    inputs = whole_inputs(sequences, rows=range(sum(lengths)))
    return {name: value.to(torch.int32) for name, value in inputs.items()}


def eager_logits(family: str, inputs: Mapping[str, torch.Tensor], **overrides: Any) -> torch.Tensor:
    """The logits of transformers' own attention, one sequence at a time: [T, V]."""
    model = tiny(family, **overrides)[0]
    lengths = inputs["q_start"].diff().tolist()
    with torch.no_grad():
        rows = [model(input_ids=ids[None].long(), use_cache=False).logits[0] for ids in inputs["ids"].split(lengths)]
    return torch.cat(rows)


def op_counts(program: Program) -> Counter[str]:
    """The number of calls of each op: {"ew.linear": 15, "aten.add": 4, ...}."""
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    return Counter(
        t._schema.name.replace("::", ".") if isinstance(t, torch._ops.OpOverload) else t.__name__ for t in calls
    )
