"""A Hugging Face folder or GGUF file that transformers runs, as the reference for a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from enginewright.optimizer.capture.find_source import describe_source
from enginewright.optimizer.capture.freeze_rope import own_context_length
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.capture.gguf.model import read_tokenizer
from enginewright.optimizer.capture.huggingface import read_generation_settings
from enginewright.optimizer.capture.model_info import model_info
from enginewright.optimizer.capture.tokenizer import load_tokenizer, tokenizer_files
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.text.tokenizer import Tokenizer


class SourceModel:
    """A source model that transformers runs, with its tokenizer. It implements ``ScoredModel``.

    Args:
        path: a Hugging Face directory or a GGUF file.
        threads: threads of torch, for the whole process; 0 leaves them as they are.

    Raises:
        SourceError, UnsupportedModelError: as for an export.
    """

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self.path = str(path)
        if threads:
            torch.set_num_threads(threads)
        self._runner = SourceRunner(path)
        model = self._runner.model
        if path.is_dir():
            self.files, generation = source_tokenizer_files(path), read_generation_settings(path)
        else:
            self.files, generation = read_tokenizer(open_gguf(path))
        self.tokenizer = Tokenizer(self.files) if self.files is not None and self.files.tokenizer_json else None
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        self.info = model_info(model, describe_source(path).name, own_context_length(model.config), generation, eos)
        """The model's description, the same as in a bundle of it."""
        self.name = self.info.name
        self.vocab_size = self.info.vocab_size
        self.context_length = self.info.context_length

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """Returns the logits of a sequence: [S] -> [S, V] float32."""
        logits: FloatArray = self._runner.logits(torch.tensor([list(ids)]))[0]
        return logits

    def close(self) -> None:
        """Frees the weights."""
        del self._runner


def source_tokenizer_files(path: Path) -> TokenizerFiles | None:
    """Returns the tokenizer files that a bundle of this source would have; None if it has no tokenizer."""
    if path.is_dir():
        tokenizer = load_tokenizer(path)
        return None if tokenizer is None else tokenizer_files(tokenizer)
    return read_tokenizer(open_gguf(path))[0]
