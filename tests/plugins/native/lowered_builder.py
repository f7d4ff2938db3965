"""Makes small lowered programs by hand, and steps for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import ml_dtypes
import numpy as np
import numpy.typing as npt

from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.bundle.weights import pack
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE, CacheGroup, SamplingBatch, StepInput
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT, Dtype
from enginewright.runtime.shared.lowered_program import (
    Affine,
    Buffer,
    LoweredProgram,
    Operand,
    Step,
    WeightUse,
)
from enginewright.runtime.shared.panel_layouts import Layout

Array = npt.NDArray[np.generic]
Size = Affine | int
DTYPES: dict[str, Dtype] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "int8": "i8"}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
T = Affine(t=1)
B = Affine(b=1)
R = Affine(r=1)


def aligned(array: Array, offset: int = 0) -> Array:
    """A copy whose memory begins ``offset`` bytes past a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def dense_strides(shape: Sequence[Size]) -> tuple[Affine, ...]:
    strides = [Affine(1)]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * Affine.parse(size))
    return tuple(strides)


def view(operand: Operand, shape: Sequence[Size], strides: Sequence[Size] | None = None, offset: Size = 0) -> Operand:
    """A view of the same memory with another shape; ``offset`` in elements is added."""
    return operand.model_copy(
        update={
            "shape": tuple(Affine.parse(s) for s in shape),
            "strides": tuple(Affine.parse(s) for s in strides) if strides is not None else dense_strides(shape),
            "offset": operand.offset + Affine.parse(offset),
        }
    )


def packed(array: Array, layout: Layout, dtype: Dtype | None = None) -> Array:
    """[.., N, K] in a weight's layout."""
    if layout == "rows":
        return array
    rows = np.ascontiguousarray(array)
    return pack(rows.view(np.uint16) if rows.dtype.itemsize == 2 else rows, layout, dtype)


