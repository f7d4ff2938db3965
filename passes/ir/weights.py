"""Weights as lazy expressions over source tensors, evaluated one at a time when a target is emitted.

Fusing or folding builds a new expression and costs no memory. Every expression knows the source tensors and indices of
its rows (``parts``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass

import torch

from enginewright.runtime.shared.errors import PassError, SourceError

from .provenance import Part

Shape = tuple[int, ...]
Read = Callable[[], torch.Tensor]

COMPUTED = "computed:"
"""The prefix of the names of sources that aren't in the checkpoint: the model, or a pass, computes them."""


class WeightExpr(ABC):
    """A weight that is computed when it is needed. Expressions are immutable; equal expressions have equal values."""

    @property
    @abstractmethod
    def shape(self) -> Shape: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def evaluate(self) -> torch.Tensor:
        """Returns the value, which may not be contiguous and must not be modified."""

    @abstractmethod
    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        """Returns the origins in source tensors of the indices along ``axis``, in order."""

    @abstractmethod
    def describe(self) -> str:
        """Returns the expression as stable text, for ``print_program``."""


@dataclass(frozen=True)
class InPlaceOf(WeightExpr):
    """An expression whose values replace those of ``base``. It is float32 unless a subclass overrides that.

    Its rows have the provenance of the base's rows.
    """

    base: WeightExpr

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return self.base.parts(axis)


@dataclass(frozen=True)
class Rearranged(WeightExpr):
    """An expression with numbers of ``base`` in other places, and its type."""

    base: WeightExpr

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


@dataclass(frozen=True)
class Source(WeightExpr):
    """A tensor of the checkpoint. ``read`` returns it each time that it is needed.

    Attributes:
        name: the tensor's name.
        source_shape, source_dtype: its shape and type.
        read: reads the tensor.
        origin: its file or model. Its numbers must be finite. "" for values that capture computed.
        stored: the way in which the file packs the tensor; "" for a plain tensor.
    """

    name: str
    source_shape: Shape
    source_dtype: torch.dtype
    read: Read = field(compare=False, repr=False)
    origin: str = field(default="", compare=False)
    stored: str = field(default="", compare=False)

    @property
    def shape(self) -> Shape:
        return self.source_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source_dtype

    def evaluate(self) -> torch.Tensor:
        value = self.read()
        if tuple(value.shape) != self.source_shape or value.dtype != self.source_dtype:
            raise PassError(
                f"weight {self.name}: read {value.dtype} {tuple(value.shape)}, "
                f"expected {self.source_dtype} {self.source_shape}"
            )
        if self.origin:
            self._check_finite(value)
        return value

    def _check_finite(self, value: torch.Tensor) -> None:
        """Raises SourceError naming the tensor if ``value`` contains NaN or infinity."""
        if not value.is_floating_point() or not value.numel():
            return
        wide = value if value.element_size() > 1 else value.float()  # no reductions of 8-bit floats
        low, high = torch.aminmax(wide)  # NaN if there is one
        if low.isfinite() and high.isfinite():
            return
        nan, infinite = int(wide.isnan().sum()), int(wide.isinf().sum())
        raise SourceError(
            f"{self.origin}: tensor {self.name} has {nan:,} values that are NaN and {infinite:,} that are infinite, "
            f"of {value.numel():,}",
            hint="The checkpoint is damaged, or its training diverged: download it again, or take another one.",
        )

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return (Part(self.name, 0, self.source_shape[axis] if self.source_shape else 1, axis),)

    def describe(self) -> str:
        return self.name


def sources_of(expr: WeightExpr) -> Iterator[Source]:
    """Yields the tensors of the checkpoint that a weight is computed from, in order, with repetitions."""
    if isinstance(expr, Source):
        yield expr
        return
    open_: list[object] = [getattr(expr, f.name) for f in fields(expr)] if is_dataclass(expr) else []
    for value in open_:
        yield from _sources_in(value)


def _sources_in(value: object) -> Iterator[Source]:
    if isinstance(value, WeightExpr):
        yield from sources_of(value)
    elif isinstance(value, tuple):
        for one in value:
            yield from _sources_in(one)


@dataclass(frozen=True)
class Cast(InPlaceOf):
    """The base converted to the dtype ``to``."""

    to: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.to

    def evaluate(self) -> torch.Tensor:
        return self.base.evaluate().to(self.to)

    def describe(self) -> str:
        return f"cast({self.base.describe()}, {str(self.to).removeprefix('torch.')})"


@dataclass(frozen=True)
class Slice(Rearranged):
    """The indices ``start:stop`` of the base along ``dim``."""

    dim: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.base.shape[self.dim]:
            raise PassError(f"slice {self.start}:{self.stop} of axis {self.dim} of {self.base.shape}")

    @property
    def shape(self) -> Shape:
        return (*self.base.shape[: self.dim], self.stop - self.start, *self.base.shape[self.dim + 1 :])

    def evaluate(self) -> torch.Tensor:
        return self.base.evaluate().narrow(self.dim, self.start, self.stop - self.start)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        parts = self.base.parts(axis)
        if axis != self.dim:
            return parts
        cut: list[Part] = []
        at, overlaps = 0, False
        for part in parts:
            low, high = max(self.start - at, 0), min(self.stop - at, part.size)
            if part.mixed == 0 and overlaps:  # it goes with the one before
                cut.append(part)
            if part.mixed != 0:
                overlaps = low < high
            if low < high:
                span = (low, high) if part.mixed is None else (0, part.stop - part.start)
                mixed = None if part.mixed is None else high - low
                cut.append(Part(part.source, part.start + span[0], part.start + span[1], part.axis, mixed))
            at += part.size
        return tuple(cut)

    def describe(self) -> str:
        return f"slice({self.base.describe()}, {self.dim}, {self.start}:{self.stop})"


