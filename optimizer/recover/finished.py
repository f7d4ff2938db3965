"""A finished recovery on its way into an export: what it is of is checked, then its tensors take weights' places."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from enginewright.optimizer.calibration import Calibration
from enginewright.optimizer.calibration.coverage import measure_coverage
from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.recovered import Recovered, RecoveredWeights, trainable_weights
from enginewright.passes.ir.weights import WeightExpr
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RecipeError, RequestError, SourceError

from .differentiable import recovered_in
from .folder import WEIGHTS, Description, Fingerprint, RecoveryFolder, WeightEntry, digest_of

_OF_NO_SHAPE = frozenset({"name", "description", "targets", "context_length", "budget", "calibration", "buckets"})
"""Keys of a recipe that say nothing of what is trained."""
_OF_FORMATS = frozenset({"weights", "passes", "auto"})
"""Keys that do if weights were rounded while they were trained."""

_SAMPLE = 1024
"""Values of a tensor that a fingerprint looks at."""


def fingerprint(captured: CapturedModel) -> Fingerprint:
    """Identifies a model as captured, from a folder and from memory alike. Reads every weight once."""
    digest = hashlib.sha256()
    weights = captured.program.weights
    for name in trainable_weights(weights):
        value = weights[name].evaluate().reshape(-1)
        step = max(1, value.numel() // _SAMPLE)
        digest.update(f"{name} {weights[name].shape}".encode())
        digest.update(value[::step].float().contiguous().numpy().tobytes())
    info = captured.model_info
    return Fingerprint(architecture=info.architecture, parameters=info.parameters, digest=digest.hexdigest())


@dataclass(frozen=True)
class FinishedRecovery:
    """A folder that ``recover`` has finished, for an export."""

    folder: RecoveryFolder
    description: Description

    @property
    def recipe(self) -> Recipe:
        """The recipe that the weights were trained for."""
        return self.description.recipe

    @staticmethod
    def open(path: str | Path) -> FinishedRecovery:
        """Raises SourceError if the folder isn't a recovery, isn't finished, or is damaged."""
        folder = RecoveryFolder(path)
        description = folder.description()
        if description.report is None or not (folder.path / WEIGHTS).is_file():
            raise SourceError(
                f"{folder.path}: the recovery isn't finished",
                hint="Continue with it: optimize recover with --resume.",
            )
        return FinishedRecovery(folder, description)

    def recipe_for(self, recipe: Recipe | None) -> Recipe:
        """The recipe to export with: ``recipe``, or the one of the training if it is None.

        If ``recipe`` searches for formats and shapes, only formats are searched for: shapes without a number are taken
        from the training.

        Raises RecipeError, naming the key, if ``recipe`` shapes the model differently, or if the weights were trained
        for one rounding and ``recipe`` rounds them in another way.
        """
        requested, trained = self.description.asked, self.description.recipe
        if recipe is None:
            return trained
        if recipe.auto is not None and recipe.shares:
            sections = {"prune": recipe.prune, "attention": recipe.attention}
            free = [name for name, section in sections.items() if section is None or section.max_kl is not None]
            recipe = recipe.model_copy(update={name: getattr(trained, name) for name in free})
        checked = set(Recipe.model_fields) - _OF_NO_SHAPE - (_OF_FORMATS if trained.weights.exact else set())
        for key in sorted(checked):
            if getattr(recipe, key) not in (getattr(requested, key), getattr(trained, key)):
                raise RecipeError(
                    f"recipe {recipe.name}: {key} is not what {self.folder.path} was trained for "
                    f"(recipe {trained.name})",
                    hint="Leave --recipe out to take the recipe of the training, or recover the model for this one.",
                )
        return recipe.model_copy(update={key: getattr(trained, key) for key in checked})

    def check_source(self, captured: CapturedModel) -> None:
        """Raises SourceError if it is not the model that was recovered."""
        there, here = self.description.source, fingerprint(captured)
        if there != here:
            what = "the same architecture with other weights" if _alike(there, here) else "another one"
            raise SourceError(
                f"{self.folder.path} was trained from a {there.architecture} of {there.parameters:,} parameters, and "
                f"this is {what}: a {here.architecture} of {here.parameters:,}",
                hint="Pass the model that was recovered.",
            )

    def calibration(self, info: ModelInfo, file: str | Path | None) -> Calibration | None:
        """The tokens that passes looked at when the model was recovered, so that they choose the same again; None if
        they looked at none.

        Raises RequestError if a ``file`` is given to look at instead.
        """
        sequences = self.folder.tokens(self.description.origin)[1]
        if not sequences:
            return None
        if file is not None:
            raise RequestError(
                f"calibration: {self.folder.path} has the tokens that its weights' shapes were chosen by",
                hint="Leave --calibration out.",
            )
        return Calibration(
            sequences, f"as recovered in {self.folder.path.name}", measure_coverage(sequences, info.vocab_size)
        )

    def weights(self) -> RecoveredWeights:
        """The trained weights, in the form that ``LoadRecovered`` takes. Raises SourceError if they can't be read."""
        return _Tensors(self.folder.path / WEIGHTS, self.folder.weights(), self.description.weights)


def _alike(a: Fingerprint, b: Fingerprint) -> bool:
    return (a.architecture, a.parameters) == (b.architecture, b.parameters)


@dataclass(frozen=True)
class _Tensors(RecoveredWeights):
    file: Path
    tensors: Mapping[str, torch.Tensor]
    entries: Mapping[str, WeightEntry]

    def replacing(self, weights: Mapping[str, WeightExpr]) -> dict[str, Recovered]:
        if different := sorted(set(weights) ^ set(self.tensors)):
            name = different[0]
            where = "is missing" if name in weights else "is none of this model's"
            raise SourceError(
                f"{self.file}: {name} {where} ({len(different)} such)",
                hint="Export the model that was recovered, with its recipe.",
            )
        return {name: self._checked(name, expr) for name, expr in weights.items()}

    def _checked(self, name: str, expr: WeightExpr) -> Recovered:
        value, entry = self.tensors[name], self.entries.get(name)
        if tuple(value.shape) != expr.shape or value.dtype != torch.float32:
            raise SourceError(
                f"{self.file}: {name} is {value.dtype} {tuple(value.shape)}, and the model's is float32 {expr.shape}",
                hint="Export the model that was recovered, with its recipe.",
            )
        if not torch.isfinite(value).all():
            raise SourceError(f"{self.file}: {name} has values that are not finite", hint="Recover the model again.")
        digest = digest_of(value)
        if entry is None or entry.digest != digest:
            raise SourceError(f"{self.file}: {name} is not what was written", hint="Recover the model again.")
        if entry.origin != WeightEntry.from_expression(expr).origin:
            raise SourceError(
                f"{self.file}: {name} was trained in the place of other rows of the source than the recipe's passes "
                "choose now",
                hint="A pass that looks at what the model computes chose otherwise: recover the model again.",
            )
        return Recovered(expr, name, digest, lambda: value)


def entries_of(program: Program) -> dict[str, WeightEntry]:
    """The entries of recovery.json for the weights under training, which are in ``program``."""
    entries: dict[str, WeightEntry] = {}
    for name in program.weights:
        for leaf in recovered_in(program.weights[name]):
            entries.setdefault(leaf.name, WeightEntry.from_expression(leaf.base))
    return entries
