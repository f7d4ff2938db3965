"""A recovery's folder: its inputs, checkpoints, and the final weights.

    recovery.json          the model, recipe and options, each weight's shape and origin; the report once finished
    tokens.safetensors     sequences for training, for measurements, and for calibrated passes
    checkpoint-000100/     weights, the optimizer's state and figures after 100 steps; only the newest is kept
    weights.safetensors    the final weights, float32
    loss.html              a chart of the loss

Each is written under a temporary name and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.ir.weights import WeightExpr
from enginewright.runtime.bundle.output_folder import Inputs, files_in, output_place, shortened
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import CapacityError, RequestError, SourceError
from enginewright.runtime.shared.json_document import parse_json

from .sequences import Sequences

FORMAT = 1
"""The version of recovery.json; a folder with another one is refused."""

DESCRIPTION, TOKENS, WEIGHTS, PLOT = "recovery.json", "tokens.safetensors", "weights.safetensors", "loss.html"
_CHECKPOINT, _STATE, _OPTIMIZER = "checkpoint-", "state.json", "optimizer.safetensors"
_OURS = re.compile(
    rf"(({_CHECKPOINT}\d+|unfinished)/)?(recovery\.json|state\.json|loss\.html|\w+\.safetensors)(\.unfinished)?"
)
"""The paths of all files that a recovery writes."""


class Fingerprint(BaseModel):
    """The identity of a model.

    Attributes:
        architecture: the name of the architecture.
        parameters: the number of parameters.
        digest: a hash of a sample of each weight.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: str
    parameters: int
    digest: str