@dataclass(frozen=True)
class Concat(WeightExpr):
    """The bases concatenated along ``dim``."""

    bases: tuple[WeightExpr, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        first = self.bases[0]
        for base in self.bases[1:]:
            same = all(a == b for i, (a, b) in enumerate(zip(first.shape, base.shape, strict=True)) if i != self.dim)
            if not same or base.dtype != first.dtype:
                raise PassError(f"can't concatenate {base.dtype} {base.shape} with {first.dtype} {first.shape}")

    @property
    def shape(self) -> Shape:
        first = self.bases[0].shape
        return (*first[: self.dim], sum(b.shape[self.dim] for b in self.bases), *first[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        return self.bases[0].dtype

    def evaluate(self) -> torch.Tensor:
        return torch.cat([b.evaluate() for b in self.bases], self.dim)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return tuple(part for base in self.bases for part in base.parts(axis))

    def describe(self) -> str:
        return f"concat({', '.join(b.describe() for b in self.bases)}, {self.dim})"


@dataclass(frozen=True)
class Transpose(Rearranged):
    """The base with its two axes exchanged."""

    def __post_init__(self) -> None:
        if len(self.base.shape) != 2:
            raise PassError(f"transpose of a weight of shape {self.base.shape}")

    @property
    def shape(self) -> Shape:
        return self.base.shape[::-1]

    def evaluate(self) -> torch.Tensor:
        return self.base.evaluate().t()

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return self.base.parts(1 - axis)

    def describe(self) -> str:
        return f"transpose({self.base.describe()})"


@dataclass(frozen=True)
class Apply(WeightExpr):
    """An ATen op on weights and numbers, from constant folding, such as a norm's ``1 + weight``.

    ``shape_after`` and ``dtype_after`` are those of the result. The origins along an axis are those of each argument
    along the same axis, if its size there is the result's. Of other arguments they are all rows.
    """

    op: torch._ops.OpOverload
    args: tuple[object, ...]  # WeightExpr, number, None, or a tuple of those
    kwargs: tuple[tuple[str, object], ...]
    shape_after: Shape
    dtype_after: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.shape_after

    @property
    def dtype(self) -> torch.dtype:
        return self.dtype_after

    def _bases(self) -> Iterator[WeightExpr]:
        for arg in self.args:
            for one in arg if isinstance(arg, tuple) else (arg,):
                if isinstance(one, WeightExpr):
                    yield one

    def evaluate(self) -> torch.Tensor:
        def value(arg: object) -> object:
            if isinstance(arg, tuple):
                return [value(a) for a in arg]
            return arg.evaluate() if isinstance(arg, WeightExpr) else arg

        result = self.op(*[value(a) for a in self.args], **dict(self.kwargs))
        assert isinstance(result, torch.Tensor)
        return result

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        origins: dict[Part, None] = {}
        for base in self._bases():
            if not base.shape or not self.shape_after:  # a number, or what is summed up in one
                origins.update(dict.fromkeys(base.parts(0)))
                continue
            aligned = len(base.shape) - len(self.shape_after) + axis  # axes align on the right, as in broadcasting
            if aligned >= 0 and base.shape[aligned] == self.shape_after[axis]:
                origins.update(dict.fromkeys(base.parts(aligned)))
            else:
                origins.update(dict.fromkeys(base.parts(0)))
        return tuple(origins)

    def describe(self) -> str:
        def text(arg: object) -> str:
            if isinstance(arg, tuple):
                return "[" + ", ".join(text(a) for a in arg) + "]"
            return arg.describe() if isinstance(arg, WeightExpr) else repr(arg)

        named = [f"{k}={v!r}" for k, v in self.kwargs]
        return f"{self.op.name().removeprefix('aten::')}({', '.join([text(a) for a in self.args] + named)})"


@dataclass(frozen=True)
class Zeros(WeightExpr):
    """A bias of zeros for a linear without a bias: one zero for each row of the weight ``beside``.

    Each zero has the provenance of its row.
    """

    beside: WeightExpr

    @property
    def shape(self) -> Shape:
        return self.beside.shape[:1]

    @property
    def dtype(self) -> torch.dtype:
        return self.beside.dtype

    def evaluate(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return self.beside.parts(0)

    def describe(self) -> str:
        return f"zeros({self.shape[0]})"


class WeightStore:
    """Weights by name, in insertion order. Names are unique; values are lazy."""

    def __init__(self) -> None:
        self._by_name: dict[str, WeightExpr] = {}

    def add(self, name: str, expr: WeightExpr) -> str:
        """Adds ``expr`` and returns its name, which is ``name``, or ``name.2`` and so on if that exists."""
        unique, n = name, 1
        while unique in self._by_name:
            if self._by_name[unique] == expr:
                return unique
            n += 1
            unique = f"{name}.{n}"
        self._by_name[unique] = expr
        return unique

    def change(self, name: str, expr: WeightExpr) -> None:
        """Replaces the expression of an existing weight."""
        if name not in self._by_name:
            raise PassError(f"there is no weight {name} to change")
        self._by_name[name] = expr

    def keep_only(self, names: set[str]) -> None:
        """Removes all weights except ``names``."""
        self._by_name = {k: v for k, v in self._by_name.items() if k in names}

    def copy(self) -> WeightStore:
        other = WeightStore()
        other._by_name = dict(self._by_name)
        return other

    def __getitem__(self, name: str) -> WeightExpr:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
