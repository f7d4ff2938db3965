"""A kernel's launch: constants, grid and arguments, which are torch's tensors or a driver's memory. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from enginewright.runtime.shared.dtypes import DTYPES

from .specs import ARGUMENTS, Constant, KernelName, KernelSpec


class Operand(Protocol):
    """An array that a kernel reads or writes, with the interface of ``torch.Tensor``."""

    @property
    def dtype(self) -> Any:
        """The type of the elements; ``str`` gives its name."""

    @property
    def shape(self) -> Sequence[int]:
        """The sizes."""

    def stride(self, dim: int, /) -> int:
        """Elements from one to the next along a dimension."""

    def data_ptr(self) -> int:
        """Returns the address."""

    def storage_offset(self) -> Any:
        """Elements in front of it, counted from an address that is a multiple of 16."""

    def element_size(self) -> int:
        """Bytes of an element."""


@dataclass(frozen=True)
class DeviceArray:
    """An ``Operand`` at an address of a device, rows one after the other."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def stride(self, dim: int, /) -> int:
        """Returns the number of elements from one to the next along a dimension."""
        return int(np.prod(self.shape[dim + 1 :], dtype=np.int64))

    def data_ptr(self) -> int:
        """Returns its address."""
        return self.address

    def storage_offset(self) -> int:
        """Returns its offset in elements, as if the array began at address 0."""
        return self.address // self.dtype.itemsize

    def element_size(self) -> int:
        """Returns the bytes of an element."""
        return self.dtype.itemsize


Argument = Operand | int | None

_POINTERS = {of.torch: f"*{of.triton}" for of in DTYPES.values() if of.triton}
_ALIGNMENT = 16
"""Bytes: what the widest load of a thread takes."""


def in_order(kernel: KernelName, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """Returns the arguments that ``kernel`` takes, in the order of ``ARGUMENTS``; None for missing ones."""
    return {name: given.get(name) for name in ARGUMENTS[kernel]}


@dataclass(frozen=True)
class Call:
    """A launch.

    Attributes:
        kernel: which.
        arguments: name -> tensor, integer of 32 bits, or None, in the kernel's order, constants left out.
        constants: name -> value.
        grid: programs along x, y and z.
    """

    kernel: KernelName
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Constant]
    grid: tuple[int, int, int]
    warps: int = 4
    stages: int = 1

    def spec(self, capability: int) -> KernelSpec:
        """Returns the specification that the kernel is compiled for; equal for calls that differ in sizes alone."""
        typed, loose = [], []
        for name, value in self.arguments.items():
            if isinstance(value, int):
                typed.append((name, "i32"))
            elif value is not None:
                typed.append((name, _POINTERS[str(value.dtype).removeprefix("torch.")]))
                if value.storage_offset() * value.element_size() % _ALIGNMENT:
                    loose.append(name)
        constants = tuple(self.constants.items())
        return KernelSpec(
            self.kernel, capability, tuple(typed), constants, (), self.warps, self.stages, unaligned=tuple(loose)
        )
