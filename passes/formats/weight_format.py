"""The format of a weight, as a recipe writes it and as passes and emitters read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, StrictBool, model_validator

from enginewright.runtime.shared.weight_formats import FORMATS, SCALE_BLOCKS, Activation, Storage, StoredFormat

from .section import Section

Sparsity = Literal["dense", "2:4"]


class WeightFormat(Section):
    """Everything that a linear needs to know about its weight, apart from how a target packs it.

    ``group_size`` is along the input dimension K; 0 means one scale per output channel. ``zero_point``: groups have an
    offset too, a float16 like their scale: a weight is value * scale + offset. ``activation`` is the format
    the input is brought to before the product, with one scale for ``activation_group_size`` values of a token, or for
    all of them (0). ``scale_block``: so many groups share a float16, and each has a signed byte that multiplies it: 8
    or 16; 0 is a float16 for each group. The same goes for offsets.
    """

    storage: Storage = "f32"
    group_size: int = Field(default=0, ge=0)
    zero_point: StrictBool = False
    activation: Activation = "float"
    activation_group_size: int = Field(default=0, ge=0)
    sparsity: Sparsity = "dense"
    scale_block: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        stored = self.stored
        if (activation := stored.activation) != self.activation:
            raise ValueError(f"storage {self.storage!r} goes with activation {activation!r}, not {self.activation!r}")
        groups = {"group_size": self.group_size, "activation_group_size": self.activation_group_size}
        for key, size in groups.items():
            if size and not stored.group_sizes:
                raise ValueError(f"{key} is {size}, but storage {self.storage!r} has no scales")
            known = stored.group_sizes or (0,)
            if size not in known and (size or key == "group_size"):
                raise ValueError(f"{key} is {size}, which can't be made for {self.storage}, only {_listed(known)}")
        if self.activation_group_size and self.activation == "float":
            raise ValueError(
                f"activation_group_size is {self.activation_group_size}, but storage {self.storage!r} is multiplied "
                "with floats as they are"
            )
        if stored.integers and stored.multiple and self.group_size != self.activation_group_size:
            raise ValueError(
                f"group_size is {self.group_size} and activation_group_size {self.activation_group_size}: "
                f"for {self.storage} they must be the same"
            )
        if self.group_size and self.activation_group_size and self.group_size != self.activation_group_size:
            raise ValueError(
                f"group_size is {self.group_size} and activation_group_size {self.activation_group_size}: "
                "where both are not 0 they must be the same"
            )
        if self.zero_point and not stored.shifted:
            having = _listed(repr(name) for name, of in FORMATS.items() if of.shifted)
            raise ValueError(f"zero_point can't be true for storage {self.storage!r}, only for {having}")
        if self.sparsity != "dense" and not stored.sparse:
            raise ValueError(f"sparsity {self.sparsity!r} can't be made for storage {self.storage!r} yet")
        if self.scale_block and self.scale_block not in SCALE_BLOCKS:
            raise ValueError(f"scale_block is {self.scale_block}, and can be {_listed((0, *SCALE_BLOCKS))}")
        if self.scale_block and not (stored.integers and self.group_size):
            raise ValueError(f"scale_block is {self.scale_block}, but there are no groups of integers to share scales")
        if self.scale_block and self.sparsity != "dense":
            raise ValueError("scale_block can't go with sparsity '2:4': sparse kernels read a scale for each group")
        if self.sparsity != "dense" and self.zero_point:
            raise ValueError(
                "sparsity '2:4' can't have zero_point = true: with an offset, what isn't kept would be one"
            )
        return self

    @property
    def stored(self) -> StoredFormat:
        """The entry of its storage in the table of formats."""
        return FORMATS[self.storage]

    @property
    def everywhere(self) -> bool:
        """True if every target reads it; False if only targets with our own kernels for it do."""
        return self.stored.everywhere and not self.scale_block and self.group_size != 16

    def fits_blocks(self, size: int) -> bool:
        """Returns True if the groups of a weight with K = ``size`` fill whole blocks of scales, or aren't in blocks."""
        return not self.scale_block or size % (self.group_size * self.scale_block) == 0

    def for_inputs(self, size: int) -> WeightFormat:
        """Returns this format for a weight with K = ``size``: one scale per channel of 4 bits becomes one group of K
        values.
        """
        if self.group_size or not self.stored.multiple:
            return self
        return self.model_copy(update={"group_size": size, "activation_group_size": size})

    def __str__(self) -> str:
        parts: list[str] = [self.storage]
        if self.group_size:
            parts.append(f"g{self.group_size}")
        if self.zero_point:
            parts.append("zp")
        if self.scale_block:
            parts.append(f"b{self.scale_block}")
        if self.activation != "float":
            group = f":g{self.activation_group_size}" if self.activation_group_size else ""
            parts.append(f"a:{self.activation}{group}")
        if self.sparsity != "dense":
            parts.append(self.sparsity)
        return "-".join(parts)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
