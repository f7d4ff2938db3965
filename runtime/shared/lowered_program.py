"""The lowered program: the input of the cpu, cuda and tvm targets. It is versioned JSON, and doesn't need torch.

A lowered program is a list of steps over *operands*: strided views of buffers in one arena, of weights, of step inputs,
or a layer of the KV cache. Sizes, strides and offsets are affine in the symbols

    T  tokens in the step      B  requests in the step      R  sampled rows

so that memory is planned once, at export, for every batch. docs/inside/lowered-ops.md lists the ops.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from .contracts import CacheGroup
from .dtypes import Dtype, stored_bytes
from .errors import BundleError
from .panel_layouts import Layout
from .records import Count, Record, parse_versioned, read

FORMAT_VERSION = 7
"""The version of programs: 7 names the ports and the taps of a program."""

OLDEST_FORMAT_VERSION = 5
"""The oldest version that can be read. ``runtime.bundle.reader`` adds the fields that older versions lack."""

SYMBOLS = ("T", "B", "R")


class Affine:
    """``constant + t*T + b*B + r*R`` with integer coefficients. Immutable and hashable."""

    __slots__ = ("b", "constant", "r", "t")

    def __init__(self, constant: int = 0, t: int = 0, b: int = 0, r: int = 0) -> None:
        self.constant, self.t, self.b, self.r = int(constant), int(t), int(b), int(r)

    @classmethod
    def parse(cls, value: Affine | int | Mapping[str, int]) -> Affine:
        """Converts an int, a mapping such as ``{"T": 4, "1": 64}``, or an Affine. Raises ValueError."""
        if isinstance(value, Affine):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, Mapping)):
            raise ValueError(f"not an affine expression: {value!r}")
        if isinstance(value, int):
            return cls(value)
        if unknown := set(value) - {*SYMBOLS, "1"}:
            raise ValueError(f"unknown symbols {sorted(unknown)} in an affine expression")
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value.values()):
            raise ValueError(f"coefficients must be integers: {value!r}")
        return cls(value.get("1", 0), value.get("T", 0), value.get("B", 0), value.get("R", 0))

    @classmethod
    def of_json(cls, value: Any) -> Affine:
        """Reads the result of ``to_json``. Equal values give the same object. Raises ValueError."""
        try:
            return _affine(*value, *value.values()) if type(value) is dict else _affine(value)
        except TypeError:  # what can't be hashed isn't an expression either
            return cls.parse(value)

    def coefficients(self) -> tuple[int, int, int, int]:
        """Returns (constant, T, B, R), in the order of the C++ interpreter."""
        return self.constant, self.t, self.b, self.r

    def evaluate(self, tokens: int, requests: int, rows: int) -> int:
        return self.constant + self.t * tokens + self.b * requests + self.r * rows

    @property
    def is_constant(self) -> bool:
        return not (self.t or self.b or self.r)

    def to_json(self) -> int | dict[str, int]:
        if self.is_constant:
            return self.constant
        named = {"T": self.t, "B": self.b, "R": self.r, "1": self.constant}
        return {k: v for k, v in named.items() if v}

    def __add__(self, other: Affine | int) -> Affine:
        o = Affine.parse(other)
        return Affine(self.constant + o.constant, self.t + o.t, self.b + o.b, self.r + o.r)

    def __sub__(self, other: Affine | int) -> Affine:
        return self + Affine.parse(other) * -1

    def __mul__(self, other: Affine | int) -> Affine:
        """Returns the product with a constant. Raises ValueError if both factors depend on symbols."""
        o = Affine.parse(other)
        if not o.is_constant:
            if not self.is_constant:
                raise ValueError(f"({self}) * ({o}) is not affine")
            return o * self
        c = o.constant
        return Affine(self.constant * c, self.t * c, self.b * c, self.r * c)

    __radd__ = __add__
    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            other = Affine(other)
        return isinstance(other, Affine) and self.coefficients() == other.coefficients()

    def __hash__(self) -> int:
        return hash(self.coefficients())

    def __repr__(self) -> str:
        terms = [f"{v}*{k}" if v != 1 else k for k, v in (("T", self.t), ("B", self.b), ("R", self.r)) if v]
        if self.constant or not terms:
            terms.append(str(self.constant))
        return " + ".join(terms)


@functools.lru_cache(4096, typed=True)  # True isn't 1
def _affine(*terms: Any) -> Affine:
    half = len(terms) // 2
    return Affine.parse(terms[0] if len(terms) == 1 else dict(zip(terms[:half], terms[half:], strict=True)))


Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Operand(Record, frozen=True, kw_only=True):
    """A strided view of memory that a step reads or writes.

    Attributes:
        kind: the memory: "buffer", a buffer in the arena; "weight", a tensor in the bundle's weights; "input", an array
            of the step; "cache", a layer's KV cache.
        name: the buffer's or tensor's name, the array's name in ``step_schema``, or ``GROUP/LAYER`` for a cache.
        dtype: the type of the elements. It means nothing for a cache, whose type is that of its cache group.
        shape: the sizes; () for a cache.
        strides: the distance between neighbours along each dimension, in elements; () for a cache.
        offset: the position of the first element in the memory, in elements.
    """

    kind: Literal["buffer", "weight", "input", "cache"]
    name: str
    dtype: Dtype
    shape: tuple[Affine, ...]
    strides: tuple[Affine, ...]
    offset: Affine = field(default_factory=Affine)

    @property
    def rank(self) -> int:
        """The number of the operand's dimensions."""
        return len(self.shape)


