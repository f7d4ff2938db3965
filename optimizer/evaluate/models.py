"""The models that can be evaluated: anything that computes logits for token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from enginewright.optimizer.capture.check_source import check_source
from enginewright.optimizer.capture.find_source import find_source
from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.reader import CODE
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import EnginewrightError, MissingDependencyError, RequestError
from enginewright.runtime.shared.progress import Progress, loading, silent
from enginewright.runtime.text.tokenizer import Tokenizer


class ScoredModel(Protocol):
    """An open bundle or source model that computes logits.

    Attributes:
        path: the path, as the user named it.
        name: the model's name.
        vocab_size, context_length: as in ModelInfo.
    """

    path: str
    name: str
    vocab_size: int
    context_length: int

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it has none."""

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """Returns the logits after every token: [S] -> [S, V] float32."""

    def close(self) -> None:
        """Frees the memory."""


@dataclass(frozen=True)
class OpenOptions:
    """Options for opening a bundle: the arguments of LLM with these names."""

    threads: int = 0
    memory: str | int | None = None
    target: str | None = None
    provider: str | None = None
    context: int | None = None
    trust: str | None = None
    ranks: int | None = None
    partition: str | None = None


class BundleModel:
    """A bundle that ``LLM`` runs, with the interface of ``ScoredModel``. Opening it raises the errors of ``LLM``."""

    def __init__(self, path: str | Path, options: OpenOptions) -> None:
        self.path = str(path)
        # One request at a time, so the pool needs no more than one context.
        self._llm = LLM(path, max_requests=1, speculate=None, **asdict(options))
        self.name = self._llm.model.name
        self.vocab_size = self._llm.model.vocab_size
        self.context_length = self._llm.model.context_length

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError if it has none."""
        return self._llm.tokenizer

    def logits(self, ids: Sequence[int]) -> FloatArray:
        return self._llm.logits(ids)

    def continued(self, ids: Sequence[int], tokens: int) -> list[int]:
        """Returns ``tokens`` tokens after a prompt, by greedy decoding."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        (output,) = self._llm.generate({"prompt_token_ids": list(ids)}, params, progress=False)
        return list(output.token_ids)

    def close(self) -> None:
        self._llm.close()


def open_reference(
    path: str | Path,
    *,
    threads: int,
    memory: str | int | None,
    trust: str | None = None,
    progress: Progress = silent,
) -> ScoredModel:
    """Opens the reference of a comparison: another bundle, or a source model through transformers.

    Args:
        trust: as for ``LLM``; a hash must be that of the reference.
        progress: called with the stage "download" for a model of the Hub.

    Raises the errors of LLM, SourceError and UnsupportedModelError as in an export, MissingDependencyError.
    """
    place = find_source(path, option="against", progress=progress)
    if (place / MANIFEST_PATH).is_file():
        return BundleModel(path, OpenOptions(threads, memory, trust=trust if trust == CODE else None))
    check_source(place)
    loading(progress)
    with MissingDependencyError.of_export("against: a source model"):
        from .source_model import SourceModel  # torch and transformers, which bundles do without
    return SourceModel(place, threads=threads)


def check_same_tokens(model: ScoredModel, reference: ScoredModel, texts: Sequence[str]) -> None:
    """Raises RequestError if two models have different vocabularies, or different tokens for ``texts``.

    A model without a tokenizer of its own uses the other's.
    """
    hint = "Compare models that share their vocabulary and tokenizer."
    if model.vocab_size != reference.vocab_size:
        raise RequestError(
            f"against: {reference.path} has a vocabulary of {reference.vocab_size} tokens, {model.path} one of "
            f"{model.vocab_size}",
            hint=hint,
        )
    ours, theirs = model.tokenizer, reference.tokenizer
    if ours is None or theirs is None:
        return
    for text in texts:
        first, second = ours.encode(text), theirs.encode(text)
        if first != second:
            pairs = enumerate(zip(first, second, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
            raise RequestError(
                f"against: {reference.path} has another tokenizer than {model.path}: token {place} of "
                f"{text[:40]!r}... differs",
                hint=hint,
            )


def finite_logits(model: ScoredModel, ids: Sequence[int]) -> FloatArray:
    """Returns ``model.logits``. Raises EnginewrightError if some are NaN or infinite."""
    logits = model.logits(ids)
    bad = ~np.isfinite(logits).all(axis=-1)  # [S]
    if bad.any():
        raise EnginewrightError(
            f"{model.path}: the logits after {int(bad.argmax()) + 1} tokens are not finite",
            hint="The model's weights may be damaged, or too large for the recipe's number format.",
        )
    return logits
