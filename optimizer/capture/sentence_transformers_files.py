"""Reads the files of sentence-transformers: modules.json, and the configuration of each module that it lists."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular
from enginewright.runtime.shared.contracts import Similarity
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from enginewright.runtime.shared.json_document import parse_json

from .check_source import CONFIG, read_json

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TRANSFORMER = tuple(f"sentence_{family}_config.json" for family in _FAMILIES)
"""The names that the configuration file of the module Transformer has had."""

POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older field of a pooling -> its name in pooling_mode, in the order in which several are concatenated."""

_KINDS = {"cls": "cls", "max": "max", "mean": "mean", "weightedmean": "weighted", "lasttoken": "last"}
"""Name of a pooling in sentence-transformers -> the kind of ``ew.pool``."""

_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_OTHER_KINDS = {
    "SparseEncoder": "sparse vectors",
    "MultiVectorEncoder": "a vector for each token (ColBERT)",
    "ColBERT": "a vector for each token (ColBERT)",
}
"""Kind of model in config_sentence_transformers.json that isn't supported -> its result, for the error."""

_REFUSED = {
    "CLIPModel": "images",
    "StaticEmbedding": "a table of words without a transformer",
    "SpladePooling": "sparse vectors",
    "MLMTransformer": "sparse vectors",
    "SparseAutoEncoder": "sparse vectors",
    "SparseStaticEmbedding": "sparse vectors",
    "MultiVectorMask": "a vector for each token (ColBERT)",
    "TokenPooling": "a vector for each token (ColBERT)",
    "Router": "several models for different inputs",
    "Asym": "several models for different inputs",
}
FOR_SEARCH = "For a search, use an embedding model with a Pooling, which has a vector for a text, and a reranker."
"""The hint for a model with sparse vectors, or with a vector for each token."""

_HINT = "Download the model again, or correct the field."


@dataclass(frozen=True)
class DenseModule:
    """A linear and an activation of pooled vectors: the folder with its weights, its sizes, and its activation."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class NormModule:
    """A layer norm of pooled vectors: the folder with its weights, its size, and the number added to variances."""

    folder: Path
    size: int
    epsilon: float = 1e-5
    bias: bool = True


@dataclass(frozen=True)
class SentenceModel:
    """A model of sentence-transformers as its files describe it.

    Attributes:
        transformer: the folder of the transformers model.
        poolings: kinds of ``ew.pool`` whose vectors are concatenated; () for a model without pooling, such as a
            cross-encoder.
        size: the size of a token's vector that the pooling states; None if it doesn't.
        include_prompt: False if a prompt's tokens aren't pooled.
        modules: what follows the pooling, in order.
        normalize: True if the last module normalizes.
        answers: the ids of the tokens for "yes" and "no" whose logits make a score; None for other models. The id for
            "no" is None if the score is the logit of "yes".
        kind: "SentenceTransformer" or "CrossEncoder".
        prompts, default_prompt: the texts before a text, by name, and the name of the usual one.
        similarity: the function that compares two vectors.
        dimensions: the size to which vectors are cut; None for their whole size.
        max_length: the longest text in tokens; None if no file states it.
        lower_case: True if texts are converted to lower case first.
        activation: the path of the function of a cross-encoder's scores; None if no file states it.
        messages: the form of messages, if texts pass through the chat template: "flat" for contents that are texts,
            "structured" for lists of parts; None for texts without a chat template.
        template_options: variables of the chat template.
    """

    transformer: Path
    poolings: tuple[str, ...] = ()
    size: int | None = None
    include_prompt: bool = True
    modules: tuple[DenseModule | NormModule, ...] = ()
    normalize: bool = False
    answers: tuple[int, int | None] | None = None
    kind: str = "SentenceTransformer"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    dimensions: int | None = None
    max_length: int | None = None
    lower_case: bool = False
    activation: str | None = None
    messages: Literal["flat", "structured"] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)


def read_sentence_model(directory: Path) -> SentenceModel | None:
    """Returns the model of a folder with modules.json; None for a folder without.

    Raises:
        SourceError: a file is missing or damaged, or a field is wrong; names both.
        UnsupportedModelError: a module or a pooling that can't be compiled.
    """
    path = directory / MODULES
    if not os.path.lexists(path):
        return None
    listed = _read_list(path)
    names = [_module(entry, index, path) for index, entry in enumerate(listed)]
    settings = _settings(directory)
    if other := next((name for name, _ in names if name in _REFUSED), None):
        hint = FOR_SEARCH if "vector" in _REFUSED[other] else ""
        raise _unsupported(f"{path}: the module {other}, which makes {_REFUSED[other]}, can't be compiled", hint)
    if not names or names[0][0] != "Transformer":
        raise _unsupported(f"{path}: the first module is {names[0][0] if names else 'missing'}, and no Transformer")
    fields: dict[str, Any] = {"transformer": _folder(directory, names[0][1], path)}
    modules: list[DenseModule | NormModule] = []
    for name, place in names[1:]:
        folder = _folder(directory, place, path)
        if fields.get("normalize"):
            raise _unsupported(f"{path}: the module {name} follows Normalize")
        if name == "Pooling" and "poolings" not in fields and not modules:
            fields |= _pooling(folder)
        elif name == "Dense" and "poolings" in fields:
            modules.append(_dense(folder))
        elif name == "LayerNorm" and "poolings" in fields:
            config = folder / CONFIG
            modules.append(NormModule(folder, _size(read_json(config), ("dimension",), config)))
        elif name == "Normalize":
            fields["normalize"] = True
        elif name == "LogitScore" and "answers" not in fields:
            fields["answers"] = _answers(folder)
        elif name != "Dropout":
            raise _unsupported(f"{path}: the module {name} can't be compiled")
    _check_sizes(fields.get("size"), len(fields.get("poolings", ())), modules)
    fields["modules"] = tuple(modules)
    if not fields.get("include_prompt", True) and any(settings["prompts"].values()):
        raise _unsupported(
            f"{directory}: include_prompt of its Pooling is false: a pooling without the prompt's tokens can't be "
            "compiled, and the model has prompts",
            "Use a model that pools its prompts too, or remove prompts from config_sentence_transformers.json.",
        )
    return SentenceModel(**fields, **settings, **transformer_settings(fields["transformer"]))


def _read_list(path: Path) -> list[Any]:
    try:
        value = parse_json(read_regular(path, most=MOST_TEXT_BYTES))
    except (OSError, ValueError) as e:
        raise SourceError(f"{path}: can't be read as JSON: {e}", hint="Download the file again.") from e
    if not isinstance(value, list):
        raise SourceError(f"{path}: must be a list of modules", hint="Download the file again.")
    return value


def _module(entry: object, index: int, path: Path) -> tuple[str, str]:
    """Returns the name of a module's class and its folder."""
    if not isinstance(entry, dict):
        raise SourceError(f"{path}: module {index} must be an object", hint=_HINT)
    kind, place = entry.get("type"), entry.get("path", "")
    for name, value in (("type", kind), ("path", place)):
        if not isinstance(value, str):
            raise SourceError(f"{path}: module {index}: {name} is {value!r:.80}, and no text", hint=_HINT)
    return str(kind).rpartition(".")[2], str(place)


