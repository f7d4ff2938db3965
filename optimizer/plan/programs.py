"""The programs that are planned: those of a bundle, or those that recipes would make of a model, without its
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.shared.target_parts import targets_with
from enginewright.plugins.steps.planning import Planning
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.targets import part


def planning_of(target: str) -> Planning | None:
    """Returns the planning of a target's programs; None if its package has none."""
    planning: Planning | None = getattr(part(target, "compile.plan"), "PLANNING", None)
    return planning


def target_on(*, gpu: bool) -> str:
    """Returns the name of the target whose programs are planned on GPUs, or on this machine."""
    for target in targets_with("compile.plan"):
        planning = planning_of(target)
        if planning is not None and planning.gpus == gpu:
            return target
    raise AssertionError("one of ours is planned on either")


@dataclass(frozen=True)
class PlannedProgram:
    """The program that recipes make of a model.

    Attributes:
        recipes: names of the recipes that make the same program, except for the numbers in its weights.
        program: the program with its memory planned; None if it can't be known without the weights.
        target: the target that runs it.
        formats: formats that need instructions of a GPU: "fp8", "int4", "bf16".
        omitted: the reason why a recipe has no program.
    """

    recipes: tuple[str, ...]
    program: LoweredProgram | None
    target: str
    formats: frozenset[str] = frozenset()
    omitted: str = ""


@dataclass(frozen=True)
class PlannedModel:
    """A model with its programs."""

    info: ModelInfo
    programs: tuple[PlannedProgram, ...]

    def programs_on(self, *, gpu: bool) -> tuple[PlannedProgram, ...]:
        """Returns the programs for a GPU, or those for this machine.

        For a GPU without programs of its own, they are another target's.
        """
        on_gpus = tuple(p for p in self.programs if p.target == target_on(gpu=True))
        others = tuple(p for p in self.programs if p.target != target_on(gpu=True))
        return (on_gpus or others) if gpu else others


def undecided(recipe: Recipe) -> str:
    """Returns the reason why the program of a recipe depends on the weights; "" if the model's configuration is
    enough.
    """
    if recipe.searched:
        return "a search over the weights decides its formats or shapes"
    if recipe.prune is not None or recipe.attention is not None:
        return "it takes parts of the model out"
    if recipe.sparse:
        return "which weights it keeps is for their values to say"
    return ""
