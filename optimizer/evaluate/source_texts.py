"""A folder of an encoder, reranker or classifier that transformers runs, as the reference for a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from enginewright.optimizer.capture.find_source import model_name
from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.text.tokenizer import Tokenizer

from .source_model import source_tokenizer_files


class SourceTexts:
    """A source model of vectors, scores or classes that transformers runs, with its tokenizer.

    It implements ``TextModel``.

    Args:
        path: a Hugging Face directory.
        section: the [pooling] of the bundle's recipe.
        threads: threads of torch, for the whole process; 0 leaves them as they are.

    Raises:
        SourceError, UnsupportedModelError: as for an export.
    """

    def __init__(self, path: Path, section: PoolingSection | None = None, *, threads: int = 0) -> None:
        self.path, self.name = str(path), model_name(path)
        if threads:
            torch.set_num_threads(threads)
        self._runner = PooledRunner(path, section)
        self.task, self.context_length = self._runner.task, self._runner.context_length
        files = source_tokenizer_files(path)
        self.tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None

    def results(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns the results of texts of token ids, each computed alone."""
        return [self._runner.rows(text) for text in texts]

    def close(self) -> None:
        """Frees the weights."""
        del self._runner
