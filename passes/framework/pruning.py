"""What a recipe wants removed of a model: shares of channels and heads, and layers."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from enginewright.passes.ir.provenance import layer_path
from enginewright.plugins.shared.errors import RecipeError

Kind = Literal["channels", "heads"]


@dataclass(frozen=True)
class PruneOverride:
    """Shares for the modules whose path, or whose layer's path, matches ``layers``; None is the recipe's own."""

    layers: str
    channels: float | None = None
    heads: float | None = None


@dataclass(frozen=True)
class Pruning:
    """What to remove.

    Attributes:
        channels, heads: shares of each layer's, 0 <= share < 1.
        layers: how many layers go, chosen by what leaving them out costs.
        drop: patterns of layers that go whatever that costs.
        overrides: other shares for some layers; the first that matches and says something counts.
        correct: whether what is kept compensates for what goes, by least squares.
        groups: that the columns that are left must be a multiple of: of the formats that weights will have.
    """

    channels: float = 0.0
    heads: float = 0.0
    layers: int = 0
    drop: tuple[str, ...] = ()
    overrides: tuple[PruneOverride, ...] = ()
    correct: bool = True
    groups: int = 1

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
        """Whether any share of that kind is more than nothing."""
        return getattr(self, kind) > 0 or any((getattr(o, kind) or 0) > 0 for o in self.overrides)

    def check_matched(self, kind: Kind, paths: list[str]) -> None:
        """Raises RecipeError for an override of that kind that matches none of the paths."""
        for override in self.overrides:
            if getattr(override, kind) is not None and not any(matches(override.layers, p) for p in paths):
                raise unmatched(override.layers, paths, f"prune.overrides: {kind}")


def matches(pattern: str, path: str) -> bool:
    """Whether a shell pattern names a module, or the layer that it is in."""
    return fnmatchcase(path, pattern) or fnmatchcase(layer_path(path), pattern)


def unmatched(pattern: str, paths: list[str], key: str) -> RecipeError:
    """The error for a pattern that is none of these paths'."""
    known = ", ".join(paths[:3]) + (f" ... {paths[-1]}" if len(paths) > 3 else "")
    return RecipeError(
        f"{key}: the pattern {pattern!r} matches nothing",
        hint=f"It is compared with {known or 'nothing that could be pruned'}, and the paths of their layers.",
    )
