"""Programs as a target's fusions get them, and the bits that come out before and after: of torch and of the kernels."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.passes.framework.base import Pass, PassContext, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormat, WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.plugins.native.executable import CpuProgram, isas
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.lowered_program import LoweredProgram
from tests.passes.captured import captured
from tests.passes.lowering.reference_interpreter import stored
from tests.passes.small_programs import random_sequences

FORMATS = {
    "f32": WeightFormats(),
    "bf16": WeightFormats(default=WeightFormat(storage="bf16", activation="bf16")),
    "int8": WeightFormats(
        default=WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
    ),
}


@cache
def _prepared(family: str, storage: str, size: int) -> Program:
    program = captured(family, **({"n_embd": size} if family == "GPT2" else {"hidden_size": size}))
    passes, required = choose_passes({})
    PassManager(passes, PassContext(required, recipe=PassOptions(weights=FORMATS[storage]))).run(program)
    return program


def prepared(family: str, storage: str, size: int = 64) -> Program:
    """A tiny model after the pipeline, to be rewritten at will. ``size``: H."""
    return _prepared(family, storage, size).copy()


def fuse(before: Program, *passes: Pass) -> tuple[Program, PassRecord]:
    """The program after the passes, and what the last one did. Sees to it that no bit of the logits has changed."""
    after = before.copy()
    record = PassManager(passes).run(after)[-1]
    for lengths in ((5, 1, 9), (33,)):
        inputs = packed_inputs(before, _sequences(lengths))
        assert torch.equal(after.evaluate(inputs)[0], before.evaluate(inputs)[0])
    lowerings = [lower_program(program) for program in (before, after)]
    plain, fused = (plan_arena(lowering.program) for lowering in lowerings)
    assert set(fused.weights) == set(plain.weights)
    exprs = lowerings[0].weights
    weights = {u.name: _aligned(stored(exprs[u.name].evaluate(), u.layout, u.dtype)) for u in plain.weights}
    packed = packed_inputs(before, _sequences((13, 1, 4)))
    for isa in isas():
        one, two = _logits(plain, weights, packed, isa, 1), _logits(fused, weights, packed, isa, 2)
        assert np.array_equal(one, two), isa
    return after, record


def _sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor(s) for s in random_sequences(lengths, 60)]


def _logits(
    lowered: LoweredProgram,
    weights: dict[str, np.ndarray],
    given: dict[str, torch.Tensor],
    isa: str,
    threads: int,
) -> np.ndarray:
    """Computes those of all tokens [T, V], by the kernels."""
    inputs = {name: value.to(torch.int32).numpy() for name, value in given.items() if "cache:" not in name}
    groups = [g.name for g in lowered.cache_groups]
    blocks = {g: inputs[f"block_table:{g}"].size for g in groups}
    runnable = CpuProgram(lowered, weights, blocks=blocks, threads=threads, isa=isa)
    output = runnable.run(
        StepInput(
            **{name: inputs[name] for name in ("ids", "positions", "q_start", "kv_len", "rows")},
            block_table={g: inputs[f"block_table:{g}"] for g in groups},
            slots={g: inputs[f"slots:{g}"] for g in groups},
            outputs=("logits",),
        )
    )
    assert output.logits is not None
    return output.logits


def _aligned(value: torch.Tensor) -> np.ndarray:
    """A copy of the tensor's bytes in memory of torch, which is aligned."""
    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    return torch.empty_like(bits, memory_format=torch.contiguous_format).copy_(bits).numpy()
