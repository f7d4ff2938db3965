"""The format of a weight, as recipes write it and as passes and emitters read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, StrictBool, model_validator

from enginewright.runtime.shared.weight_formats import FORMATS, SCALE_BLOCKS, Activation, Storage, StoredFormat

from .section import Section

Sparsity = Literal["dense", "2:4"]


class WeightFormat(Section):
    """The format of a weight [N, K], except for the layout that a target packs it into.

    Attributes:
        storage: the name of the format of the values, a row of ``FORMATS``.
        group_size: the number of neighbours along K that share a scale; 0 for one scale for each of the N outputs.
        zero_point: True if each group has an offset too, a float16 like the scale: a weight is value * scale + offset.
        activation: the format into which the input is converted before the product.
        activation_group_size: the number of values of a token that share a scale in that format; 0 for all of them.
        sparsity: "2:4" if at most two of four neighbours along K aren't 0.
        scale_block: the number of groups, 8 or 16, that share one float16, which a signed byte of each group
            multiplies; 0 if each group has its own float16. Offsets are stored like scales.
    """

    storage: Storage = "f32"
    group_size: int = Field(default=0, ge=0)
    zero_point: StrictBool = False
    activation: Activation = "float"
    activation_group_size: int = Field(default=0, ge=0)
    sparsity: Sparsity = "dense"
    scale_block: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        stored, group, activation_group = self.stored, self.group_size, self.activation_group_size
        if (activation := stored.activation) != self.activation:
            raise ValueError(f"storage {self.storage!r} goes with activation {activation!r}, not {self.activation!r}")
        for key, size in (("group_size", group), ("activation_group_size", activation_group)):
            if size and not stored.group_sizes:
                raise ValueError(f"{key} is {size}, but storage {self.storage!r} has no scales")
            known = stored.group_sizes or (0,)
            if size not in known and (size or key == "group_size"):
                raise ValueError(f"{key} is {size}, which can't be made for {self.storage}, only {_listed(known)}")
        if activation_group and self.activation == "float":
            raise ValueError(
                f"activation_group_size is {activation_group}, but storage {self.storage!r} is multiplied "
                "with floats as they are"
            )
        always_equal = stored.integers and stored.multiple
        if group != activation_group and (always_equal or (group and activation_group)):
            which = f"for {self.storage}" if always_equal else "where both are not 0"
            raise ValueError(
                f"group_size is {group} and activation_group_size {activation_group}: {which} they must be the same"
            )
        return self

    @model_validator(mode="after")
    def _offsets_fit(self) -> Self:
        if self.zero_point and not self.stored.shifted:
            having = _listed(repr(name) for name, of in FORMATS.items() if of.shifted)
            raise ValueError(f"zero_point can't be true for storage {self.storage!r}, only for {having}")
        return self

    @model_validator(mode="after")
    def _sparsity_fits(self) -> Self:
        if self.sparsity == "dense":
            return self
        if not self.stored.sparse:
            raise ValueError(f"sparsity {self.sparsity!r} can't be made for storage {self.storage!r} yet")
        if self.scale_block:
            raise ValueError("scale_block can't go with sparsity '2:4': sparse kernels read a scale for each group")
        if self.zero_point:
            raise ValueError(
                "sparsity '2:4' can't have zero_point = true: with an offset, what isn't kept would be one"
            )
        return self

    @model_validator(mode="after")
    def _scale_blocks_fit(self) -> Self:
        if self.scale_block and self.scale_block not in SCALE_BLOCKS:
            raise ValueError(f"scale_block is {self.scale_block}, and can be {_listed((0, *SCALE_BLOCKS))}")
        if self.scale_block and not (self.stored.integers and self.group_size):
            raise ValueError(f"scale_block is {self.scale_block}, but there are no groups of integers to share scales")
        return self

    @property
    def stored(self) -> StoredFormat:
        """The row of ``FORMATS`` for ``storage``."""
        return FORMATS[self.storage]

    @property
    def everywhere(self) -> bool:
        """True if every target reads the format; False if it needs kernels of ours, which only some targets have."""
        return self.stored.everywhere and not self.scale_block and self.group_size != 16

    def fits_blocks(self, size: int) -> bool:
        """Returns True if the groups of a weight with K = ``size`` fill whole blocks of scales, or if there are no
        blocks.
        """
        return not self.scale_block or size % (self.group_size * self.scale_block) == 0

    def for_inputs(self, size: int) -> WeightFormat:
        """Returns this format for a weight with K = ``size``.

        It differs only for formats that need a group size: without one, all of K becomes one group.
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
