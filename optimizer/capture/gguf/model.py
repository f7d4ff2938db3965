"""The model of a GGUF file: its configuration, and its tensors by the names of transformers' model.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. ``file`` opens a file, ``architectures`` has the
meaning of its keys, and ``tensors`` puts its tensors into the model.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from enginewright.optimizer.shared.config_sizes import check_sizes
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .architecture import Description
from .architectures import describe
from .file import GgufFile
from .header import GgufArray
from .jina_bert import JinaBertConfig, JinaBertModel
from .pooling import Pooling
from .rope import set_frequencies
from .tensors import place_tensors, values_of
from .tokenizer import build_files
from .vocabulary import read_vocabulary

_AGAIN = "Download or convert the file again."
_UNUSABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, StrictDataclassError)


def read_config(file: GgufFile) -> PretrainedConfig:
    """Returns the transformers configuration of a GGUF file.

    Raises:
        UnsupportedModelError: the architecture isn't known, or a key that changes results isn't supported.
        SourceError: metadata is missing or wrong.
    """
    described = describe(file)
    fields: dict[str, Any] = {**_special_tokens(file), **described.fields}
    try:
        config = _config_class(described.model_type)(**fields)
    except _UNUSABLE as e:
        raise SourceError(f"{file.path}: no usable configuration: {e}", hint=_AGAIN) from e
    assert isinstance(config, PretrainedConfig)
    check_sizes(config, str(file.path))
    if described.layers > len(file.tensors):
        raise SourceError(
            f"{file.path}: {file.architecture}.block_count is {described.layers}, and there are "
            f"{len(file.tensors)} tensors",
            hint=_AGAIN,
        )
    return config


def check_generates(file: GgufFile) -> None:
    """Raises UnsupportedModelError if the file's model gives numbers for whole texts, and no text."""
    pooling = describe(file).pooling
    if pooling is not None:
        raise UnsupportedModelError(
            f"{file.path} is a model for {pooling.task}, and no language model that generates text",
            hint="Pass the GGUF file of a model that generates text.",
        )


def read_tensors(file: GgufFile, model: PreTrainedModel) -> dict[str, WeightExpr]:
    """Returns the file's tensors by their names in ``model`` (from ``build_model``), float32, dequantized when
    evaluated.

    Scaled rotary frequencies are written into the model. Raises UnsupportedModelError if the model rotates another
    width or can't scale them, SourceError for a tensor that the model doesn't have.
    """
    described = describe(file)
    _check_rotary_width(file, model, described)
    divisors = values_of(file, "rope_freqs.weight")
    set_frequencies(
        model, described.ropes, None if divisors is None else torch.from_numpy(divisors.copy()), str(file.path)
    )
    tensors = place_tensors(
        file,
        model.config,
        described.tensors,
        layer_prefix=described.layer_prefix,
        layers=described.layers,
        skipped=described.skipped,
    )
    if described.pooling is None:
        return tensors
    # The places are those of a language model, and a model that is pooled is its base.
    tensors = {name.removeprefix(f"{model.base_model_prefix}."): expr for name, expr in tensors.items()}
    return tensors | {name: _zeros(name, shape) for name, shape in described.zeros.items()}


def _zeros(name: str, shape: tuple[int, ...]) -> WeightExpr:
    return Source(name, shape, torch.float32, lambda: torch.zeros(shape))


def _config_class(model_type: str) -> type[PretrainedConfig]:
    return JinaBertConfig if model_type == JinaBertConfig.model_type else CONFIG_MAPPING[model_type]


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Returns the class of a model that is pooled, for a configuration of ``read_config``."""
    chosen: Any = JinaBertModel if isinstance(config, JinaBertConfig) else MODEL_MAPPING[type(config)]
    return chosen  # type: ignore[no-any-return]  # one class for each architecture of files


def pooling_of(file: GgufFile) -> Pooling | None:
    """Returns the pooling that a file states; None for a model that generates text.

    Raises the errors of ``read_config``.
    """
    return describe(file).pooling


def read_tokenizer(file: GgufFile) -> tuple[TokenizerFiles | None, dict[str, Any]]:
    """Returns the tokenizer of a GGUF file, None if it has none, and settings in the form of generation_config.json.

    The settings are the tokens that end an answer, and the tokens that no answer may have.

    Raises:
        UnsupportedModelError: the tokenizer or pre-tokenizer can't be read; names it.
        SourceError: a key of the tokenizer is missing or wrong; names it.
    """
    vocabulary = read_vocabulary(file.path, file.metadata)
    if vocabulary is None:
        return None, generation_settings(file)
    ends = {"eos_token_id": list(vocabulary.end_ids)} if vocabulary.end_ids else {}
    return build_files(vocabulary, file.metadata), generation_settings(file) | ends


def generation_settings(file: GgufFile) -> dict[str, Any]:
    """Reads generation settings from the keys alone: tokens that end an answer, and tokens that no answer may have.

    Raises SourceError if the latter aren't a list of token ids.
    """
    ids = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(i for i in ids if isinstance(i, int)))
    suppressed = _suppressed_tokens(file)
    settings = {"eos_token_id": ends, "suppress_tokens": suppressed}
    return {name: tokens for name, tokens in settings.items() if tokens}


def _suppressed_tokens(file: GgufFile) -> list[int]:
    """Returns the tokens that no answer may have, without ids that the vocabulary lacks, as in llama.cpp."""
    key, tokens = "tokenizer.ggml.suppress_tokens", file.metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, GgufArray) else 0
    ids: list[int] = []
    for value in file.array(key) or ():
        if isinstance(value, bool) or not isinstance(value, int):
            raise SourceError(f"{file.path}: {key} has {value!r:.60}, and no token id", hint=_AGAIN)
        if 0 <= value < count:
            ids.append(value)
    return ids


def _special_tokens(file: GgufFile) -> dict[str, int | None]:
    """Returns ``bos_token_id`` and ``eos_token_id`` of the configuration as the file has them; None for those it lacks.

    None, which ``pad_token_id`` always is, replaces the default of the configuration's class.
    """
    ids = {f"{kind}_token_id": file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    return {name: value if isinstance(value, int) else None for name, value in ids.items()} | {"pad_token_id": None}


def _check_rotary_width(file: GgufFile, model: PreTrainedModel, described: Description) -> None:
    key = f"{file.architecture}.rope.dimension_count"
    width = file.metadata.get(key)
    widths = {2 * len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    if described.ropes and width and widths and width not in widths:
        raise UnsupportedModelError(
            f"{file.path}: {key} is {width}, where transformers makes a model that rotates {sorted(widths)} columns",
            hint="Export from the model's Hugging Face directory.",
        )
