"""The cost of each step of a lowered program, in bytes and multiply-adds, computed from the program alone, without
torch.

Bytes are those that must move at least once. Data that a kernel reads again, as when blocks of a long prompt's rows
read the same panel of weights, comes from a cache and isn't counted again. Sizes are those of storage: packed weights
with padding, keys in whole blocks. benchmarks/notes/cpu.md compares the result with measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .contracts import CacheGroup
from .dtypes import DTYPES
from .dtypes import stored_bytes as bytes_of_elements
from .lowered_program import Affine, Buffer, LoweredProgram, Operand, Step, WeightUse
from .op_schema import OPS, Cost
from .panel_layouts import DEPTHS, PANEL
from .weight_formats import FORMAT_OF, FORMATS


@dataclass(frozen=True)
class StepSizes:
    """The sizes of one step. ``lengths`` and ``contexts`` are [B].

    Attributes:
        lengths: the tokens of each request in the step.
        contexts: the tokens of each request in its cache after the step.
        rows: the number of sampled rows R; None for one per request.
    """

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    rows: int | None = None

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.contexts) or any(
            not 0 <= n <= c for n, c in zip(self.lengths, self.contexts, strict=True)
        ):
            raise ValueError(f"requests of {self.lengths} tokens can't have contexts of {self.contexts}")

    def at(self, size: Affine) -> int:
        """Returns the value of ``size``, an expression in T, B and R, for a step of these sizes."""
        requests = len(self.lengths)
        return size.evaluate(sum(self.lengths), requests, requests if self.rows is None else self.rows)


@dataclass(frozen=True)
class StepCost:
    """The bytes that one step moves, and the multiply-adds of its products.

    Attributes:
        weights: bytes read of weights, with their scales, offsets and biases.
        kv_read, kv_written: bytes of the KV cache.
        activations_read, activations_written: bytes of the arena, and of step inputs.
        products: the multiply-adds by the type of their factors: f32, bf16 or i8. Element-wise work isn't counted, as
            memory bounds it.
    """

    weights: int = 0
    kv_read: int = 0
    kv_written: int = 0
    activations_read: int = 0
    activations_written: int = 0
    products: Mapping[str, int] = field(default_factory=dict)

    @property
    def memory(self) -> int:
        """The bytes read from or written to memory: weights and KV cache. Activations mostly stay in caches."""
        return self.weights + self.kv_read + self.kv_written

    @property
    def total(self) -> int:
        """The bytes of weights, KV cache and activations together."""
        return self.memory + self.activations_read + self.activations_written

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of all types."""
        return sum(self.products.values())

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.weights + other.weights,
            self.kv_read + other.kv_read,
            self.kv_written + other.kv_written,
            self.activations_read + other.activations_read,
            self.activations_written + other.activations_written,
            dict(Counter(self.products) + Counter(other.products)),
        )

    def times(self, count: int) -> StepCost:
        """Returns the cost of ``count`` steps with this cost."""
        return StepCost(
            self.weights * count,
            self.kv_read * count,
            self.kv_written * count,
            self.activations_read * count,
            self.activations_written * count,
            {kind: products * count for kind, products in self.products.items()},
        )


def step_costs(program: LoweredProgram, sizes: StepSizes) -> list[StepCost]:
    """Returns the cost of each step of the program.

    For experts, a step reads as many as T tokens choose on average if they choose evenly: E (1 - (1 - k/E)^T), which is
    k for one token. A step with only some of the experts has its share of that, and of the products.
    """
    of = _Read({w.name: w for w in program.weights}, {g.name: g for g in program.cache_groups}, program.buffers)
    return [_cost(step, sizes, of) for step in program.steps]


