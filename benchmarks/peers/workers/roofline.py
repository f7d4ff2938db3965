"""Measures what the machine can do at most, and what share of it a bundle's program reaches."""

from __future__ import annotations

import sys

from enginewright import __version__
from enginewright.plugins.cpu import _cpu
from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.plugins.native.step_profile import StepProfile
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.step_costs import StepSizes, step_costs
from peers.workload import Report, Workload, serve

RUNS = 3
RECURRENT = ("stored_convolution", "stored_delta_rule", "stored_scan")
"""Ops of the program that read and write the states of recurrent layers."""


def roofline(model: str, work: Workload) -> Report:
    """Read bandwidth over as many bytes as a step reads and over what no cache holds, the peak of 8-bit products, and
    the share of it that products reach in a prefill, the scales of their groups included; the recurrences' share of
    time; and the bytes of weights and cache that a step reads and writes behind a long context."""
    bundle = Bundle.open(model)
    decode, prefill = StepSizes((1,), (work.prompt,)), StepSizes((work.prompt,), (work.prompt,))
    many = StepSizes((1,) * max(work.batches), (work.short_prompt,) * max(work.batches))
    runner = StepRunner(bundle, [prefill, many], threads=work.threads, isa=work.isa)
    runner.fill_caches()
    profile = profiled(runner, prefill)
    linears = [total for total in profile.by_op() if total.cost.products.get("i8")]
    read = sum(cost.weights for cost in step_costs(runner.lowered, decode))
    figures = {
        "bandwidth": _cpu.measure_bandwidth(1 << 30, work.threads),
        "bandwidth_of_weights": _cpu.measure_bandwidth(read, work.threads),
    }
    if linears:
        seconds = sum(t.seconds for t in linears)
        figures |= {
            "peak": _cpu.measure_peak("i8", work.threads, runner.program.isa),
            "matmul": sum(t.cost.products["i8"] for t in linears) / seconds / 1e9,
            "matmul_share_of_prefill": seconds / profile.kernels,
        }
    if any(step.op in RECURRENT for step in runner.lowered.steps):
        for name, sizes in (("prefill", prefill), ("decode_1", decode), (f"decode_{len(many.contexts)}", many)):
            figures[f"recurrence_share_of_{name}"] = recurrent_share(profiled(runner, sizes))
    behind = {"decode_long": work.long_prompt, "decode_far": work.far_prompt, "decode_farther": 2 * work.far_prompt}
    reads = {
        name: sum(cost.memory for cost in step_costs(runner.lowered, StepSizes((1,), (tokens,))))
        for name, tokens in behind.items()
    }
    return Report(f"enginewright {__version__}", "", figures, {"read": read, **reads})


def profiled(runner: StepRunner, sizes: StepSizes) -> StepProfile:
    """Profiles a step of these sizes, after a first one that warms up."""
    step, profile = runner.step(sizes), StepProfile()
    runner.program.run(step)
    for _ in range(RUNS):
        profile.run(runner.program, step)
    return profile


def recurrent_share(profile: StepProfile) -> float:
    """The share of the kernels' time that recurrences take, with their convolutions and without their projections."""
    return sum(total.seconds for total in profile.by_op() if total.key in RECURRENT) / profile.kernels


if __name__ == "__main__":
    serve(sys.modules[__name__])
