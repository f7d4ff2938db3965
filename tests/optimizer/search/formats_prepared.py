"""Tiny programs as ``auto`` searches them, tokens, and formats to choose from."""

from __future__ import annotations

from typing import Any

import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline, split_before
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from tests.passes.captured import captured

INT4_64 = WeightFormat(storage="int4", group_size=64, activation="int8", activation_group_size=64)
INT4_32 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT4_OFFSETS = WeightFormat(storage="int4", group_size=32, zero_point=True, activation="int8", activation_group_size=32)
INT4_CHANNEL = WeightFormat(storage="int4", activation="int8")
INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
BF16 = WeightFormat(storage="bf16", activation="bf16")
F32 = WeightFormat()


def before_formats(family: str, **overrides: Any) -> Program:
    program = captured(family, **overrides)
    PassManager(split_before(default_pipeline(), "choose_formats")[0]).run(program)
    return program


def random_tokens(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (n,), generator=generator, dtype=torch.int32) for n in lengths]
