"""A launch of a kernel: constants, grid and arguments, which are torch tensors or device memory. It doesn't need
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from enginewright.runtime.shared.dtypes import DTYPES

from .specs import ARGUMENTS, Constant, KernelName, KernelSpec


class Operand(Protocol):
    """An array that a kernel reads or writes, with a part of the interface of ``torch.Tensor``."""

    @property
    def dtype(self) -> Any:
        """The type of the elements, whose ``str`` is its name."""

    @property
    def shape(self) -> Sequence[int]:
        """The length of each dimension."""

    def stride(self, dim: int, /) -> int:
        """Returns the distance between neighbours along a dimension, in elements."""

    def data_ptr(self) -> int:
        """Returns the address of the first element."""

    def storage_offset(self) -> Any:
        """Returns the number of elements between the storage's start, a multiple of 16 bytes, and the first
        element.
        """

    def element_size(self) -> int:
        """Returns the size of an element in bytes."""


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous ``Operand`` at an address in a device's memory."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def stride(self, dim: int, /) -> int:
        """Returns the distance between neighbours along a dimension, in elements."""
        return int(np.prod(self.shape[dim + 1 :], dtype=np.int64))

    def data_ptr(self) -> int:
        """Returns the address of the first element."""
        return self.address

    def storage_offset(self) -> int:
        """Returns the offset in elements, as if the storage began at address 0."""
        return self.address // self.dtype.itemsize

    def element_size(self) -> int:
        """Returns the size of an element in bytes."""
        return self.dtype.itemsize


Argument = Operand | int | None

_POINTERS = {of.torch: f"*{of.triton}" for of in DTYPES.values() if of.triton}
_ALIGNMENT = 16
"""The bytes of the widest load of a thread."""


def in_order(kernel: KernelName, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """Returns the arguments of ``kernel`` from ``given``, in the order of ``ARGUMENTS``; None for missing ones."""
    return {name: given.get(name) for name in ARGUMENTS[kernel]}


@dataclass(frozen=True)
class Call:
    """A launch of a kernel.

    Attributes:
        kernel: the kernel's name.
        arguments: name -> array, 32-bit integer, or None, in the kernel's order, without constants.
        constants: name -> value.
        grid: the number of programs along x, y and z.
        warps, stages: Triton's options for the kernel.
    """

    kernel: KernelName
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Constant]
    grid: tuple[int, int, int]
    warps: int = 4
    stages: int = 1

    def spec(self, capability: int) -> KernelSpec:
        """Returns the specification for which the kernel is compiled. Calls that differ only in sizes have the same."""
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
