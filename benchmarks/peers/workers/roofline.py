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


def roofline(model: str, work: Workload) -> Report:
    """Read bandwidth over as many bytes as a step reads and over what no cache holds, the peak of 8-bit products, and
    the share of it that products reach in a prefill, the scales of their groups included; and the bytes of weights and
    cache that a step reads and writes behind a long context."""
    bundle = Bundle.open(model)
    decode, prefill = StepSizes((1,), (work.prompt,)), StepSizes((work.prompt,), (work.prompt,))
    runner = StepRunner(bundle, [prefill], threads=work.threads)
    runner.fill_caches()
    step, profile = runner.step(prefill), StepProfile()
    runner.program.run(step)
    for _ in range(RUNS):
        profile.run(runner.program, step)
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
    behind = {"decode_long": work.long_prompt, "decode_far": work.far_prompt, "decode_farther": 2 * work.far_prompt}
    reads = {
        name: sum(cost.memory for cost in step_costs(runner.lowered, StepSizes((1,), (tokens,))))
        for name, tokens in behind.items()
    }
    return Report(f"enginewright {__version__}", "", figures, {"read": read, **reads})


if __name__ == "__main__":
    serve(sys.modules[__name__])
