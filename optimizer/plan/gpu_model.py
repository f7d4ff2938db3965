"""How long a step takes on a GPU, by what its maker states: a prediction that no run of ours has confirmed.

Each step of the program takes as long as its bytes need at a share of the memory's bandwidth, or its products at a
share of the cores' peak, whichever is more (the roofline of ``report/roofline.py``), and never less than a kernel
without work does. Weights are read as they are stored, and multiplied as bf16, but for those of 32-bit floats.
"""

from __future__ import annotations

from enginewright.plugins.shared.lowered_program import Step
from enginewright.plugins.shared.step_costs import StepCost, StepSizes

from .devices import Gpu, Shares
from .step_kinds import CountedSteps


class GpuModel:
    """One program on one GPU.

    Args:
        steps: of the program.
        gpu: which.
        shares: of its figures that are reached.
        halved: whether activations are counted with half their bytes: in a program for CPUs they have 32 bits.
    """

    def __init__(self, steps: CountedSteps, gpu: Gpu, shares: Shares, *, halved: bool) -> None:
        self._steps, self._gpu, self._shares, self._halved = steps, gpu, shares, halved

    def seconds(self, sizes: StepSizes) -> float:
        """Of a step of the engine."""
        pairs = zip(self._steps.kinds, self._steps.costs(sizes), strict=True)
        return self._shares.between_steps + sum(k.count * max(self._parts(k.step, c)) for k, c in pairs)

    def bound(self, sizes: StepSizes) -> str:
        """What most of a step waits for: "memory", "products", or "kernels" that hardly have work."""
        spent = {"memory": 0.0, "products": 0.0, "kernels": self._shares.between_steps}
        for kind, cost in zip(self._steps.kinds, self._steps.costs(sizes), strict=True):
            parts = dict(zip(spent, self._parts(kind.step, cost), strict=True))
            longest = max(parts, key=lambda name: parts[name])
            spent[longest] += kind.count * parts[longest]
        return max(spent, key=lambda name: spent[name])

    def _parts(self, step: Step, cost: StepCost) -> tuple[float, float, float]:
        """Seconds for memory, for products, and at least."""
        activations = (cost.activations_read + cost.activations_written) / (2 if self._halved else 1)
        memory = (cost.memory + activations) / (self._gpu.bandwidth * self._shares.bandwidth)
        peak = self._gpu.peaks["f32" if _in_f32(step, cost) else "bf16"]
        return memory, 2 * cost.multiply_adds / (peak * self._shares.compute), self._shares.kernel


def _in_f32(step: Step, cost: StepCost) -> bool:
    """Whether its products are of 32-bit floats on both sides (the cpu target multiplies fp8 as such, too)."""
    narrow = any(o.kind == "weight" and o.dtype not in ("f32", "f16") for o in step.inputs)
    return "f32" in cost.products and not narrow
