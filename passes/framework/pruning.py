"""A recipe's options of pruning: shares of channels and heads, and layers."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from math import lcm
from typing import Literal, Self

from pydantic import Field, StrictBool, model_validator

from enginewright.passes.ir.provenance import layer_path
from enginewright.runtime.shared.errors import RecipeError

from ..formats.section import Section
from ..formats.weight_format import WeightFormat

Kind = Literal["channels", "heads"]


class PruneOverride(Section):
    """Shares for the modules whose path, or whose layer's path, matches ``layers``; None is the recipe's own."""

    layers: str = Field(min_length=1)
    channels: float | None = Field(default=None, ge=0, lt=1)
    heads: float | None = Field(default=None, ge=0, lt=1)


class Pruning(Section):
    """[prune] of a recipe: what to remove.

    Attributes:
        channels, heads: shares of each layer's.
        layers: the number of layers to remove, chosen by the cost of leaving them out.
        drop: patterns of layers that go whatever that costs.
        overrides: other shares for some layers; the first that matches and says something counts.
        correct: True if what is kept compensates for what goes, by least squares.
        max_kl: mean KL per token in nats; shares and ``layers`` are then the most that may go, and what does is
            searched for.
        multiple: columns that are left come in multiples of it; see ``fitting``.
    """

    channels: float = Field(default=0.0, ge=0, lt=1)
    heads: float = Field(default=0.0, ge=0, lt=1)
    layers: int = Field(default=0, ge=0)
    drop: tuple[str, ...] = ()
    overrides: tuple[PruneOverride, ...] = ()
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

    def fitting(self, formats: Iterable[WeightFormat]) -> Self:
        """Returns these options with a multiple that the groups of all these formats divide, too."""
        sizes = [self.multiple]
        for f in formats:
            group_sizes = (f.group_size, f.activation_group_size, f.stored.multiple)
            sizes += [size for size in group_sizes if size]
        return self.model_copy(update={"multiple": lcm(*sizes)})

    def share(self, kind: Kind, path: str) -> float:
        """The share to be removed in the module at ``path``."""
        for override in self.overrides:
            share: float | None = getattr(override, kind)
            if share is not None and matches(override.layers, path):
                return share
        share = getattr(self, kind)
        assert share is not None
        return share

    def wants(self, kind: Kind) -> bool:
        """Returns True if any share of that kind is more than 0."""
        return getattr(self, kind) > 0 or any((getattr(o, kind) or 0) > 0 for o in self.overrides)

    def check_matched(self, kind: Kind, paths: list[str]) -> None:
        """Raises RecipeError for an override of that kind that matches none of the paths."""
        for override in self.overrides:
            if getattr(override, kind) is not None and not any(matches(override.layers, p) for p in paths):
                raise unmatched(override.layers, paths, f"prune.overrides: {kind}")


def matches(pattern: str, path: str) -> bool:
    """Returns True if a shell pattern names a module, or the layer that it is in."""
    return fnmatchcase(path, pattern) or fnmatchcase(layer_path(path), pattern)


def unmatched(pattern: str, paths: list[str], key: str) -> RecipeError:
    """The error for a pattern that is none of these paths'."""
    known = ", ".join(paths[:3]) + (f" ... {paths[-1]}" if len(paths) > 3 else "")
    return RecipeError(
        f"{key}: the pattern {pattern!r} matches nothing",
        hint=f"It is compared with {known or 'nothing that could be pruned'}, and the paths of their layers.",
    )