class LoweredBuilder:
    """Adds up a program. Buffers lie one behind the other in the arena."""

    def __init__(self) -> None:
        self.groups: list[CacheGroup] = []
        self.uses: list[WeightUse] = []
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        self.weights: dict[str, Array] = {}
        self.arena = Affine()
        self.logits: Operand | None = None
        self.outputs: dict[str, Operand] = {}
        """Instead of logits, if there are any."""

    def group(
        self,
        name: str,
        layers: Sequence[int],
        kv_heads: int,
        key: int,
        value: int,
        window: int = 0,
        summaries: bool = False,
    ) -> None:
        self.groups.append(
            CacheGroup(
                name=name,
                layers=tuple(layers),
                kv_heads=kv_heads,
                key_head_size=key,
                value_head_size=value,
                window=window,
                summaries=summaries,
            )
        )

    def input(self, name: str) -> Operand:
        shapes: dict[str, tuple[Affine, ...]] = {"q_start": (B + 1,), "kv_len": (B,), "rows": (R,)}
        shape = (B, Affine(1)) if name.startswith("block_table:") else shapes.get(name, (T,))
        return Operand(kind="input", name=name, dtype="i32", shape=shape, strides=dense_strides(shape))

    def cache(self, name: str) -> Operand:
        return Operand(kind="cache", name=name, dtype="f32", shape=(), strides=())

    def weight(self, array: Array, layout: Layout = "rows", dtype: Dtype | None = None) -> Operand:
        """``dtype``: of integers of 4 bits, i4 or u4; else the array says it."""
        name = f"w{len(self.uses)}"
        dtype = dtype or DTYPES[array.dtype.name]
        self.uses.append(WeightUse(name=name, dtype=dtype, shape=array.shape, layout=layout))
        self.weights[name] = aligned(packed(array, layout, dtype))
        shape = tuple(Affine(s) for s in array.shape)
        return Operand(kind="weight", name=name, dtype=dtype, shape=shape, strides=dense_strides(array.shape))

    def buffer(self, *shape: Size, dtype: str = "f32", padding: int = 1) -> Operand:
        """``padding``: the row stride is a multiple of that many elements."""
        name = f"b{len(self.buffers)}"
        sizes = tuple(Affine.parse(s) for s in shape)
        strides = list(dense_strides(shape))
        if padding > 1:
            strides[-2] = Affine(-(-sizes[-1].constant // padding) * padding)
        size = prod(sizes[1:-1], start=sizes[0] * (strides[-2] if len(shape) > 1 else 1)) * BYTES_PER_ELEMENT[dtype]
        self.buffers.append(Buffer(name=name, size=size, offset=self.arena))
        self.arena = self.arena + Affine(*(-(-c // 64) * 64 for c in size.coefficients()))
        return Operand(kind="buffer", name=name, dtype=dtype, shape=sizes, strides=tuple(strides))

    def step(
        self,
        op: str,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        where: str = "",
        **attrs: int | float | str,
    ) -> int:
        """The index of the new step."""
        self.steps.append(Step(op=op, inputs=tuple(inputs), outputs=tuple(outputs), attrs=attrs, where=where))
        return len(self.steps) - 1

    def quantized(self, x: Operand, group: int) -> list[Operand]:
        """x [M, K] as values, scales and sums, by a step."""
        rows, width = x.shape[0], x.shape[1].constant
        count = -(-width // group) if group else 1
        out = [self.buffer(rows, width, dtype="i8", padding=4)]
        out += [self.buffer(rows, count), self.buffer(rows, count, dtype="i32")]
        self.step("quantize_activation", [x], out, group_size=group)
        return out

    def values(self, array: npt.NDArray[np.float32]) -> Operand:
        """A buffer [T, C..] that holds row ids[t] of ``array`` for token t; steps with ids 0, 1, .. hold ``array``."""
        table = self.weight(array.reshape(len(array), -1))
        out = self.buffer(T, prod(array.shape[1:]))
        self.step("embedding", [self.input("ids"), table], [out])
        return view(out, (T, *array.shape[1:]))

    def program(self) -> LoweredProgram:
        outputs = self.outputs or {"logits": self.logits if self.logits is not None else self.buffer(R, 1)}
        return LoweredProgram(
            cache_groups=tuple(self.groups),
            weights=tuple(self.uses),
            buffers=tuple(self.buffers),
            steps=tuple(self.steps),
            outputs=outputs,
            arena_bytes=self.arena,
        )

    def build(self, *, blocks: Mapping[str, int] | None = None, threads: int = 1, isa: str | None = None) -> CpuProgram:
        counts = blocks if blocks is not None else {group.name: 8 for group in self.groups}
        return CpuProgram(self.program(), self.weights, blocks=counts, threads=threads, isa=isa)

    def run(self, index: int, tokens: int, **options: int | str) -> list[Array]:
        """The outputs of step ``index`` in a run of one request with ids 0 .. tokens-1."""
        program = self.build(**options)  # type: ignore[arg-type]
        return program.trace(step_input([list(range(tokens))], groups=[g.name for g in self.groups]), index)


def step_input(
    ids: Sequence[Sequence[int]],
    past: Sequence[int] | None = None,
    *,
    groups: Sequence[str] = (),
    tables: Sequence[Sequence[int]] | None = None,
    rows: Sequence[int] | None = None,
    sampling: SamplingBatch | None = None,
    return_logits: bool = False,
) -> StepInput:
    """A step in which request b brings ``ids[b]`` behind ``past[b]`` cached tokens.

    By default blocks are given out in order, and the last token of each request is sampled.
    """
    past = past if past is not None else [0] * len(ids)
    lengths = [before + len(new) for before, new in zip(past, ids, strict=True)]
    if tables is None:
        counts = [-(-length // KV_BLOCK_SIZE) for length in lengths]
        starts = np.cumsum([0, *counts])
        tables = [list(range(starts[b], starts[b] + count)) for b, count in enumerate(counts)]
    table = np.full((len(ids), max(len(row) for row in tables)), -1, np.int32)
    for b, row in enumerate(tables):
        table[b, : len(row)] = row
    positions = [p for before, length in zip(past, lengths, strict=True) for p in range(before, length)]
    owners = [b for b, new in enumerate(ids) for _ in new]
    slots = [
        int(table[b, p // KV_BLOCK_SIZE]) * KV_BLOCK_SIZE + p % KV_BLOCK_SIZE
        for b, p in zip(owners, positions, strict=True)
    ]
    q_start = np.cumsum([0, *(len(new) for new in ids)])
    int32 = np.int32
    return StepInput(
        ids=np.array([token for new in ids for token in new], int32),
        positions=np.array(positions, int32),
        q_start=q_start.astype(int32),
        kv_len=np.array(lengths, int32),
        block_table={group: table.copy() for group in groups},
        slots={group: np.array(slots, int32) for group in groups},
        rows=np.array(rows if rows is not None else q_start[1:] - 1, int32),
        sampling=sampling,
        outputs=("logits",) if return_logits else (),
    )


def sampling_batch(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    counter: int = 0,
    logprobs: int | None = None,
) -> SamplingBatch:
    """Sampling parameters that are equal for all rows."""
    return SamplingBatch(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
        seed=np.full(rows, seed, np.uint64),
        counter=np.full(rows, counter, np.uint64),
        logprobs=logprobs,
    )


def sound_program() -> LoweredBuilder:
    """A cache of one layer, ids looked up in a table of 6, written to the cache, attended to, and sampled from."""
    b = LoweredBuilder()
    b.group("full", [0], 2, 4, 4)
    x = view(b.values(np.arange(48, dtype=np.float32).reshape(6, 8)), (T, 2, 4))
    b.step("kv_write", [x, x, b.input("slots:full"), b.cache("full/0")], [], "layers.0")
    tables = [b.input(name) for name in ("block_table:full", "q_start", "kv_len")]
    b.step(
        "paged_attention", [x, b.cache("full/0"), *tables], [b.buffer(T, 2, 4)], "layers.0.attention",
        scale=1.0, window=0, softcap=0.0, has_sinks=False,
    )  # fmt: skip
    b.logits = b.buffer(R, 8)
    b.step("take_rows", [view(x, (T, 8)), b.input("rows")], [b.logits], "head")
    return b
