"""Sources of models: a folder, a GGUF file, a Hub id or a model object, and the adapters merged into it.

Nothing here needs torch or transformers: arguments are checked before these are imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from enginewright.runtime.bundle.manifest import AdapterSection, SourceSection
from enginewright.runtime.shared.errors import RequestError, SourceError, UnsupportedModelError

from .adapter_config import WEIGHTS, read_adapter_config, weights_digest
from .check_source import ADAPTER, CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FILES = (ADAPTER, WEIGHTS)

AdapterArgument: TypeAlias = "str | os.PathLike[str] | tuple[str | os.PathLike[str], float]"
"""An adapter as users name it: a folder, "FOLDER=WEIGHT", or a folder and its weight."""


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter and its weight.

    Attributes:
        folder: the folder with adapter_config.json and adapter_model.safetensors.
        weight: factor of the adapter's change; 1 merges it as trained, any finite number is allowed.
    """

    folder: Path
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The name of the adapter's folder, without its path."""
        return self.folder.resolve().name

    def describe(self) -> AdapterSection:
        """Returns the adapter's entry in a manifest. Raises SourceError if the file of weights can't be read."""
        return AdapterSection(name=self.name, weight=self.weight, sha256=weights_digest(self.folder))


@dataclass(frozen=True)
class ModelSource:
    """A model with its adapters.

    Attributes:
        model: a Hugging Face directory, a GGUF file, an id on the Hub that isn't fetched yet, or a transformers model.
        adapters: merged into the weights as these are read; none for a transformers model.
    """

    model: str | Path | PreTrainedModel
    adapters: tuple[Adapter, ...] = ()

    @staticmethod
    def of(source: AnySource) -> ModelSource:
        """Converts any kind of source to a ``ModelSource``; one that is a ``ModelSource`` is returned itself."""
        return source if isinstance(source, ModelSource) else ModelSource(source)

    @property
    def path(self) -> Path | None:
        """The model's folder or file; None for a model object."""
        return Path(self.model) if isinstance(self.model, str | os.PathLike) else None

    @property
    def model_object(self) -> PreTrainedModel:
        """The transformers model of a source without a path."""
        assert self.path is None
        return cast("PreTrainedModel", self.model)

    def at(self, model: Path) -> ModelSource:
        """Returns the source with its model at a path on this disk."""
        return replace(self, model=model)


AnySource: TypeAlias = "str | Path | PreTrainedModel | ModelSource"


def parse_adapters(arguments: Iterable[AdapterArgument] | None) -> tuple[Adapter, ...]:
    """Parses a user's list of adapters, in order.

    Raises RequestError for a weight that isn't a finite number, and for a repeated adapter.
    """
    if isinstance(arguments, str | os.PathLike):
        raise RequestError(f"lora: {os.fspath(arguments)!r} isn't a list of adapters", hint="Pass lora=[FOLDER].")
    adapters: list[Adapter] = []
    for argument in arguments or ():
        adapter = _parse_adapter(argument)
        if any(adapter.folder.resolve() == other.folder.resolve() for other in adapters):
            raise RequestError(f"lora: {adapter.folder} is named twice", hint="Name it once, with the sum of weights.")
        adapters.append(adapter)
    return tuple(adapters)


def _parse_adapter(argument: AdapterArgument) -> Adapter:
    folder, weight = argument if isinstance(argument, tuple) and len(argument) == 2 else (argument, None)
    if not isinstance(folder, str | os.PathLike):
        raise RequestError(f"lora: {argument!r:.80} isn't an adapter", hint="Pass a folder, or (folder, weight).")
    text = os.fspath(folder)
    if weight is None and not os.path.exists(text) and "=" in text:
        text, _, after = text.rpartition("=")
        try:
            weight = float(after)
        except ValueError:
            raise RequestError(f"lora: {after!r} isn't a weight of {text}", hint="Write FOLDER=0.5.") from None
    if weight is None:
        weight = 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RequestError(f"lora: the weight of {text} is {weight!r}", hint="Pass a finite number, such as 0.5.")
    return Adapter(Path(text), float(weight))


def check_adapters(source: ModelSource) -> None:
    """Checks adapters as far as possible without torch and without the model.

    Raises:
        RequestError: there are adapters, and the model is a transformers object.
        SourceError: a folder isn't an adapter, or two folders have the same one.
        UnsupportedModelError: a key of adapter_config.json isn't supported, or weights are in a pickle.
    """
    if source.adapters and source.path is None:
        raise RequestError(
            "lora: adapters are merged into the weights of a folder or file, and a model object is given",
            hint="Merge them with peft (merge_and_unload), and pass the merged model.",
        )
    digests: dict[str, Path] = {}
    for adapter in source.adapters:
        _check_folder(adapter.folder)
        read_adapter_config(adapter.folder)
        first = digests.setdefault(weights_digest(adapter.folder), adapter.folder)
        if first != adapter.folder:
            raise SourceError(
                f"lora: {first} and {adapter.folder} are the same adapter: their {WEIGHTS} are equal",
                hint="Name it once, with the sum of weights.",
            )


def _check_folder(folder: Path) -> None:
    """Raises SourceError for a path that isn't a folder with an adapter's files."""
    if not folder.exists():
        raise SourceError(
            f"lora: {folder} doesn't exist",
            hint="Pass the folder of a PEFT adapter on this disk, with "
            f"{ADAPTER} and {WEIGHTS}; one on the Hub is fetched by `hf download ID --local-dir FOLDER`.",
        )
    if not folder.is_dir():
        what = "a GGUF file" if folder.suffix.lower() == ".gguf" else "a file"
        raise SourceError(f"lora: {folder} is {what}, not a folder", hint="Pass the folder that PEFT saved.")
    names = {entry.name for entry in folder.iterdir()}
    if ADAPTER not in names:
        what = "is a whole model" if CONFIG in names else f"has no {ADAPTER}"
        raise SourceError(f"lora: {folder} {what}, and no PEFT adapter", hint="Pass the folder that PEFT saved.")
    if WEIGHTS not in names:
        if "adapter_model.bin" in names:
            raise UnsupportedModelError(
                f"lora: {folder} has its weights in adapter_model.bin only, a pickle, which is never loaded",
                hint="Load it with peft where you trust it, and save_pretrained() it: that writes safetensors.",
            )
        raise SourceError(f"lora: {folder} has no {WEIGHTS}", hint="Download the adapter again.")


def check_same_adapters(source: ModelSource, manifest: SourceSection, bundle: str | Path) -> None:
    """Raises SourceError unless a bundle was made with the same adapters and adapter weights as ``source`` has."""
    check_adapters(source)
    here = {one.sha256: one for one in (adapter.describe() for adapter in source.adapters)}
    there = {one.sha256: one for one in manifest.adapters}
    for digest, one in (there | here).items():
        if digest not in here:
            raise SourceError(
                f"source: {bundle} was made with the adapter {one.name} (weight {one.weight:g}), which isn't given",
                hint=f"Pass it: --lora {one.name}={one.weight:g}",
            )
        if digest not in there:
            raise SourceError(f"lora: {bundle} wasn't made with the adapter {one.name}", hint="Leave it out.")
        if there[digest].weight != here[digest].weight:
            raise SourceError(
                f"lora: {bundle} was made with the adapter {one.name} at weight {there[digest].weight:g}, and "
                f"{here[digest].weight:g} is given",
                hint=f"Pass --lora {one.name}={there[digest].weight:g}",
            )
