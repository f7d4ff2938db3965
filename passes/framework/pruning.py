"""A recipe's options for pruning: shares of channels and heads, and layers to remove."""

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
    """Shares to remove in modules whose path, or whose layer's path, matches the pattern ``layers``.

    A share of None means the share of [prune] itself.
    """

    layers: str = Field(min_length=1)
    channels: float | None = Field(default=None, ge=0, lt=1)
    heads: float | None = Field(default=None, ge=0, lt=1)


class Pruning(Section):
    """[prune] of a recipe: the parts of the model to remove.

    Attributes:
        channels, heads: the shares of channels and of heads to remove in each layer, from 0 to below 1.
        layers: the number of layers to remove; those with the least loss are chosen.
        drop: patterns of the paths of layers that are removed in any case.
        overrides: other shares for some layers; for each kind of share, the first that matches and has that share
            applies.
        correct: True if the remaining weights compensate for removed ones by least squares.
        max_kl: the largest mean KL divergence in nats per token. With it, shares and ``layers`` are only upper limits,
            and a search chooses the parts to remove.
        multiple: the number of remaining columns of a weight is a multiple of this; ``fitting`` raises it for group
            sizes.
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
        """Returns a copy whose ``multiple`` is also a multiple of the group sizes of these formats."""
        sizes = [self.multiple]
        for f in formats:
            group_sizes = (f.group_size, f.activation_group_size, f.stored.multiple)
            sizes += [size for size in group_sizes if size]
        return self.model_copy(update={"multiple": lcm(*sizes)})

    def share(self, kind: Kind, path: str) -> float:
        """Returns the share of channels or heads (``kind``) to remove in the module at ``path``."""
        for override in self.overrides:
            share: float | None = getattr(override, kind)
            if share is not None and matches(override.layers, path):
                return share
        share = getattr(self, kind)
        assert share is not None
        return share

    def wants(self, kind: Kind) -> bool:
        """Returns True if any share of channels or heads (``kind``) is more than 0."""
        return getattr(self, kind) > 0 or any((getattr(o, kind) or 0) > 0 for o in self.overrides)

    def check_matched(self, kind: Kind, paths: list[str]) -> None:
        """Raises RecipeError if an override with a share of this kind matches none of the module paths."""
        for override in self.overrides:
            if getattr(override, kind) is not None and not any(matches(override.layers, p) for p in paths):
                raise unmatched(override.layers, paths, f"prune.overrides: {kind}")


def matches(pattern: str, path: str) -> bool:
    """Returns True if the shell pattern matches the module's path, or the path of its layer."""
    return fnmatchcase(path, pattern) or fnmatchcase(layer_path(path), pattern)


def unmatched(pattern: str, paths: list[str], key: str) -> RecipeError:
    """Returns the error for a pattern that matches none of the module paths. ``key`` is the recipe's key, for the
    message.
    """
    known = ", ".join(paths[:3]) + (f" ... {paths[-1]}" if len(paths) > 3 else "")
    return RecipeError(
        f"{key}: the pattern {pattern!r} matches nothing",
        hint=f"It is compared with {known or 'nothing that could be pruned'}, and the paths of their layers.",
    )
