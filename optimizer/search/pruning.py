"""The search of [prune] for channels, heads and layers to remove: the most parameters within a KL budget.

Choices are measured with the compensation for the removed parts.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass, replace
from typing import ClassVar

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.framework.pruning import PruneOverride, Pruning
from enginewright.passes.framework.token_sequences import beginnings
from enginewright.passes.sparsity.drop_layers import LENGTH, TOKENS, DropLayers
from enginewright.passes.sparsity.prune_channels import PruneChannels
from enginewright.passes.sparsity.prune_heads import PruneHeads

from .assign import Assignment, Options, fewest_bytes
from .measure_choices import cache_bytes
from .pruning_sensitivity import PrunableLayer, Share, measure_layers
from .report import LayerChoice, PruneReport
from .search import NothingToChooseError, NothingWithinError, Search, Task, Tried


@dataclass(frozen=True)
class Removal:
    """The part of a layer to remove.

    Attributes:
        layer: the layer.
        channels, heads: the shares to remove, by the path of the module.
        whole: the removal of the whole layer; None if only shares are removed.
    """

    layer: PrunableLayer
    channels: dict[str, Share]
    heads: dict[str, Share]
    whole: Share | None

    @property
    def shares(self) -> list[Share]:
        """The removed shares: the whole layer's, or those of its channels and heads."""
        return [self.whole] if self.whole is not None else [*self.channels.values(), *self.heads.values()]

    @property
    def parameters(self) -> int:
        """The number of parameters that the removal saves."""
        return sum(s.parameters for s in self.shares)

    @property
    def cost(self) -> float:
        """The predicted KL of the removal, in nats per token."""
        return sum(s.cost for s in self.shares)


class PruningSearch(Search[PruneReport]):
    """The search for a recipe whose [prune] has a budget. Sizes are the removable parameters that stay."""

    stage: ClassVar[str] = "prune"
    section: ClassVar[str] = "prune"
    passes: ClassVar[tuple[str, ...]] = (DropLayers.name, PruneHeads.name, PruneChannels.name)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        # Fits are made of the tokens that layers are measured with, so that the check's are new to them.
        self.context = replace(self.context, calibration=tuple(task.sequences))

    @property
    def prune(self) -> Pruning:
        """The section [prune] of the recipe."""
        assert self.recipe.prune is not None
        return self.recipe.prune

    @property
    def max_kl(self) -> float:
        """The budget of the search: the largest KL, in nats per token."""
        assert self.prune.max_kl is not None
        return self.prune.max_kl

    def find_units(self) -> None:
        assert self.context.recipe.prune is not None
        seen = beginnings(self.context.calibration, TOKENS, LENGTH)
        self.tokens = sum(map(len, seen))
        layers, rejected = measure_layers(
            self.program, self.context.recipe.prune, seen, self.on_progress, cache_bytes(self.context.memory_budget)
        )
        if not layers:
            raise NothingToChooseError(
                f"recipe {self.recipe.name}: prune: nothing of this model can go within these shares"
                + (f": {rejected[0].reason}" if rejected else ""),
                hint="Allow larger shares, or some layers.",
            )
        self.removals = [_removals(layer) for layer in layers]
        most = [max(r.parameters for r in removals) for removals in self.removals]
        self.options = [
            Options(tuple(all_of_it - r.parameters for r in removals), tuple(r.cost for r in removals))
            for removals, all_of_it in zip(self.removals, most, strict=True)
        ]
        self.removable = sum(most)
        self.check = self.checked_on([DropLayers(), PruneHeads(), PruneChannels()])

    def choose(self) -> Tried:
        best = self.smallest(self.max_kl)
        if best is None:
            nearest = min(self.tried, key=lambda t: t.kl)
            removed = self._removed(nearest.choice)
            raise NothingWithinError(
                f"recipe {self.recipe.name}: nothing that may go is within max_kl = {self.max_kl:g} of [prune]: "
                f"without {removed:,} parameters, the nearest that was found, KL is {nearest.each}",
                hint="Allow more with max_kl in [prune], or recover what pruning costs by training.",
            )
        return best

    def fewest(self, most_kl: float) -> Assignment:
        assignment = fewest_bytes(self.options, most_kl)
        return self.curve[1] if assignment is None or not any(assignment.chosen) else assignment

    def applied(self, choice: Assignment) -> Recipe:
        """Returns the recipe with the removals of ``choice`` by name.

        If [budget] has no KL, it gets the KL of [prune].
        """
        overrides = [
            PruneOverride(layers=glob.escape(path), **{kind: share.share})
            for removal in self._chosen(choice)
            for kind, modules in (("channels", removal.channels), ("heads", removal.heads))
            for path, share in modules.items()
        ]
        dropped = tuple(glob.escape(r.layer.path) for r in self._chosen(choice) if r.whole is not None)
        update = {"channels": 0.0, "heads": 0.0, "layers": 0, "max_kl": None}
        prune = self.prune.model_copy(
            update={**update, "overrides": tuple(overrides), "drop": (*self.prune.drop, *dropped)}
        )
        budget = self.recipe.budget
        if budget.max_kl is None:
            budget = budget.model_copy(update={"max_kl": self.max_kl})
        return self.recipe.model_copy(update={"prune": prune, "budget": budget})

    def label(self, choice: Assignment) -> str:
        return f"{self._removed(choice):,} parameters less"

    def report(self, taken: Tried, seconds: float) -> PruneReport:
        return PruneReport(
            max_kl=self.max_kl,
            tokens=self.tokens,
            parameters_removed=self._removed(taken.choice),
            predicted_kl=taken.choice.cost,
            measured_kl=taken.measured,
            tried=tuple((self._removed(t.choice), t.choice.cost, t.kl) for t in self.tried),
            layers=tuple(_layer_choice(r) for r in self._chosen(taken.choice)),
            seconds=seconds,
        )

    def _removed(self, choice: Assignment) -> int:
        return self.removable - choice.size

    def _chosen(self, choice: Assignment) -> list[Removal]:
        return [removals[i] for removals, i in zip(self.removals, choice.chosen, strict=True)]


def _removals(layer: PrunableLayer) -> list[Removal]:
    """Returns the possible removals of a layer, the empty one first."""
    removals = [Removal(layer, {}, {}, None)]
    for path, shares in layer.channels.items():
        removals += [replace(r, channels={**r.channels, path: s}) for r in removals for s in shares]
    for path, shares in layer.heads.items():
        removals += [replace(r, heads={**r.heads, path: s}) for r in removals for s in shares]
    if layer.whole is not None:
        removals.append(Removal(layer, {}, {}, layer.whole))
    return removals


def _layer_choice(removal: Removal) -> LayerChoice:
    layer = removal.layer

    def measured(modules: dict[str, tuple[Share, ...]]) -> float | None:
        return sum(shares[-1].cost for shares in modules.values()) if modules else None

    return LayerChoice(
        layer=layer.path,
        dropped=removal.whole is not None,
        channels=max((s.share for s in removal.channels.values()), default=0.0),
        heads=max((s.share for s in removal.heads.values()), default=0.0),
        parameters=removal.parameters,
        predicted_kl=removal.cost,
        kl_channels=measured(layer.channels),
        kl_heads=measured(layer.heads),
        kl_layer=None if layer.whole is None else layer.whole.cost,
    )
