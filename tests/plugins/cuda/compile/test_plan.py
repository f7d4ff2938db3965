from __future__ import annotations

from dataclasses import replace

import pytest

from enginewright.plugins.cuda.compile.plan import GpuModel
from enginewright.plugins.steps.planning import CountedSteps, Gpu, Shares
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepSizes, step_costs

SHARES = Shares(bandwidth=0.5, compute=0.25, memory=0.9, kernel=0.0, between_steps=0.0)
GPU = Gpu("G", "9.0", 1e10, 1e9, {"bf16": 8e9, "f32": 2e9}, "")
DECODE, PROMPT = StepSizes((1,) * 4, (100,) * 4), StepSizes((200,), (200,))


@pytest.mark.parametrize("sizes", [DECODE, PROMPT])
def test_each_step_takes_the_longer_of_its_bytes_and_its_products(
    sizes: StepSizes, tiny_program: LoweredProgram, tiny_steps: CountedSteps
) -> None:
    seconds = 0.0
    for cost in step_costs(tiny_program, sizes):
        activations = (cost.activations_read + cost.activations_written) / 2
        memory = (cost.weights + cost.kv_read + cost.kv_written + activations) / 0.5e9
        seconds += max(memory, 2 * cost.multiply_adds / 0.5e9)
    assert GpuModel(tiny_steps, GPU, SHARES, halved=True).seconds(sizes) == pytest.approx(
        seconds, rel=1e-12
    )  # sums of doubles


def test_a_kernel_and_a_step_take_a_least_time(tiny_program: LoweredProgram, tiny_steps: CountedSteps) -> None:
    endless = replace(GPU, bandwidth=1e30, peaks={"bf16": 1e30, "f32": 1e30})
    shares = replace(SHARES, kernel=1e-3, between_steps=0.5)
    model = GpuModel(tiny_steps, endless, shares, halved=True)
    assert model.seconds(DECODE) == pytest.approx(0.5 + len(tiny_program.steps) * 1e-3)
    assert model.bound(DECODE) == "kernels"


def test_what_a_step_waits_for(tiny_steps: CountedSteps) -> None:
    slow_memory = replace(GPU, bandwidth=1e6)
    slow_products = replace(GPU, peaks={"bf16": 1e3, "f32": 1e3})
    assert GpuModel(tiny_steps, slow_memory, SHARES, halved=True).bound(DECODE) == "memory"
    assert GpuModel(tiny_steps, slow_products, SHARES, halved=True).bound(DECODE) == "products"


def test_weights_of_fewer_bits_are_multiplied_as_bf16(tiny_program: LoweredProgram) -> None:
    """fp8's products count as f32 of the cpu target, which multiplies them so."""

    def narrow(program: LoweredProgram, dtype: str) -> LoweredProgram:
        steps = tuple(
            s.model_copy(
                update={
                    "inputs": tuple(
                        o.model_copy(update={"dtype": dtype}) if o.kind == "weight" and s.op == "linear" else o
                        for o in s.inputs
                    )
                }
            )
            for s in program.steps
        )
        return program.model_copy(update={"steps": steps})

    only_bf16 = replace(GPU, bandwidth=1e30, peaks={"bf16": 1e9, "f32": 1e30})
    only_f32 = replace(GPU, bandwidth=1e30, peaks={"bf16": 1e30, "f32": 1e9})
    linears = [step for step in tiny_program.steps if step.op == "linear"]
    program = tiny_program.model_copy(update={"steps": tuple(linears)})
    assert linears
    for dtype, slow, fast in (
        ("f32", only_f32, only_bf16),
        ("fp8", only_bf16, only_f32),
        ("bf16", only_bf16, only_f32),
    ):
        steps = CountedSteps(narrow(program, dtype))
        assert GpuModel(steps, slow, SHARES, halved=True).seconds(PROMPT) > 1e-3
        assert GpuModel(steps, fast, SHARES, halved=True).seconds(PROMPT) < 1e-12


def test_narrow_weights_are_read_as_fast_as_bytes_are_under_way(tiny_program: LoweredProgram) -> None:
    """A weight [N, K], few rows: 2 tiles of each program are on their way, 64 columns of 8 bits or 128 of 4."""
    (linear, *_) = [step for step in tiny_program.steps if step.op == "linear"]
    name = next(o.name for o in linear.inputs if o.kind == "weight")
    seconds = {}
    for dtype in ("f16", "i8", "i4"):
        uses = tuple(
            use.model_copy(update={"dtype": dtype, "layout": "rows"})
            for use in tiny_program.weights
            if use.name == name
        )
        operands = tuple(o.model_copy(update={"dtype": dtype}) if o.name == name else o for o in linear.inputs)
        step = linear.model_copy(update={"inputs": operands})
        steps = CountedSteps(tiny_program.model_copy(update={"steps": (step,), "weights": uses}))
        shares = replace(SHARES, latency=1e-6, narrow=0.5)
        fast = replace(GPU, bandwidth=1e12, peaks={"bf16": 1e30, "f32": 1e30}, multiprocessors=100)
        seconds[dtype] = GpuModel(steps, fast, shares, halved=False), steps.costs(DECODE)[0], uses[0].shape
    for dtype, bits, width in (("i8", 8, 64), ("i4", 4, 128)):
        model, cost, (columns, depth) = seconds[dtype]
        under_way = -(-columns // width) * 2 * width * min(depth, 128) * bits // 8
        rest = (cost.total - cost.weights) / 0.5e12
        assert model.seconds(DECODE) == pytest.approx(cost.weights / 0.5e12 * (1e12 * 1e-6 / under_way) + rest)
    model, cost, _ = seconds["f16"]
    assert model.seconds(DECODE) == pytest.approx(cost.total / 0.5e12)