def stored_bytes(use: WeightUse) -> int:
    """Returns the bytes of a weight in its layout, padding included."""
    if use.layout in ("rows", "nibbles"):
        return bytes_of_elements(use.dtype, math.prod(use.shape))
    *lead, rows, columns = use.shape
    side = DEPTHS[use.layout]
    bits = DTYPES[use.dtype].bits
    bits = bits // 2 + 1 if use.layout == "sparse32" else bits  # 4 bits for every four places
    return math.prod(lead) * -(-rows // PANEL) * PANEL * -(-columns // side) * side * bits // 8


@dataclass(frozen=True)
class _Read:
    """The buffers and weights that steps read, by name."""

    weights: Mapping[str, WeightUse]
    groups: Mapping[str, CacheGroup]
    buffers: tuple[Buffer, ...]

    def experts(self, step: Step) -> tuple[int, int]:
        """Returns (experts whose weights the step has, experts of the whole layer)."""
        (starts,) = (o for o in step.inputs if o.dtype == "i32" and len(o.shape) == 1)
        step_experts = starts.shape[0].constant - 1
        all_of_them = next((b.size.constant // 4 - 1 for b in self.buffers if b.name == starts.name), step_experts)
        return step_experts, max(step_experts, all_of_them)


def _cost(step: Step, sizes: StepSizes, of: _Read) -> StepCost:
    counted = counted_as(step)
    if counted == "meeting":
        return StepCost()
    products: dict[str, int] = {}
    weight_bytes = kv_read = kv_written = read = 0
    if counted in ("product", "experts"):
        kind, count = _product(step, sizes)
        step_experts, experts = of.experts(step) if counted == "experts" else (1, 1)
        products[kind] = round(count * step_experts / experts)
    elif step.op == "attention":
        products[str(step.attrs.get("dtype", "f32"))] = _attended_at_once(step, sizes)
    for place, operand in enumerate(step.inputs):
        if operand.kind == "weight":
            weight_bytes += _weight_bytes(step, place, sizes, of)
        elif operand.kind == "cache":
            group = of.groups[operand.name.rpartition("/")[0]]
            if OPS[step.op].state:
                values = _state_values(step, sizes)
                kv_read = kv_written = 4 * values * sum(length > 0 for length in sizes.lengths)
                products["f32"] = values * sum(sizes.lengths) * OPS[step.op].state_products
            elif f"block_table:{group.name}" in _inputs(step):
                kv_read += _read_of_cache(step, group, sizes)
                if place == 1:  # and not the second cache, of keys that the first one has
                    products["f32" if group.dtype == "f32" else "bf16"] = _attended(step, group, sizes)
            else:
                kv_written += sum(sizes.lengths) * sum(plane.token_bytes for plane in group.planes)
        elif operand.name.startswith("block_table:"):
            block = of.groups[operand.name.removeprefix("block_table:")].block_size
            read += sum(-(-context // block) for context in sizes.contexts) * 4
        else:
            read += _bytes(step.outputs[0] if place == 0 and counted == "selection" else operand, sizes)
    written = sum(_bytes(o, sizes) for o in step.outputs)
    return StepCost(weight_bytes, kv_read, kv_written, read, written, products)


def counted_as(step: Step) -> Cost:
    """Returns the rule by which the cost of a step is counted; "all" for an op that only another target has."""
    return OPS[step.op].cost if step.op in OPS else "all"


def _state_values(step: Step, sizes: StepSizes) -> int:
    """Returns the number of values in the state of one request, for a step that is a recurrence."""
    op = OPS[step.op]
    places = {declared.name: place for place, declared in enumerate(op.inputs)}
    return math.prod(sizes.at(step.inputs[places[name]].shape[axis]) + more for name, axis, more in op.state)


def _inputs(step: Step) -> set[str]:
    return {o.name for o in step.inputs if o.kind == "input"}


def _elements(operand: Operand, sizes: StepSizes) -> int:
    """Returns the number of different elements of an operand: a dimension of stride 0 counts once."""
    dims = zip(operand.shape, operand.strides, strict=True)
    return math.prod(1 if stride == 0 else sizes.at(size) for size, stride in dims)


def _bytes(operand: Operand, sizes: StepSizes) -> int:
    return _elements(operand, sizes) * DTYPES[operand.dtype].bits // 8


def _weight_bytes(step: Step, place: int, sizes: StepSizes, of: _Read) -> int:
    """Returns the bytes that a step reads of a weight.

    Args:
        step: the step.
        place: the index of the weight among the step's operands.
        sizes: the sizes of the step.
        of: the weights of the program.
    """
    operand, use = step.inputs[place], of.weights[step.inputs[place].name]
    counted = counted_as(step)
    if counted == "table":
        tokens = sizes.at(step.outputs[0].shape[0])
        return tokens * use.shape[-1] * DTYPES[use.dtype].bits // 8
    if place == 0 and counted == "selection":
        return _bytes(step.outputs[0], sizes)
    if counted == "experts":
        return round(stored_bytes(use) * _share_read(step, of.experts(step)[1], sizes))
    if use.layout != "rows":
        return stored_bytes(use)
    return _bytes(operand, sizes)


def _share_read(step: Step, experts: int, sizes: StepSizes) -> float:
    """Returns the mean share of ``experts`` experts that the step's rows use, if tokens choose experts evenly."""
    rows = step.outputs[0].shape[0]
    each = next((n for n in rows.coefficients()[1:] if n), 1)  # k: rows are k times T, or R
    return float(1 - max(0.0, 1 - each / experts) ** (sizes.at(rows) / each))


def _product(step: Step, sizes: StepSizes) -> tuple[str, int]:
    """Returns the type of a linear's factors, and its multiply-adds M N K."""
    weights = (o for o in step.inputs if o.kind == "weight")  # scales, offsets and biases are smaller
    weight = max(weights, key=lambda o: math.prod(sizes.at(n) for n in o.shape))
    rows = math.prod(sizes.at(n) for n in step.outputs[0].shape[:-1])
    activation = FORMATS[FORMAT_OF[weight.dtype]].activation if weight.dtype in FORMAT_OF else "bf16"  # f16
    kind = {"float": "f32", "int8": "i8"}.get(activation, "bf16")
    return kind, rows * sizes.at(weight.shape[-1]) * sizes.at(weight.shape[-2])


def _chosen(step: Step, position: int, block: int) -> int:
    """Returns the most keys that a token at ``position`` sees: all, or those of its own block and the blocks that it
    chooses.

    ``block``: the tokens of a block.
    """
    names = ("first_blocks", "last_blocks", "best_blocks")
    blocks = sum(int(step.attrs.get(name, 0)) for name in names)
    if not blocks or position < int(step.attrs["all_below"]):
        return position + 1
    return min(position + 1, blocks * block + position % block + 1)


def _read_of_cache(step: Step, group: CacheGroup, sizes: StepSizes) -> int:
    """Returns the bytes that attention reads: keys in whole blocks, and values only of slots that a token sees.

    If tokens choose blocks, all tokens of a request are assumed to choose the same ones.
    """
    key, value = (plane.heads * plane.head_bytes for plane in group.planes)
    summary = sum(plane.heads * plane.summary_bytes for plane in group.planes)
    block = group.block_size
    total = 0
    for length, context in zip(sizes.lengths, sizes.contexts, strict=True):
        if length == 0:
            continue
        first = max(0, context - length - group.window + 1) if group.window else 0
        seen = _chosen(step, context - 1, block)
        if seen < context:
            blocks = -(-seen // block)
            total += blocks * block * key + seen * value + context // block * block * summary
            continue
        blocks = -(-context // block) - first // block
        total += blocks * block * key + (context - first) * value
    return total


def _attended(step: Step, group: CacheGroup, sizes: StepSizes) -> int:
    """Returns the multiply-adds of attention: for each query head, scores and weighted values over the keys that it
    sees.
    """
    heads = sizes.at(step.outputs[0].shape[1])
    pairs = 0
    for length, context in zip(sizes.lengths, sizes.contexts, strict=True):
        first = context - length  # position of the first token, which sees first + 1 keys
        seen = length * first + length * (length + 1) // 2
        if group.window:
            within = min(max(group.window - first, 0), length)  # tokens that see all before them
            seen = within * first + within * (within + 1) // 2 + (length - within) * group.window
        elif "best_blocks" in step.attrs:
            seen = sum(_chosen(step, position, group.block_size) for position in range(first, context))
        pairs += seen
    return pairs * heads * sum(plane.size for plane in group.planes)


def _attended_at_once(step: Step, sizes: StepSizes) -> int:
    """Returns the multiply-adds of attention without a cache, where a request's tokens see each other alone."""
    window = int(step.attrs["window"])
    pairs = 0
    for length in sizes.lengths:
        within = min(window or length, length)
        before = within * (within + 1) // 2 + (length - within) * within  # a query's own key, and earlier ones
        pairs += before if step.attrs["causal"] else 2 * before - length
    (heads, value), key = (sizes.at(n) for n in step.outputs[0].shape[1:]), sizes.at(step.inputs[1].shape[2])
    return pairs * heads * (key + value)
