"""The models that can be compared on whole texts: bundles and sources that give vectors, scores or classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from enginewright.optimizer.capture.check_source import check_source
from enginewright.optimizer.capture.find_source import find_source
from enginewright.optimizer.measure.text_results import BATCH, run_texts
from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.optimizer.recipes.stored import recipe_of
from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.reader import CODE, Bundle
from enginewright.runtime.executors.open import choose_target, context_of, make_executor
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.contracts import FloatArray, PooledTask
from enginewright.runtime.shared.errors import MissingDependencyError, RequestError
from enginewright.runtime.shared.progress import Progress, loading
from enginewright.runtime.text.tokenizer import Tokenizer

from .models import OpenOptions


class TextModel(Protocol):
    """An open model that computes whole texts.

    Attributes:
        path: the path, as the user named it.
        name: the model's name.
        context_length: the most tokens of a text.
    """

    path: str
    name: str
    context_length: int

    @property
    def task(self) -> PooledTask | None:
        """The model's task, such as "embed"; None for a model that generates text."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it has none of its own."""

    def results(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns the results of texts of token ids, without an activation or normalization: [1, E] or [S, C] each."""

    def close(self) -> None:
        """Frees the memory."""


class BundleTexts:
    """A bundle of a model that computes whole texts, with the interface of ``TextModel``.

    Opening it raises the errors of LLM.

    Attributes:
        section: the [pooling] of its recipe.
    """

    section: PoolingSection | None = None

    def __init__(self, path: str | Path, options: OpenOptions) -> None:
        bundle = Bundle.open(path, options.trust)
        self.path, self.name = str(path), bundle.model.name
        self.task = None if bundle.model.pooling is None else bundle.model.pooling.task
        if self.task is None:
            return
        if options.ranks is not None or options.partition is not None:
            raise RequestError(f"ranks: {path} computes whole texts, in one process", hint="Leave the option out.")
        self.section = recipe_of(bundle).pooling
        target = choose_target(bundle, options.target)
        self.context_length = context_of(bundle, options.context, target)
        files = bundle.tokenizer_files()
        self.tokenizer = Tokenizer(files) if files.tokenizer_json else None
        placement = Placement(threads=options.threads, provider=options.provider)
        self._executor = make_executor(bundle, target, {}, self.context_length, placement)

    def results(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        steps = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        return [rows for step in steps for rows in run_texts(self._executor, step)]

    def close(self) -> None:
        if self.task is not None:
            self._executor.close()


def open_text_reference(
    path: str | Path, section: PoolingSection | None, *, threads: int, trust: str | None, progress: Progress
) -> TextModel:
    """Opens the reference of a comparison: another bundle, or a source model through transformers.

    Args:
        path: a bundle, a Hugging Face directory or a Hub id.
        section: the [pooling] of the recipe of the bundle that is compared.
        threads, trust: as for ``LLM``.
        progress: called with the stage "download" for a model of the Hub.

    Raises the errors of LLM, SourceError and UnsupportedModelError as in an export, MissingDependencyError.
    """
    place = find_source(path, option="against", progress=progress)
    if (place / MANIFEST_PATH).is_file():
        return BundleTexts(path, OpenOptions(threads, trust=trust if trust == CODE else None))
    check_source(place)
    loading(progress)
    with MissingDependencyError.of_export("against: a source model"):
        from .source_texts import SourceTexts  # torch and transformers, which bundles do without
    return SourceTexts(place, section, threads=threads)
