"""The state of generating one kernel: its arguments, and its step's operands as memory that loops load and store.

A kernel gets whole one-dimensional tensors: the arena in each type that it needs, weights, step inputs, a layer's keys
and values. Offsets of operands in the arena are arguments, so that layers share kernels. Everything else that
determines the code (sizes, strides, attributes) is in ``signature``. T, B and R are the lengths of the inputs ids,
kv_len and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from enginewright.plugins.steps.x86_levels import Level
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT, DTYPES, Dtype
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.lowered_program import (
    Affine,
    LoweredProgram,
    Operand,
    Step,
    WeightUse,
)

from ..section import stored_type
from .schedules import OWN, Schedules, product_of

Expr = Any
"""An expression of TVM, or a Python number."""

LANES = 16
"""The number of floats that kernels process at a time. LLVM splits these vectors if registers are narrower."""

SIZES = {"T": "ids", "B": "kv_len", "R": "rows"}
"""The symbol of a size -> the step input whose number of elements it is."""
GRID_BLOCK = 128
"""The number of threads in a block on a GPU."""
PARALLEL_FROM = 1 << 14
"""The number of float operations from which on a loop is run on several threads."""


def int64(value: int) -> Expr:
    return tirx.IntImm("int64", value)


def f32(value: float) -> Expr:
    return tirx.FloatImm("float32", value)


def vector(value: Expr, lanes: int) -> Expr:
    """Returns a vector with the same value in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def lanes_of(size: int, widest: int = LANES) -> Iterator[tuple[int, int]]:
    """Yields (start, number of lanes) of vectors that cover 0 .. size-1: vectors of ``widest`` lanes, then halves,
    quarters and so on.
    """
    start = 0
    for lanes in (n for n in (16, 8, 4, 2, 1) if n <= widest):
        while size - start >= lanes:
            yield start, lanes
            start += lanes


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel.

    Attributes:
        kind: "arena", "number", "keys" or "values" of a cache, or the kind of an operand.
        name: for the arena, TVM's type of its elements; otherwise the operand's name; "" for a number.
        value: the number.
    """

    kind: str
    name: str
    value: int = 0


@dataclass
class Memory:
    """An operand as memory of a kernel: element [i, j] is ``buffer[base + i * strides[0] + j * strides[1]]``."""

    buffer: Any
    base: Expr
    shape: tuple[Affine, ...]
    strides: tuple[Affine, ...]
    dtype: Dtype
    kernel: Kernel

    def extent(self, axis: int) -> Expr:
        return self.kernel.value(self.shape[axis])

    def at(self, *index: Expr) -> Expr:
        """Returns the index of an element in ``buffer``."""
        place = self.base
        for i, stride in zip(index, self.strides, strict=True):
            if stride != 0:
                place = place + i * self.kernel.value(stride)
        return place

    def load(self, *index: Expr, lanes: int = 1) -> Expr:
        """Returns an element, or a vector of ``lanes`` neighbours along the last dimension, from ``index`` on."""
        return load(self.buffer, self.at(*index), lanes, self.strides[-1] if self.strides else Affine(1))

    def store(self, value: Expr, *index: Expr, lanes: int = 1) -> None:
        store(self.buffer, self.at(*index), value, lanes)


def load(buffer: Any, at: Expr, lanes: int = 1, stride: Affine = Affine(1)) -> Expr:
    if lanes == 1:
        return buffer[at]
    if stride == 0:
        return T.broadcast(buffer[at], lanes)
    assert stride == 1, "vectors are neighbours"
    return buffer[T.ramp(at, int64(1), lanes)]


def store(buffer: Any, at: Expr, value: Expr, lanes: int = 1) -> None:
    T.buffer_store(buffer, value, [at if lanes == 1 else T.ramp(at, int64(1), lanes)])


def on_stack(size: int, dtype: str = "float32") -> Any:
    """Allocates ``size`` elements on the calling thread's stack. LLVM keeps them in registers if all indices are
    constants.

    Without the annotation TVM would call its runtime for a workspace.
    """
    return T.alloc_buffer((size,), dtype, scope="local", annotations={"disable_lower_builtin": True})


class Local:
    """A variable of a kernel: a number or a vector, in a register."""

    def __init__(self, value: Expr, lanes: int = 1, dtype: str = "float32") -> None:
        self.buffer = on_stack(1, dtype if lanes == 1 else f"{dtype}x{lanes}")
        self.width, self._dtype = lanes, dtype
        self.set(value)

    def set(self, value: Expr) -> None:
        T.buffer_store(self.buffer, value, [int64(0)])

    def get(self) -> Expr:
        return self.buffer[int64(0)]

    def lanes(self) -> Any:
        """Returns a copy in memory, in which single lanes can be read."""
        copy = on_stack(self.width, self._dtype)
        store(copy, int64(0), self.get(), self.width)
        return copy


class Kernel:
    """The kernel of one step. Steps with the same ``signature`` share it, and differ in their ``arguments``.

    Args:
        step: a step of ``program``.
        program: the program.
        level: the level for which it is compiled.
        schedules: the schedules of products that have a record.
    """

    def __init__(self, step: Step, program: LoweredProgram, level: Level, schedules: Schedules) -> None:
        self.step, self.level = step, level
        self._uses = {use.name: use for use in program.weights}
        self.schedule = schedules.get(product_of(step, self._uses), OWN)
        self._places = {buffer.name: buffer.offset for buffer in program.buffers}
        self._groups = {f"{g.name}/{layer}": g for g in program.cache_groups for layer in g.layers}
        self.arguments: list[Argument] = []
        self._names: dict[Argument, int] = {}
        self._buffers: dict[int, Any] = {}
        self._numbers: dict[int, Any] = {}
        self._lengths: dict[str, Expr] = {}
        self.signature = self._plan()

    # ---- what it is called with

    def _plan(self) -> str:
        parts = [self.step.op, str(sorted(self.step.attrs.items()))]
        for operand in (*self.step.inputs, *self.step.outputs):
            parts.append(self._plan_operand(operand))
        for symbol, name in SIZES.items():
            self._argument(Argument("input", name))
            parts.append(symbol)
        return ";".join(parts)

    def _plan_operand(self, operand: Operand) -> str:
        kind, name = operand.kind, operand.name
        if kind == "cache":
            group = self._groups[name]
            numbers = [self._argument(Argument(half, name)) for half in ("keys", "values")]
            sizes = (*group.sizes, group.dtype)
            return f"cache{numbers}{sizes}"
        shapes = f"{operand.shape}{operand.strides}{operand.dtype}"
        if kind == "buffer":
            arena = self._argument(Argument("arena", DTYPES[operand.dtype].tvm))
            if operand.dtype in ("i8", "bf16"):
                self._argument(Argument("arena", "int32"))  # see words()
            terms = [f"{self._number(value)}{symbol}" for symbol, value in self._terms(operand)]
            return f"arena{arena}{shapes}at{terms}"
        number = self._argument(Argument(kind, name))
        if kind == "weight":
            use = self._uses[name]
            shapes += f"{use.dtype}{use.layout}{use.shape}"
        return f"{kind}{number}{shapes}{operand.offset}"

    def _argument(self, argument: Argument) -> int:
        if argument not in self._names:
            self._names[argument] = len(self.arguments)
            self.arguments.append(argument)
        return self._names[argument]

    def _number(self, value: int) -> int:
        """Adds an argument for a number that may differ between layers, and returns its index."""
        self.arguments.append(Argument("number", "", value))
        return len(self.arguments) - 1

    def _terms(self, operand: Operand) -> list[tuple[str, int]]:
        """Returns the terms of an operand's offset in the arena, as (T, B, R or "" for the constant, factor). T is
        always among them.
        """
        constant, t, b, r = self._at(operand).coefficients()
        return [("T", t), *((symbol, n) for symbol, n in (("B", b), ("R", r), ("", constant)) if n)]

    def _at(self, operand: Operand) -> Affine:
        """Returns an operand's offset in the arena, in elements."""
        place = self._places[operand.name]
        assert place is not None, "memory is planned"
        size = BYTES_PER_ELEMENT[operand.dtype]
        return Affine(*(c // size for c in place.coefficients())) + operand.offset

    # ---- writing it

    @contextmanager
    def written(self, name: str) -> Iterator[list[Any]]:
        """A context in which the kernel's body is written. It yields a list that contains the function afterwards."""
        function: list[Any] = []
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name(name)
                T.func_attr({"tirx.noalias": False})
                handles = [self._handle(i, argument) for i, argument in enumerate(self.arguments)]
                for i, argument in enumerate(self.arguments):
                    if argument.kind != "number":
                        self._match(i, argument, handles[i])
                yield function
            function.append(builder.get().with_attr("global_symbol", name))

    def _handle(self, i: int, argument: Argument) -> Any:
        if argument.kind == "number":
            self._numbers[i] = T.arg(f"n{i}", T.int64())
            return None
        return T.arg(f"h{i}", T.handle())

    def _match(self, i: int, argument: Argument, handle: Any) -> None:
        dims = 2 if argument.kind == "input" and argument.name.startswith("block_table:") else 1
        sizes = tuple(T.int64() for _ in range(dims))
        self._buffers[i] = T.match_buffer(handle, sizes, self._dtype(argument), align=4)
        if dims == 2:
            self._lengths["W"] = sizes[1]
        for symbol, name in SIZES.items():
            if argument == Argument("input", name):
                self._lengths[symbol] = sizes[0]

    def _dtype(self, argument: Argument) -> str:
        if argument.kind == "arena":
            return argument.name
        if argument.kind == "weight":
            return stored_type(self._uses[argument.name])
        return "int32" if argument.kind == "input" else "float32"

    # ---- operands

    def value(self, affine: Affine | int) -> Expr:
        """Returns a size, such as 3T + 1, as an int64 expression."""
        affine = Affine.parse(affine)
        total: Expr = None
        for symbol, factor in (("T", affine.t), ("B", affine.b), ("R", affine.r)):
            if factor:
                term = self._lengths[symbol] * int64(factor) if factor != 1 else self._lengths[symbol]
                total = term if total is None else total + term
        if total is None:
            return int64(affine.constant)
        return total + int64(affine.constant) if affine.constant else total

    def memory(self, operand: Operand) -> Memory:
        if operand.kind == "buffer":
            base = self._arena_base(operand)
            buffer = self._buffers[self._names[Argument("arena", DTYPES[operand.dtype].tvm)]]
        else:
            base = self.value(operand.offset)
            buffer = self._buffers[self._names[Argument(operand.kind, operand.name)]]
        return Memory(buffer, base, operand.shape, operand.strides, operand.dtype, self)

    def _arena_base(self, operand: Operand) -> Expr:
        """Returns an operand's offset in the arena, as an expression of the kernel's arguments for numbers.

        ``_plan`` added these arguments operand by operand, and term by term.
        """
        first = self._first_number(operand)
        base: Expr = int64(0)
        for symbol, _ in self._terms(operand):
            term = self._numbers[first] if not symbol else self._numbers[first] * self._lengths[symbol]
            base, first = base + term, first + 1
        return base

    def _first_number(self, operand: Operand) -> int:
        numbers = [i for i, argument in enumerate(self.arguments) if argument.kind == "number"]
        for other in (*self.step.inputs, *self.step.outputs):
            if other is operand:
                break
            if other.kind == "buffer":
                numbers = numbers[len(self._terms(other)) :]
        return numbers[0] if numbers else 0

    @property
    def inputs(self) -> list[Memory]:
        """The operands that are inputs, except for caches."""
        return [self.memory(operand) for operand in self.step.inputs if operand.kind != "cache"]

    @property
    def outputs(self) -> list[Memory]:
        return [self.memory(operand) for operand in self.step.outputs]

    def use(self, index: int) -> WeightUse:
        """Returns the program's entry of the weight that is the step's input with this index. Caches count as
        inputs.
        """
        return self._uses[self.step.inputs[index].name]

    def check_layout(self, use: WeightUse, *layouts: str) -> None:
        """Raises UnsupportedModelError if a weight doesn't have one of these layouts."""
        if use.layout not in layouts:
            problem = f"{self.level.owner} has none with weights of {use.dtype} in {use.layout}"
            raise UnsupportedModelError(f"{self.step.op} at {self.step.where}: {problem}", hint=self.level.without)

    def words(self, operand: Operand) -> Memory:
        """Returns an operand with rows of 8- or 16-bit elements as memory of 32-bit words."""
        memory, each = self.memory(operand), 4 // BYTES_PER_ELEMENT[operand.dtype]
        *lead, last = operand.strides
        assert last == 1 and operand.kind == "buffer", "what is rounded is in the arena, row by row"
        strides = (*(Affine(*(c // each for c in stride.coefficients())) for stride in lead), last)
        buffer = self._buffers[self._names[Argument("arena", "int32")]]
        return Memory(buffer, T.floordiv(memory.base, int64(each)), operand.shape, strides, "i32", self)

    def cache(self) -> tuple[Any, Any, CacheGroup]:
        """Returns the buffers of the layer's keys [P][Nkv][D][32] and values [P][Nkv][32][Dv], and its cache group."""
        name = next(o.name for o in self.step.inputs if o.kind == "cache")
        keys, values = (self._buffers[self._names[Argument(half, name)]] for half in ("keys", "values"))
        return keys, values, self._groups[name]

    # ---- loops

    def each(self, extent: Expr, work: int, body: Callable[[Expr], None]) -> None:
        """Writes a loop of ``body(i)`` for i below ``extent``, on several threads if it is enough work.

        ``work``: the number of operations of one ``body``.
        """
        if self.level.grid:
            blocks = T.max(T.ceildiv(extent, int64(GRID_BLOCK)), int64(1))  # a grid of none is an error
            threads = T.thread_binding(int64(0), int64(GRID_BLOCK), thread="threadIdx.x")
            with T.thread_binding(int64(0), blocks, thread="blockIdx.x") as b, threads as thread:
                i = T.Bind(b * int64(GRID_BLOCK) + thread)
                with T.If(i < extent), T.Then():
                    body(i)
            return
        if isinstance(extent, tirx.IntImm):
            with (T.parallel if int(extent) * work >= PARALLEL_FROM else T.serial)(int64(0), extent) as i:
                body(i)
            return
        few = max(1, PARALLEL_FROM // max(1, work))
        with T.If(extent < int64(few)):
            with T.Then(), T.serial(int64(0), extent) as i:
                body(i)
            with T.Else(), T.parallel(int64(0), extent) as i:
                body(i)

    def along(self, size: int, body: Callable[[Expr, int], None]) -> None:
        """Writes ``body(start, lanes)`` for vectors that cover 0 .. size-1."""
        widest = self.level.lanes
        whole = size // widest
        if whole > 1:
            with T.serial(int64(0), int64(whole)) as v:
                body(v * widest, widest)
        for start, lanes in lanes_of(size, widest):
            if whole <= 1 or start >= whole * widest:
                body(int64(start), lanes)


def rows_of(memory: Memory) -> tuple[Expr, int]:
    """Returns the number of rows of an operand with 1 to 3 dimensions, and the number of rows per index of the first
    dimension.
    """
    *lead, _ = memory.shape
    if not lead:
        return int64(1), 1
    inner = lead[1].constant if len(lead) == 2 else 1
    return memory.extent(0) * int64(inner) if inner != 1 else memory.extent(0), inner


def row_index(memory: Memory, row: Expr, inner: int) -> tuple[Expr, ...]:
    """Returns the indices of a row, without the one of the last dimension.

    ``row`` is the row's number, ``inner`` the number of rows per index of the first dimension.
    """
    rank = len(memory.shape)
    if rank == 1:
        return ()
    if rank == 2:
        return (row,)
    return (T.floordiv(row, int64(inner)), T.floormod(row, int64(inner)))


Handler = Callable[[Kernel], None]
