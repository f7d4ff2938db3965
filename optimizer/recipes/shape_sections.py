"""The sections of a recipe that change a model's shape: what each may say."""

from __future__ import annotations

from math import lcm
from typing import Self

from pydantic import Field, StrictBool, model_validator

from enginewright.passes.framework.pruning import PruneOverride, Pruning
from enginewright.plugins.shared.contracts import MULTIPLE_OF_4_BITS

from .sections import AutoSection, Section, WeightsSection


class PruneOverrideSection(Section):
    """Other shares for the layers, or modules, whose path ``layers`` matches (shell pattern)."""

    layers: str = Field(min_length=1)
    channels: float | None = Field(default=None, ge=0, lt=1)
    heads: float | None = Field(default=None, ge=0, lt=1)


class PruneSection(Section):
    """What is removed: ``channels`` and ``heads``, shares of each layer's, and so many ``layers``.

    ``drop``: layers that go, by path. ``correct``: what is kept compensates for what goes. ``max_kl``: mean KL per
    token in nats; the shares and ``layers`` are then the most that may go, and what does is searched for. ``multiple``:
    of what is left, columns come in multiples of it, beside those that the groups of formats want.
    """

    channels: float = Field(default=0.0, ge=0, lt=1)
    heads: float = Field(default=0.0, ge=0, lt=1)
    layers: int = Field(default=0, ge=0)
    drop: tuple[str, ...] = ()
    overrides: tuple[PruneOverrideSection, ...] = ()
    correct: StrictBool = True
    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    multiple: int = Field(default=1, ge=1, le=1 << 16)

    @model_validator(mode="after")
    def _removes_something(self) -> Self:
        if any(o.channels is None and o.heads is None for o in self.overrides):
            raise ValueError("an override of [prune] says neither channels nor heads")
        shares = (self.channels, self.heads, *(s or 0 for o in self.overrides for s in (o.channels, o.heads)))
        if not any(shares) and not self.layers and not self.drop:
            raise ValueError("[prune] removes nothing: it needs channels, heads, layers or drop")
        return self

    def to_pruning(self, weights: WeightsSection, auto: AutoSection | None) -> Pruning:
        """The same as passes take it. What is left is to fit the groups of all these formats."""
        formats = (*weights.formats, *(auto.candidates if auto is not None else ()))
        sizes = [self.multiple, *(size for f in formats for size in (f.group_size, f.activation_group_size) if size)]
        sizes += [MULTIPLE_OF_4_BITS for f in formats if f.storage == "int4"]
        overrides = tuple(PruneOverride(o.layers, o.channels, o.heads) for o in self.overrides)
        return Pruning(self.channels, self.heads, self.layers, self.drop, overrides, self.correct, lcm(*sizes))