class WeightEntry(BaseModel):
    """A trained weight.

    Attributes:
        shape: the shape.
        origin: a hash of the source tensors and rows that the weight was made of.
        digest: a hash of the trained values; "" before the end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: tuple[int, ...]
    origin: str
    digest: str = ""

    @staticmethod
    def from_expression(expr: WeightExpr) -> WeightEntry:
        """Returns the entry of a weight by its expression before training."""
        text = repr([[str(p) for p in expr.parts(axis)] for axis in range(min(2, len(expr.shape)))])
        return WeightEntry(shape=expr.shape, origin=hashlib.sha256(text.encode()).hexdigest())


class Description(BaseModel):
    """The content of recovery.json.

    Attributes:
        format: the version of the format.
        source: the identity of the model.
        asked: the requested recipe.
        recipe: the recipe with the results of its searches.
        options: the options that determine the result.
        origin: the origin of the tokens.
        weights: the trained weights by name.
        report: the report; None before the end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    source: Fingerprint
    asked: Recipe
    recipe: Recipe
    options: dict[str, Any]
    origin: str
    weights: dict[str, WeightEntry]
    report: dict[str, Any] | None = Field(default=None)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after some steps.

    Attributes:
        step: the number of steps.
        weights: the weights by name.
        moments: the state of the optimizer, by the weight's name with the suffix ``.exp_avg`` and so on.
        figures: the measurements so far.
    """

    step: int
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    figures: Mapping[str, Any]


class RecoveryFolder:
    """The folder of a recovery, which may be unfinished.

    Args:
        path: the folder, which need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    # ---- reading

    def description(self) -> Description:
        """Reads recovery.json. Raises SourceError if it is missing, damaged, or of another format version."""
        file = self.path / DESCRIPTION
        try:
            raw = parse_json(read_regular(file, most=MOST_JSON_BYTES))
        except OSError as e:
            raise SourceError(
                f"{self.path} isn't a recovery: it has no {DESCRIPTION}", hint="Pass a folder that `recover` wrote."
            ) from e
        except ValueError as e:
            raise SourceError(f"{file} is damaged: {e}", hint="Recover the model again.") from e
        if isinstance(raw, dict) and raw.get("format") != FORMAT:
            raise SourceError(
                f"{file}: format {raw.get('format')!r}, and this version reads {FORMAT}",
                hint="Recover the model again, with this version.",
            )
        try:
            return Description.model_validate(raw)
        except ValidationError as e:
            first = e.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise SourceError(f"{file}: {key}: {first['msg']}", hint="Recover the model again.") from e

    def tokens(self, origin: str) -> tuple[Sequences, tuple[torch.Tensor, ...]]:
        """Returns the sequences, and those for calibrated passes. Raises SourceError if they can't be read. ``origin``
        is that of the tokens.
        """
        tensors = _read(self.path / TOKENS)
        kinds = [_cut(tensors, kind, self.path / TOKENS) for kind in ("training", "held_out", "calibration")]
        return Sequences(kinds[0], kinds[1], origin), kinds[2]

    def newest(self) -> Checkpoint | None:
        """Returns the last checkpoint; None if there is none. Raises SourceError if it can't be read."""
        folders = sorted(self.path.glob(f"{_CHECKPOINT}*[0-9]"))
        if not folders:
            return None
        state = folders[-1] / _STATE
        try:
            figures = parse_json(read_regular(state, most=MOST_JSON_BYTES))
            step = int(figures["step"])
        except (OSError, ValueError, TypeError, LookupError) as e:
            raise SourceError(f"{state} is damaged: {e}", hint="Recover the model anew, with --force.") from e
        return Checkpoint(step, _read(folders[-1] / WEIGHTS), _read(folders[-1] / _OPTIMIZER), figures)

    def weights(self) -> dict[str, torch.Tensor]:
        """Reads the trained weights. Raises SourceError if the recovery isn't finished, or the file is damaged."""
        if not (self.path / WEIGHTS).is_file():
            raise SourceError(
                f"{self.path}: the recovery isn't finished: there is no {WEIGHTS}",
                hint="Continue with it: optimize recover with --resume.",
            )
        return _read(self.path / WEIGHTS)

    # ---- writing

    def refuse_if_there(self, overwrite: bool, inputs: Inputs = MappingProxyType({})) -> None:
        """Raises RequestError if the folder can't be written, or has content that may not be replaced.

        Args:
            overwrite: True if a recovery in the folder may be replaced.
            inputs: the files that the recovery reads; see ``output_place``.
        """
        place = output_place(self.path, inputs, RequestError)
        if not os.path.lexists(place) or (place.is_dir() and not any(place.iterdir())):
            return
        if (why := self._why_not_ours()) is not None:
            raise RequestError(f"{self.path} {why}", hint="Write to another folder, or remove it yourself.")
        if not overwrite:
            raise RequestError(
                f"{self.path} is a recovery already",
                hint="Continue with it (--resume), replace it (--force), or write to another folder.",
            )

    def _why_not_ours(self) -> str | None:
        """Returns the reason why the folder may not be replaced: it isn't a recovery, or has other files. None if it
        may.
        """
        try:
            self.description()
        except SourceError as e:
            return f"exists, and isn't a recovery that can be read: {e.message}"
        foreign = [name for name in files_in(self.path) if not _OURS.fullmatch(name)]
        return f"is a recovery with files in it that aren't part of it: {shortened(foreign)}" if foreign else None

    def begin(
        self, description: Description, sequences: Sequences, calibration: Sequence[torch.Tensor], *, overwrite: bool
    ) -> None:
        """Creates the folder, with the description and the tokens. Raises RequestError as ``refuse_if_there``.

        Args:
            description: the content of recovery.json.
            sequences: the sequences to train on, and those held out.
            calibration: the sequences for calibrated passes.
            overwrite: True to replace a recovery.
        """
        self.refuse_if_there(overwrite)
        if self.path.exists():
            shutil.rmtree(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CapacityError(f"{self.path} can't be made: {e}", hint="Write to another folder.") from e
        kinds = {"training": sequences.training, "held_out": sequences.held_out, "calibration": calibration}
        tensors = {}
        for kind, some in kinds.items():
            tensors[f"{kind}.ids"] = torch.cat([s.int() for s in some]) if some else torch.zeros(0, dtype=torch.int32)
            tensors[f"{kind}.lengths"] = torch.tensor([len(s) for s in some], dtype=torch.int32)
        _save(tensors, self.path / TOKENS)
        self.describe(description)

    def describe(self, description: Description) -> None:
        """Writes recovery.json."""
        _write(self.path / DESCRIPTION, description.model_dump_json(indent=1))

    def checkpoint(self, new: Checkpoint) -> None:
        """Writes the checkpoint ``new``, then removes the earlier ones."""
        final = self.path / f"{_CHECKPOINT}{new.step:06}"
        if final.exists():
            return
        unfinished = self.path / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _save(new.weights, unfinished / WEIGHTS)
        _save(new.moments, unfinished / _OPTIMIZER)
        _write(unfinished / _STATE, json.dumps({**new.figures, "step": new.step}))
        before = list(self.path.glob(f"{_CHECKPOINT}*[0-9]"))
        unfinished.rename(final)
        for folder in before:
            shutil.rmtree(folder)

    def finish(self, weights: Mapping[str, torch.Tensor], description: Description, plot: str) -> None:
        """Writes the files for an export. The checkpoints stay, so that training can continue.

        Args:
            weights: the trained weights by name.
            description: the content of recovery.json.
            plot: the page with the loss.
        """
        entries = {
            name: entry.model_copy(update={"digest": digest_of(weights[name])})
            for name, entry in description.weights.items()
        }
        _save(weights, self.path / WEIGHTS)
        _write(self.path / PLOT, plot)
        self.describe(description.model_copy(update={"weights": entries}))


def digest_of(tensor: torch.Tensor) -> str:
    """Returns a hash of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().data).hexdigest()


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, "pt") as handle:
            return {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as e:
        raise SourceError(f"{file} can't be read: {e}", hint="It is damaged: recover the model again.") from e


def _cut(found: Mapping[str, torch.Tensor], kind: str, file: Path) -> tuple[torch.Tensor, ...]:
    ids, lengths = found.get(f"{kind}.ids"), found.get(f"{kind}.lengths")
    if ids is None or lengths is None or int(lengths.sum()) != len(ids):
        raise SourceError(f"{file}: its {kind} sequences are damaged", hint="Recover the model again.")
    return tuple(ids.split(lengths.tolist())) if len(ids) else ()


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    temporary = file.with_name(f"{file.name}.unfinished")
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, temporary)
        os.replace(temporary, file)
    except (OSError, SafetensorError) as e:
        raise CapacityError(f"{file} can't be written: {e}", hint="Free space on that disk.") from e


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f"{file.name}.unfinished")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    except OSError as e:
        raise CapacityError(f"{file} can't be written: {e}", hint="Free space on that disk.") from e
