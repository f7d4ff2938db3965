"""A Hugging Face folder or GGUF file, run by transformers: what a bundle should say.

Weights and configuration are read as for an export, so nothing is downloaded and no code of the model's runs; but the
forward pass is transformers' own, with its eager attention and masks, and shares nothing with capture and passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture import gguf, huggingface
from enginewright.optimizer.capture.bind_weights import bind_weights
from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.model_info import model_info
from enginewright.optimizer.capture.tokenizer import load_tokenizer, tokenizer_files
from enginewright.passes.ir.weights import WeightExpr
from enginewright.plugins.contracts import FloatArray
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.tokenizer import Tokenizer


class SourceModel:
    """Holds all weights in memory, as float32. See ScoredModel.

    Args:
        path: a Hugging Face directory or a GGUF file.
        threads: of torch, for the whole process; 0 leaves them as they are.

    Raises:
        SourceError, UnsupportedModelError: as for an export.
    """

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self.path = str(path)
        if threads:
            torch.set_num_threads(threads)
        self._model, weights, files = _read_directory(path) if path.is_dir() else _read_gguf(path)
        _load(self._model, weights)
        self._model.set_attn_implementation("eager")
        info = model_info(self._model, path.resolve().name, {}, None)
        self.name = info.name
        self.vocab_size = info.vocab_size
        self.context_length = info.context_length
        self.tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """[S] -> [S, V] float32."""
        with torch.no_grad():
            result = self._model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        logits: FloatArray = result.logits[0].float().numpy()
        return logits

    def close(self) -> None:
        """Drops the weights."""
        del self._model


_Read = tuple[PreTrainedModel, dict[str, WeightExpr], TokenizerFiles | None]


def _read_directory(path: Path) -> _Read:
    config = huggingface.read_config(path)
    tensors = huggingface.read_tensors(path)
    model = build_model(config)
    weights = bind_weights(model, tensors, source=str(path))
    tokenizer = load_tokenizer(path)
    return model, weights, None if tokenizer is None else tokenizer_files(tokenizer)


def _read_gguf(path: Path) -> _Read:
    file = gguf.open_gguf(path)
    model = build_model(gguf.read_config(file))
    weights = bind_weights(model, gguf.read_tensors(file, model), source=str(path))
    if "tokenizer.ggml.model" not in file.metadata:
        return model, weights, None
    tokenizer = load_tokenizer(path.parent, gguf_file=path.name)
    files = None if tokenizer is None else tokenizer_files(tokenizer, wants_bos=gguf.wants_bos(file))
    return model, weights, files


def _load(model: PreTrainedModel, weights: dict[str, WeightExpr]) -> None:
    """Gives the model its weights, one by one; parameters that are tied get one tensor."""
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].evaluate()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in weights.keys() - parameters.keys():
        model.get_buffer(name).copy_(weights[name].evaluate())
