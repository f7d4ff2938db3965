"""What a weight is stored as, as a recipe writes it and as passes and emitters read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, StrictBool, model_validator

from enginewright.runtime.shared.contracts import GROUP_SIZES_OF_4_BITS

from .section import Section

Storage = Literal["f32", "bf16", "int8", "int4", "fp8"]
Activation = Literal["float", "bf16", "int8", "fp8"]
Sparsity = Literal["dense", "2:4"]

ACTIVATION_OF: dict[Storage, Activation] = {
    "f32": "float",
    "bf16": "bf16",
    "fp8": "float",
    "int8": "int8",
    "int4": "int8",
}
"""What each of them is multiplied with."""

GROUP_SIZES: dict[Storage, tuple[int, ...]] = {
    "fp8": (0, 32, 64),
    "int8": (0, 32, 64),
    "int4": (0, *GROUP_SIZES_OF_4_BITS),
}
"""Of weights and of the activations that they are multiplied with; 0 is one scale a row."""


class WeightFormat(Section):
    """Everything that a linear needs to know about its weight, apart from how a target packs it.

    ``group_size`` is along the input dimension K; 0 means one scale per output channel. ``zero_point``: groups have an
    offset too, a float16 like their scale: a weight is value * scale + offset. ``activation`` is the format
    the input is brought to before the product, with one scale for ``activation_group_size`` values of a token, or for
    all of them (0).
    """

    storage: Storage = "f32"
    group_size: int = Field(default=0, ge=0)
    zero_point: StrictBool = False
    activation: Activation = "float"
    activation_group_size: int = Field(default=0, ge=0)
    sparsity: Sparsity = "dense"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (wanted := ACTIVATION_OF[self.storage]) != self.activation:
            raise ValueError(f"storage {self.storage!r} goes with activation {wanted!r}, not {self.activation!r}")
        groups = {"group_size": self.group_size, "activation_group_size": self.activation_group_size}
        for key, size in groups.items():
            if self.storage not in GROUP_SIZES and size:
                raise ValueError(f"{key} is {size}, but storage {self.storage!r} has no scales")
            if size not in (known := GROUP_SIZES.get(self.storage, (0,))):
                raise ValueError(f"{key} is {size}, which can't be made for {self.storage}, only {_listed(known)}")
        if self.activation_group_size and self.activation == "float":
            raise ValueError(
                f"activation_group_size is {self.activation_group_size}, but storage {self.storage!r} is multiplied "
                "with floats as they are"
            )
        if self.storage == "int4" and self.group_size != self.activation_group_size:
            raise ValueError(
                f"group_size is {self.group_size} and activation_group_size {self.activation_group_size}: "
                "for int4 they must be the same"
            )
        if self.group_size and self.activation_group_size and self.group_size != self.activation_group_size:
            raise ValueError(
                f"group_size is {self.group_size} and activation_group_size {self.activation_group_size}: "
                "where both are not 0 they must be the same"
            )
        if self.zero_point and self.storage != "int4":
            raise ValueError(f"zero_point can't be true for storage {self.storage!r}, only for 'int4'")
        if self.sparsity != "dense" and self.storage == "fp8":
            raise ValueError(f"sparsity {self.sparsity!r} can't be made for storage 'fp8' yet")
        if self.sparsity != "dense" and self.zero_point:
            raise ValueError(
                "sparsity '2:4' can't have zero_point = true: with an offset, what isn't kept would be one"
            )
        return self

    def for_inputs(self, size: int) -> WeightFormat:
        """The same for a weight with K = ``size``. Of 4 bits, one scale a channel is one group of K values."""
        if self.storage != "int4" or self.group_size:
            return self
        return self.model_copy(update={"group_size": size, "activation_group_size": size})

    def __str__(self) -> str:
        parts: list[str] = [self.storage]
        if self.group_size:
            parts.append(f"g{self.group_size}")
        if self.zero_point:
            parts.append("zp")
        if self.activation != "float":
            group = f":g{self.activation_group_size}" if self.activation_group_size else ""
            parts.append(f"a:{self.activation}{group}")
        if self.sparsity != "dense":
            parts.append(self.sparsity)
        return "-".join(parts)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
