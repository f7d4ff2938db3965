"""Predicts the time of a step on a GPU, from the maker's figures and the shares of them that an H100 reached.

Each step of the program takes the time of its bytes at a share of the memory bandwidth, or of its products at a share
of the peak, whichever is longer (the roofline, as in an export's report), and at least the time of an empty kernel.
Weights are read as stored, and multiplied as bf16, or as f32 if they are 32-bit floats.

Products with weights of fewer than 16 bits are slower. Their values must be converted, and small products have few
bytes in flight; with many rows, the weight is first written as floats.
"""

from __future__ import annotations

from collections.abc import Mapping

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.lowered_program import LoweredProgram, Step, WeightUse
from enginewright.runtime.shared.progress import Progress, silent
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, counted_as

from ...gpu.specs import attention_scratch
from ...gpu.tiles import FORMS, UNPACKED_ROWS, part_of_product, product_tile
from ...steps.planning import CountedSteps, Device, Gpu, PlannedSteps, Planning, Shares, StepSeconds


class GpuModel:
    """Predicts the times of one program on one GPU.

    Args:
        steps: the program's steps.
        gpu: the GPU's figures.
        shares: the shares of these figures that steps reach.
        halved: True to count half the bytes of activations, for a program of the cpu target, where they have 32 bits.
    """

    def __init__(self, steps: CountedSteps, gpu: Gpu, shares: Shares, *, halved: bool) -> None:
        self._steps, self._gpu, self._shares, self._halved = steps, gpu, shares, halved
        self._uses = {use.name: use for use in steps.program.weights}

    def seconds(self, sizes: StepSizes) -> float:
        """Returns the predicted seconds of a step of the engine."""
        return self.around(sizes) + sum(self.each(sizes))

    def each(self, sizes: StepSizes) -> tuple[float, ...]:
        """Returns the predicted seconds of each step of the program."""
        pairs = zip(self._steps.kinds, self._steps.costs(sizes), strict=True)
        of_kind = {kind.key: max(self._parts(kind.step, cost, sizes)) for kind, cost in pairs}
        return tuple(of_kind[key] for key in self._steps.keys)

    def around(self, sizes: StepSizes) -> float:
        """Returns the seconds for which the GPU is idle between two steps of the engine."""
        return self._shares.between_steps

    def bound(self, sizes: StepSizes) -> str:
        """Returns the resource that limits most of a step's time: "memory", "products", or "kernels" for launches with
        little work.
        """
        spent = {"memory": 0.0, "products": 0.0, "kernels": self._shares.between_steps}
        for kind, cost in zip(self._steps.kinds, self._steps.costs(sizes), strict=True):
            parts = dict(zip(spent, self._parts(kind.step, cost, sizes), strict=True))
            longest = max(parts, key=lambda name: parts[name])
            spent[longest] += kind.count * parts[longest]
        return max(spent, key=lambda name: spent[name])

    def _parts(self, step: Step, cost: StepCost, sizes: StepSizes) -> tuple[float, float, float]:
        """Returns the times of a program's step in seconds: of its memory, of its products, and the least time of a
        kernel.
        """
        activations = (cost.activations_read + cost.activations_written) / (2 if self._halved else 1)
        memory = (cost.memory + activations) / (self._gpu.bandwidth * self._shares.bandwidth)
        peak = self._gpu.peaks["f32" if _in_f32(step, cost) else "bf16"] * self._shares.compute
        products = 2 * cost.multiply_adds / peak
        if (weight := self._narrow_weight(step)) is not None:
            speed = self._gpu.bandwidth * self._shares.bandwidth
            if len(weight.shape) == 2 and sizes.at(step.outputs[0].shape[0]) >= UNPACKED_ROWS:
                floats = 2 * weight.shape[0] * weight.shape[1] / speed
                return memory, products + cost.weights / speed + floats, self._shares.kernel
            memory += cost.weights / speed * (1 / self._reached(step, weight, sizes) - 1)
            products /= self._shares.narrow
        return memory, products, self._shares.kernel

    def _narrow_weight(self, step: Step) -> WeightUse | None:
        """Returns the weight of a product if it has less than 16 bits; otherwise None."""
        if self._halved or counted_as(step) not in ("product", "experts"):  # another target's program says less
            return None
        uses = (self._uses[o.name] for o in step.inputs if o.kind == "weight")
        return next((use for use in uses if DTYPES[use.dtype].bits < 16 and len(use.shape) > 1), None)

    def _reached(self, step: Step, weight: WeightUse, sizes: StepSizes) -> float:
        """Returns the share of the memory bandwidth at which a product reads its weight, from the bytes that are in
        flight.
        """
        needed = self._gpu.bandwidth * self._shares.latency
        rows = sizes.at(step.outputs[0].shape[0])
        columns, depth = weight.shape[-2:]
        form = FORMS.get(weight.dtype, "float")
        group = int(step.attrs.get("weight_group", 0))
        tile = product_tile(rows, form)
        part = part_of_product(rows, depth, columns, form, group, "bf16") if len(weight.shape) == 2 else 0
        programs = -(-rows // tile.rows) * -(-columns // tile.columns) * (-(-depth // part) if part else 1)
        if not needed or not self._gpu.multiprocessors:
            return 1.0
        bytes_of_tile = tile.columns * min(tile.depth, depth) * DTYPES[weight.dtype].bits // 8
        resident = min(programs, _RESIDENT * self._gpu.multiprocessors)
        most = _READ.get(weight.dtype, {}).get(tile.rows, 1.0)
        return min(most, resident * (tile.stages - 1) * bytes_of_tile / needed)


_RESIDENT = 4
"""The number of programs that run on a multiprocessor, of a product with few rows."""

_READ: Mapping[str, Mapping[int, float]] = {
    "i8": {16: 0.84, 32: 0.73, 64: 0.48},
    "fp8": {16: 0.88, 32: 0.79, 64: 0.71},
    "i4": {16: 0.63, 32: 0.41, 64: 0.31},
    "u4": {16: 0.61, 32: 0.41, 64: 0.32},
}
"""The speed at which an H100 read products' weights, as a share of the speed for 16-bit weights, by type and by rows of
a tile. int8 was in groups of 32, fp8 in one, 4 bits in groups of 64, with offsets and without, as in the recipes. int4
without offsets wasn't timed with 32 rows, and has the share of int4 with offsets.
"""


def _in_f32(step: Step, cost: StepCost) -> bool:
    """Returns True if both factors of a step's products are 32-bit floats. Products with fp8 aren't, which the cpu
    target computes in f32.
    """
    narrow = any(o.kind == "weight" and o.dtype not in ("f32", "f16") for o in step.inputs)
    return "f32" in cost.products and not narrow


def _model(planned: PlannedSteps, device: Device, progress: Progress) -> GpuModel:
    assert device.gpu is not None
    return GpuModel(planned.steps, device.gpu, device.shares, halved=not planned.own)


def _formats(program: LoweredProgram) -> frozenset[str]:
    """Returns the formats of activations for which a GPU must have instructions. Kernels convert fp8 and int4 weights
    on any GPU.
    """
    return frozenset({"bf16"} & {o.dtype for step in program.steps for o in step.outputs})


def _scratch(program: LoweredProgram, requests: int, context: int) -> int:
    """Returns the bytes of scratch memory for the results of attention's splits, in float32."""
    block = min((group.block_size for group in program.cache_groups), default=1)
    shapes = {s.outputs[0].shape for s in program.steps if s.op == "paged_attention"}
    sizes = {(shape[1].constant, shape[2].constant) for shape in shapes}
    return 4 * max((attention_scratch(requests, *of, -(-context // block), block) for of in sizes), default=0)


def _timed(planned: PlannedSteps, device: Device, sizes: StepSizes) -> StepSeconds:
    model = _model(planned, device, silent)
    return StepSeconds(model.each(sizes), model.around(sizes))


PLANNING = Planning(True, _model, _timed, _formats, _scratch)
