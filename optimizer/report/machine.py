"""What this machine can do at most, as measured: how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from enginewright.plugins.contracts import StepInput
from enginewright.plugins.cpu.executable import CpuProgram
from enginewright.plugins.cpu.extension import cpu_extension
from enginewright.plugins.errors import CapacityError
from enginewright.plugins.lowered_program import (
    Affine,
    Buffer,
    Dtype,
    Layout,
    LoweredProgram,
    Operand,
    Step,
    WeightUse,
)
from enginewright.plugins.step_costs import stored_bytes

_ROWS, _SIZE, _GROUP = 192, 512, 32
"""Of the product that is timed: [192, 512] by [512, 512], which caches hold."""

_T, _R = Affine(t=1), Affine(r=1)
_ELEMENT: dict[Dtype, int] = {"f32": 4, "i32": 4, "bf16": 2, "i8": 1}
_RUNS = 9
_LEAST_BYTES, _MOST_BYTES = 64 << 20, 256 << 20
"""Of the memory that is read for the bandwidth: more than caches hold, and not too much."""


@dataclass(frozen=True)
class Machine:
    """The limits that steps are held against.

    Attributes:
        isa, threads: of the kernels.
        bandwidth: bytes a second that all threads read from memory.
        peaks: multiply-adds a second by the type of the factors (f32, bf16, i8): the best of some runs of the
            kernel itself on a product that caches hold.
    """

    isa: str
    threads: int
    bandwidth: float
    peaks: dict[str, float]


def measure_machine(isa: str, threads: int, types: Iterable[str]) -> Machine:
    """Measures for a quarter of a second or so; once in a process, as machines don't change.

    Raises CapacityError if there is no memory for it.
    """
    return Machine(isa, threads, _bandwidth(threads), {kind: _peak(kind, isa, threads) for kind in sorted(types)})


@cache
def _bandwidth(threads: int) -> float:
    nbytes = _beyond_caches()
    try:
        return cpu_extension.measure_bandwidth(nbytes, threads) * 1e9
    except MemoryError as e:
        raise CapacityError(f"no {nbytes:,} bytes of memory to measure the bandwidth with") from e


def _beyond_caches() -> int:
    """Four times the largest cache, where the system tells it."""
    try:
        largest = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        largest = 0
    return min(max(4 * largest, _LEAST_BYTES), _MOST_BYTES)


@cache
def _peak(kind: str, isa: str, threads: int) -> float:
    program = _product(kind)
    weights: dict[str, npt.NDArray[np.generic]] = {
        use.name: _aligned_zeros(stored_bytes(use)) for use in program.weights
    }
    runner = CpuProgram(program, weights, blocks={}, threads=threads, isa=isa)
    ids = np.zeros(_ROWS, np.int32)
    step = StepInput(
        ids=ids,
        positions=ids,
        q_start=np.asarray([0, _ROWS], np.int32),
        kv_len=np.asarray([_ROWS], np.int32),
        block_tables={},
        slots={},
        rows=np.arange(_ROWS, dtype=np.int32),
    )
    best = min(float(runner.profile(step)[1][-1]) for _ in range(_RUNS))
    return _ROWS * _SIZE * _SIZE / best


def _aligned_zeros(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros are as good as any numbers: no kernel looks."""
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


class _Builder:
    """Adds up a program whose buffers lie one behind the other, each a row [columns] a sampled row, or a token."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.weights: list[WeightUse] = []
        self.steps: list[Step] = []
        self.arena = Affine()

    def buffer(self, dtype: Dtype, columns: int, rows: Affine = _R) -> Operand:
        name, size = f"b{len(self.buffers)}", rows * (columns * _ELEMENT[dtype])
        self.buffers.append(Buffer(name=name, size=size, offset=self.arena))
        self.arena = self.arena + size
        return _operand("buffer", name, dtype, rows, columns)

    def weight(self, name: str, dtype: Dtype, layout: Layout, columns: int) -> Operand:
        self.weights.append(WeightUse(name=name, dtype=dtype, shape=(_SIZE, columns), layout=layout))
        return _operand("weight", name, dtype, Affine(_SIZE), columns)

    def step(self, op: str, inputs: tuple[Operand, ...], *outputs: Operand, **attrs: int | bool) -> None:
        self.steps.append(Step(op=op, inputs=inputs, outputs=outputs, attrs=dict(attrs)))


def _operand(kind: Literal["buffer", "weight"], name: str, dtype: Dtype, rows: Affine, columns: int) -> Operand:
    shape, strides = (rows, Affine(columns)), (Affine(columns), Affine(1))
    return Operand(kind=kind, name=name, dtype=dtype, shape=shape, strides=strides)


def _input(name: str, size: Affine) -> Operand:
    return Operand(kind="input", name=name, dtype="i32", shape=(size,), strides=(Affine(1),))


def _product(kind: str) -> LoweredProgram:
    """A program whose last step is one linear of that type."""
    b = _Builder()
    table, hidden = b.weight("table", "f32", "rows", _SIZE), b.buffer("f32", _SIZE, _T)
    b.step("embedding", (_input("ids", _T), table), hidden)
    x, logits = b.buffer("f32", _SIZE), b.buffer("f32", _SIZE)
    b.step("take_rows", (hidden, _input("rows", _R)), x)
    if kind == "i8":
        groups = _SIZE // _GROUP
        quantized = b.buffer("i8", _SIZE), b.buffer("f32", groups), b.buffer("i32", groups)
        b.step("quantize_activation", (x,), *quantized, group_size=_GROUP)
        factors = b.weight("w", "i8", "panel32x4", _SIZE), b.weight("scales", "f16", "panel32", groups)
        groups_of = {"weight_group": _GROUP, "activation_group": _GROUP}
        b.step("quantized_linear", (*quantized, *factors), logits, has_bias=False, **groups_of)
    elif kind == "bf16":
        narrow = b.buffer("bf16", _SIZE)
        b.step("cast_bf16", (x,), narrow)
        b.step("linear", (narrow, b.weight("w", "bf16", "panel32x2", _SIZE)), logits, has_bias=False)
    else:
        b.step("linear", (x, b.weight("w", "f32", "panel32", _SIZE)), logits, has_bias=False)
    return LoweredProgram(
        cache_groups=(),
        weights=tuple(b.weights),
        buffers=tuple(b.buffers),
        steps=tuple(b.steps),
        outputs={"logits": logits},
        arena_bytes=b.arena,
    )
