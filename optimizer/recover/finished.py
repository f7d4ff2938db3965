"""A finished recovery for an export: checks that it belongs to the model and recipe, and replaces weights by trained
ones.
"""

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
"""Keys of a recipe that don't affect the trained weights."""
_OF_FORMATS = frozenset({"weights", "passes", "auto"})
"""Keys of a recipe that affect the trained weights only if these were rounded during training."""

_SAMPLE = 1024
"""The number of values of a tensor that a fingerprint hashes."""


def fingerprint(captured: CapturedModel) -> Fingerprint:
    """Returns the identity of a captured model, which is the same for a folder and for a model in memory. Reads every
    weight once.
    """
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
    """A recovery that is finished.

    Attributes:
        folder: the folder.
        description: the content of recovery.json.
    """

    folder: RecoveryFolder
    description: Description

    @property
    def recipe(self) -> Recipe:
        """The recipe that the weights were trained for."""
        return self.description.recipe

    @staticmethod
    def open(path: str | Path) -> FinishedRecovery:
        """Opens a folder. Raises SourceError if it isn't a recovery, isn't finished, or is damaged."""
        folder = RecoveryFolder(path)
        description = folder.description()
        if description.report is None or not (folder.path / WEIGHTS).is_file():
            raise SourceError(
                f"{folder.path}: the recovery isn't finished",
                hint="Continue with it: optimize recover with --resume.",
            )
        return FinishedRecovery(folder, description)

    def recipe_for(self, recipe: Recipe | None) -> Recipe:
        """Returns the recipe to export with: ``recipe``, or the recipe of the training if it is None.

        If ``recipe`` searches for formats and shapes, only formats are searched for: the shapes of the training are
        kept.

        Raises:
            RecipeError: ``recipe`` changes the model's shape in another way, or rounds weights in another way than that
                of the training; the message names the key.
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
        """Raises SourceError if a captured model isn't the one that was recovered."""
        there, here = self.description.source, fingerprint(captured)
        if there != here:
            what = "the same architecture with other weights" if _alike(there, here) else "another one"
            raise SourceError(
                f"{self.folder.path} was trained from a {there.architecture} of {there.parameters:,} parameters, and "
                f"this is {what}: a {here.architecture} of {here.parameters:,}",
                hint="Pass the model that was recovered.",
            )

    def calibration(self, info: ModelInfo, file: str | Path | None) -> Calibration | None:
        """Returns the calibration tokens of the recovery, so that passes make the same choices; None if no pass read
        tokens.

        Raises RequestError if a calibration ``file`` is passed, since the recovery has its own tokens.
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
        """Returns the trained weights for ``LoadRecovered``. Raises SourceError if they can't be read."""
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
    """Returns the entries of recovery.json for the weights under training of a program."""
    entries: dict[str, WeightEntry] = {}
    for name in program.weights:
        for leaf in recovered_in(program.weights[name]):
            entries.setdefault(leaf.name, WeightEntry.from_expression(leaf.base))
    return entries
