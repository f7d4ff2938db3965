"""Fused ops as steps: one for each, with the operands of its parts, and the numbers of the parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import CacheOptions
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.runtime.shared.lowered_program import LoweredProgram, Step
from tests.passes.fusion.fused import fuse, prepared
from tests.passes.lowering.lowered import check, features, lower, ops
from tests.passes.small_programs import Shape, decoder, program_from

ew = torch.ops.ew

# Integers are the same but where a value lies between two; sums of float32 in another order.
TOLERANCE = 1e-5


class Weights(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(1 + 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(1)))
        self.b = torch.nn.Parameter(0.1 * torch.randn(size, generator=torch.Generator().manual_seed(2)))
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("codes", torch.randint(-9, 9, (8, size), generator=generator, dtype=torch.int8))
        self.register_buffer("scales", torch.rand(8, size // 8, generator=generator).half())


def step_of(program: LoweredProgram, op: str) -> Step:
    (step,) = (s for s in program.steps if s.op == op)
    return step


def result(m: torch.nn.Module, parts: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
    """All of what an op gives: the integers, which nothing but a product takes, with scales and sums in one."""
    values, scales, sums, *added = parts
    product = ew.quantized_linear(values, scales, sums, m.codes, m.scales, None, None, 8, 8, 8)
    return ew.take_rows(torch.cat([*added, product, scales, sums.float()], -1), rows)


CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    # The op, the attributes of its step, and how many weights it has.
    "rms_norm_quantize": (
        lambda m, x: ew.rms_norm_quantize(x, m.w, 1e-6, 8),
        {"eps": 1e-6, "group_size": 8, "has_weight": True},
        1,
    ),
    "layer_norm_quantize": (
        lambda m, x: ew.layer_norm_quantize(x, m.w, m.b, 1e-5, 8),
        {"eps": 1e-5, "group_size": 8, "has_weight": True, "has_bias": True},
        2,
    ),
    "add_rms_norm_quantize": (
        lambda m, x: ew.add_rms_norm_quantize(x, x * 2, None, 1e-6, 8),
        {"eps": 1e-6, "group_size": 8, "has_weight": False},
        0,
    ),
    "add_layer_norm_quantize": (
        lambda m, x: ew.add_layer_norm_quantize(x, x * 2, m.w, None, 1e-5, 8),
        {"eps": 1e-5, "group_size": 8, "has_weight": True, "has_bias": False},
        1,
    ),
}


@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("op", CASES)
def test_a_norm_that_quantizes(op: str, size: int) -> None:
    call, attrs, weights = CASES[op]
    program = program_from(lambda m, i: result(m, call(m, features(i, size)), i["rows"]), Weights(size))
    lowered = check(program, TOLERANCE)
    step = step_of(lowered, op)
    assert step.attrs == attrs
    assert len(step.inputs) == (2 if op.startswith("add") else 1) + weights
    # Values, scales and sums of groups; what was added comes last.
    assert [o.dtype for o in step.outputs] == ["i8", "f32", "i32", *(["f32"] * op.startswith("add"))]


def test_norms_of_rank_three_are_flattened() -> None:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = ew.rms_norm_quantize(features(i, 32).view(-1, 2, 16), None, 1e-6, 8)
        return result(m, tuple(p.flatten(1) for p in parts), i["rows"])

    lowered = check(program_from(call, Weights(32)), TOLERANCE)
    assert "copy" not in ops(lowered)[: ops(lowered).index("rms_norm_quantize")]


@pytest.mark.parametrize("shape", [Shape(windows=(0,)), Shape(windows=(8,), kv_heads=4, head_size=12)])
def test_a_rotation_that_writes_keys_and_values(shape: Shape) -> None:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    after, _ = fuse(program, FuseRopeKvWrite())  # compares the bits of both, lowered
    plain, lowered = lower(program).program, lower(after).program
    step = step_of(lowered, "rope_kv_write")
    assert step.attrs == {"interleaved": False}
    assert len(step.inputs) == 6 and len(step.outputs) == 1  # q, k, v, table, slots and the cache; q rotated
    assert ops(plain).count("rope") == 2 and ops(plain).count("kv_write") == 1
    assert not {"rope", "kv_write"} & set(ops(lowered))


def test_a_rotation_that_writes_to_two_caches() -> None:
    program = decoder(Shape(windows=(0,)))
    LowerAttention().run(program, PassContext())
    RoundKvCache().run(program, PassContext(recipe=PassOptions(kv_cache=CacheOptions(dtype="k4v4"))))
    after, _ = fuse(program, FuseRopeKvWrite(ends=True))
    step = step_of(lower(after).program, "rope_kv_write")
    assert step.attrs == {"interleaved": False, "has_ends": True}
    assert [operand.name for operand in step.inputs[4:]] == ["slots:full", "full/0", "full-ends/0", "slots:full-ends"]
    assert len(step.outputs) == 1


def test_nothing_is_fused_here() -> None:
    """Lowering makes steps of what it is given; parts that no pass has joined stay parts."""
    steps = ops(lower(prepared("Llama", "int8")).program)
    assert "rms_norm" in steps and "quantize_activation" in steps and "gated_activation" in steps
    assert not [s for s in steps if s.endswith("norm_quantize") or s == "rope_kv_write"]