def _folder(directory: Path, place: str, path: Path) -> Path:
    """Returns a module's folder; that of a module without settings, such as Normalize, may be missing."""
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise SourceError(f"{path}: path {place!r} is outside of the model's folder", hint=_HINT)
    return directory / place


def _pooling(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    config = read_json(path)
    modes = config.get("pooling_mode")
    if modes is None:
        stated = {name: config.get(name, False) for name in POOLINGS}
        if wrong := next((name for name, value in stated.items() if not isinstance(value, bool)), None):
            raise SourceError(f"{path}: {wrong} is {stated[wrong]!r:.80}, and neither true nor false", hint=_HINT)
        modes = [POOLINGS[name] for name, on in stated.items() if on] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise SourceError(f"{path}: pooling_mode is {modes!r:.80}, and no name or list of names", hint=_HINT)
    if strange := next((mode for mode in modes if mode not in _KINDS), None):
        raise _unsupported(f"{path}: pooling_mode {strange!r} can't be compiled; there are {', '.join(_KINDS)}")
    include = config.get("include_prompt", True)
    if not isinstance(include, bool):
        raise SourceError(f"{path}: include_prompt is {include!r:.80}, and neither true nor false", hint=_HINT)
    size = _size(config, ("embedding_dimension", "word_embedding_dimension"), path)
    return {"poolings": tuple(_KINDS[mode] for mode in modes), "size": size, "include_prompt": include}


def _dense(folder: Path) -> DenseModule:
    path = folder / CONFIG
    config = read_json(path)
    if config.get("use_residual"):
        raise _unsupported(f"{path}: use_residual can't be compiled")
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise _unsupported(f"{path}: {name} is {config[name]!r:.80}, and no sentence_embedding")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise _unsupported(f"{path}: activation_function {activation!r:.80} can't be compiled")
    bias = config.get("bias", True)
    if not isinstance(bias, bool):
        raise SourceError(f"{path}: bias is {bias!r:.80}, and neither true nor false", hint=_HINT)
    inputs, outputs = (_size(config, (name,), path) for name in ("in_features", "out_features"))
    return DenseModule(folder, inputs, outputs, bias, _ACTIVATIONS[activation])


def _answers(folder: Path) -> tuple[int, int | None]:
    path = folder / CONFIG
    config = read_json(path)
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    for name, value in (("true_token_id", yes), ("false_token_id", no)):
        if not isinstance(value, int) and not (value is None and name == "false_token_id"):
            raise SourceError(f"{path}: {name} is {value!r:.80}, and no token id", hint=_HINT)
    return int(yes), no  # type: ignore[arg-type]  # an int, as it was checked above


def _check_sizes(size: int | None, poolings: int, modules: list[DenseModule | NormModule]) -> None:
    """Raises SourceError if the input size of a module isn't the output size of the one before it."""
    if size is None:
        return
    size *= poolings
    for module in modules:
        expected, name = (
            (module.inputs, "in_features") if isinstance(module, DenseModule) else (module.size, "dimension")
        )
        if expected != size:
            raise SourceError(
                f"{module.folder / CONFIG}: {name} is {expected}, and the vectors before it have {size} dimensions",
                hint=_HINT,
            )
        size = module.outputs if isinstance(module, DenseModule) else size


def _settings(directory: Path) -> dict[str, Any]:
    """Returns the fields of config_sentence_transformers.json, which may be missing."""
    path = directory / SETTINGS
    config = read_json(path) if path.is_file() else {}
    kind = config.get("model_type", "SentenceTransformer")
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        what = _OTHER_KINDS.get(kind) if isinstance(kind, str) else None
        message = f"{path}: model_type {kind!r:.80}: {what or 'this kind of model'} can't be compiled"
        raise _unsupported(message, FOR_SEARCH if what else "")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise SourceError(f"{path}: prompts must be an object of texts", hint=_HINT)
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise SourceError(f"{path}: default_prompt_name is {default!r:.80}, and no name of prompts", hint=_HINT)
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity == "dot_product":
        similarity = "dot"
    if similarity not in get_args(Similarity):
        raise SourceError(
            f"{path}: similarity_fn_name is {similarity!r:.80}, and none of {', '.join(get_args(Similarity))}",
            hint=_HINT,
        )
    activation = config.get("activation_fn")
    return {
        "kind": kind,
        "prompts": prompts,
        "default_prompt": default,
        "similarity": similarity,
        "dimensions": None if config.get("truncate_dim") is None else _size(config, ("truncate_dim",), path),
        "activation": activation if isinstance(activation, str) else None,
    }


def transformer_settings(folder: Path) -> dict[str, Any]:
    """Returns the fields of ``SentenceModel`` that the file of the module Transformer has; the file may be missing."""
    path = next((folder / name for name in TRANSFORMER if (folder / name).is_file()), None)
    config = {} if path is None else read_json(path)
    assert path is not None or not config
    length, lower = config.get("max_seq_length"), config.get("do_lower_case", False)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise SourceError(f"{path}: max_seq_length is {length!r:.80}, and no number of tokens", hint=_HINT)
    if not isinstance(lower, bool):
        raise SourceError(f"{path}: do_lower_case is {lower!r:.80}, and neither true nor false", hint=_HINT)
    fields: dict[str, Any] = {"max_length": length, "lower_case": lower}
    if (message := _object(config, "modality_config", path).get("message")) is not None:
        form = message.get("format", "flat") if isinstance(message, dict) else message
        if form not in ("flat", "structured"):
            raise SourceError(f"{path}: the format of messages is {form!r:.80}, not flat or structured", hint=_HINT)
        options = _object(_object(config, "processing_kwargs", path), "chat_template", path)
        fields |= {"messages": form, "template_options": {k: v for k, v in options.items() if k != "restore_suffix"}}
    return fields


def _object(config: Mapping[str, Any], name: str, path: Path | None) -> Mapping[str, Any]:
    """Returns the object ``name`` among fields; {} if it is missing. ``path``: the file, for errors."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise SourceError(f"{path}: {name} is {value!r:.80}, not an object", hint=_HINT)
    return value


def _size(config: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int:
    value = next((config[name] for name in names if name in config), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SourceError(f"{path}: {names[0]} is {value!r:.80}, and no size", hint=_HINT)
    return value


def _unsupported(message: str, hint: str = "") -> UnsupportedModelError:
    exported = "Vectors of one transformer with pooling, Dense, LayerNorm and Normalize can be exported."
    return UnsupportedModelError(message, hint=hint or exported)