class Buffer(Record, frozen=True, kw_only=True):
    """A piece of the arena. ``size`` and ``offset`` are in bytes; offset is None until memory is planned.

    ``region`` is the number of the memory that ranks share and that contains the buffer; 0 is the rank's own arena.
    """

    name: str
    size: Affine
    offset: Affine | None = None
    region: int = 0


class WeightUse(Record, frozen=True, kw_only=True):
    """A weight that the program reads: its name in the bundle's weight index, and the layout that it must have there.

    In a rank's program it may be a part of the weight ``source`` in the index: ``shape[0]`` rows, or experts, from
    ``first`` on. In panels, ``first`` is a multiple of a panel's 32 rows.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    layout: Layout
    source: str = ""
    first: int = 0


class Step(Record, frozen=True, kw_only=True):
    """One call of a kernel.

    Attributes:
        op: the op's name.
        inputs, outputs: its operands.
        attrs: its attributes by name.
        where: the path of the module that it computes a part of.
    """

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attrs: dict[str, Int64 | float | bool | str] = field(default_factory=dict)
    where: str = ""


class LoweredProgram(Record, frozen=True, kw_only=True):
    """A whole program.

    Attributes:
        arena_bytes: the bytes of all buffers, once memory is planned.
        ports: the arrays of a step that it reads besides those of every step: see ``step_schema``.
        taps: optional outputs: name -> (step, output of the step); their rows are copied when the step has run.
        regions: for a rank, (region, bytes) of memory that ranks share.
        ranks: for a rank, the first of the ranks that compute its steps together, and their number.
    """

    format_version: int = FORMAT_VERSION
    cache_groups: tuple[CacheGroup, ...]
    weights: tuple[WeightUse, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    outputs: dict[str, Operand]
    arena_bytes: Affine = field(default_factory=Affine)
    regions: tuple[tuple[int, Affine], ...] = ()
    ranks: tuple[int, int] = (0, 1)
    ports: tuple[str, ...] = ()
    taps: dict[str, tuple[Count, Count]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the program as JSON; equal programs give equal bytes."""
        return json.dumps(
            self.model_dump(mode="json", exclude_defaults=True) | {"format_version": self.format_version},
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "program.json") -> LoweredProgram:
        """Parses a program. Raises BundleError naming ``source`` and the field if it is invalid or of another
        version.
        """
        data = parse_versioned(text, FORMAT_VERSION, source, oldest=OLDEST_FORMAT_VERSION)
        from .op_schema import problem_of_step  # importing ``LLM`` doesn't need the declarations of ops

        program = read(cls, data, source)
        for i, step in enumerate(program.steps):
            if (problem := problem_of_step(step)) is not None:
                raise BundleError(f"{source}: steps.{i} {step.op}: {problem}", hint="Export the bundle again.")
        return program

    def memory_problem(self, tokens: int, requests: int, rows: int) -> str | None:
        """Checks the memory of a step of these sizes.

        Returns a message about the first access out of bounds, or None.
        """
        sizes = tokens, requests, rows
        arena = self.arena_bytes.evaluate(*sizes)
        room: dict[tuple[str, str], int] = {}  # bytes of buffers and weights
        for buffer in self.buffers:
            at, size = (None if a is None else a.evaluate(*sizes) for a in (buffer.offset, buffer.size))
            if at is None or size is None or at < 0 or size < 0 or at + size > arena:
                return f"buffer {buffer.name}: {size} bytes at {at} aren't in an arena of {arena} bytes"
            room["buffer", buffer.name] = size
        for use in self.weights:
            if use.layout in ("rows", "nibbles"):
                room["weight", use.name] = stored_bytes(use.dtype, math.prod(use.shape))
        views = [(f"step {i} {s.op}", o) for i, s in enumerate(self.steps) for o in (*s.inputs, *s.outputs)]
        for subject, operand in [*views, *((f"output {name}", o) for name, o in self.outputs.items())]:
            if (problem := _view_problem(operand, room, sizes)) is not None:
                return f"{subject}: {problem}"
        return None


def _view_problem(operand: Operand, room: Mapping[tuple[str, str], int], sizes: tuple[int, int, int]) -> str | None:
    """Returns a message about a view's access outside of its buffer or weight; None if it is inside.

    Args:
        operand: the view.
        room: (kind, name) of buffers and weights -> their bytes. A weight without an entry isn't checked.
        sizes: tokens, requests and rows of the step.
    """
    bytes_there = room.get((operand.kind, operand.name))
    if bytes_there is None:
        return f"there is no buffer {operand.name}" if operand.kind == "buffer" else None
    shape = [a.evaluate(*sizes) for a in operand.shape]
    strides = [a.evaluate(*sizes) for a in operand.strides]
    offset = operand.offset.evaluate(*sizes)
    if len(shape) != len(strides) or min((offset, *shape, *strides), default=0) < 0:
        return f"operand {operand.name}: a size, stride or offset is negative, or one is missing"
    if 0 in shape:
        return None
    end = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    if stored_bytes(operand.dtype, end) > bytes_there:
        return f"operand {operand.name} ends behind its {operand.kind}"
    return None
