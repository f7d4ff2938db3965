"""Decides whether a folder's model gives vectors, scores or classes for whole texts, and finds its transformers class.

modules.json of sentence-transformers decides first, then the class in ``architectures`` of config.json. No family is
special-cased. A model that generates text has neither, and isn't pooled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from enginewright.runtime.shared.contracts import PooledTask, PoolingInfo
from enginewright.runtime.shared.errors import RecipeError, SourceError, UnsupportedModelError

from .check_source import CONFIG
from .sentence_transformers_files import FOR_SEARCH, MODULES, SentenceModel, read_sentence_model, transformer_settings

Activation = Literal["none", "sigmoid", "softmax"]

_HEADS: Mapping[str, tuple[PooledTask, Any]] = {
    "ForSequenceClassification": ("classify", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "ForTokenClassification": ("token_classify", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
}
"""End of a class's name -> its task, and transformers' table of such classes."""

_BASES = ("Model", "ForMaskedLM", "ForPreTraining", "WithLMHeadModel")
"""Ends of names of classes with whose base model vectors can be computed."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_T5 = "a T5 encoder, whose attention adds a bias to the scores that a layer computes (position_bias)"
_WITH_IMAGES = "a text encoder whose vectors are compared with those of images"
_OUT = dict.fromkeys(("t5", "mt5", "umt5"), _T5) | dict.fromkeys(
    ("clip", "clip_text_model", "siglip", "siglip_text_model", "siglip2_text_model"), _WITH_IMAGES
)
"""Model type that can't be compiled and that users often try -> its description."""

_INSTEAD = {
    _T5: "Use an embedding model of another family, such as multilingual-e5 or bge-m3 (XLM-RoBERTa).",
    _WITH_IMAGES: "Use an embedding model of texts, such as all-MiniLM (BERT); models with images aren't supported.",
}

_MATRYOSHKA = "matryoshka_dimensions"
"""The field of config.json with the sizes to which vectors may be cut, as in jina-embeddings-v3 and for vLLM."""


@dataclass(frozen=True)
class PooledSource:
    """A model that gives a vector, a score or classes for a text.

    Attributes:
        folder: the folder with config.json and the weights, or the GGUF file.
        task: see ``PoolingInfo``.
        model_class: the class of transformers to build.
        sentence: the contents of sentence-transformers' files, or the same facts of a GGUF file; defaults if the folder
            has none. Without a pooling there, the head of the class computes the result.
        warnings: messages about assumptions that were made.
        dimensions: sizes to which vectors may be cut, from a recipe; () takes those of the files.
        template: the text of a pair with {query} and {document}, from a recipe or a GGUF file; None takes that of the
            chat template.
        gives_types: True if the tokenizer gives types of tokens to the model.
    """

    folder: Path
    task: PooledTask
    model_class: type[PreTrainedModel]
    sentence: SentenceModel
    warnings: tuple[str, ...] = ()
    gives_types: bool = True
    dimensions: tuple[int, ...] = ()
    template: str | None = None


def find_pooled_source(directory: Path, config: PretrainedConfig) -> PooledSource | None:
    """Returns the pooled model of a folder; None for a model that isn't pooled. ``config``: of the transformers model.

    Raises:
        SourceError: a file of sentence-transformers is wrong.
        UnsupportedModelError: the model is pooled in a way that can't be compiled.
    """
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    sentence = read_sentence_model(directory)
    _check_kind(directory, config, name, pooled=sentence is not None)
    head = next((end for end in _HEADS if name.endswith(end)), None)
    if sentence is not None and (sentence.poolings or head is None):
        return _of_modules(directory, sentence, config)
    if head is not None:
        task, classes = _HEADS[head]
        settings = sentence or SentenceModel(directory, **transformer_settings(directory))
        if task == "classify" and config.num_labels == 1:
            task = "rerank"
        return PooledSource(directory, task, class_for(config, classes, directory), settings)
    if not _is_encoder(config, name):
        return None
    settings = SentenceModel(directory, poolings=("mean",), **transformer_settings(directory))
    assumed = (
        f"{directory} has no {MODULES}, which states how the vectors of tokens become one: their mean is taken, "
        "without normalizing it"
    )
    return PooledSource(directory, "embed", class_for(config, MODEL_MAPPING, directory), settings, (assumed,))


def is_pooled_class(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Returns True if a folder with a model of this class would be pooled: an encoder, a classifier or a reranker."""
    name = model_class.__name__
    return name.endswith(tuple(_HEADS)) or _is_encoder(config, name)


def _check_kind(directory: Path, config: PretrainedConfig, name: str, *, pooled: bool) -> None:
    """Raises UnsupportedModelError for kinds of models that can't be compiled; the hint names an alternative.

    Args:
        directory: the model's folder.
        config: the configuration of the transformers model.
        name: the class in ``architectures``; "" if there is none.
        pooled: True if the folder has modules.json.
    """
    where, kind = directory / CONFIG, config.model_type
    if kind in _OUT and (pooled or not name.endswith("ForConditionalGeneration")):
        raise UnsupportedModelError(f"{where}: {name or kind} is {_OUT[kind]}", hint=_INSTEAD[_OUT[kind]])
    if "colbert" in name.lower():
        raise UnsupportedModelError(f"{where}: {name} gives a vector for each token (ColBERT)", hint=FOR_SEARCH)
    if getattr(config, "is_encoder_decoder", False) and (pooled or name.endswith((*_HEADS, "ForQuestionAnswering"))):
        raise UnsupportedModelError(
            f"{where}: {name or kind} is an encoder with a decoder, and its result is that of both",
            hint="Use a model that is an encoder alone, such as XLM-RoBERTa or ModernBERT, or a decoder alone.",
        )


def transformer_folder(directory: Path) -> Path:
    """Returns the folder with config.json: ``directory``, or the one that its modules.json names.

    Raises the errors of ``read_sentence_model``.
    """
    if os.path.lexists(directory / CONFIG) or not os.path.lexists(directory / MODULES):
        return directory
    sentence = read_sentence_model(directory)
    return directory if sentence is None else sentence.transformer


def pooling_info(source: PooledSource, config: PretrainedConfig, hidden_size: int) -> PoolingInfo:
    """Returns the bundle's description of a pooled model.

    Args:
        source: the model.
        config: its configuration.
        hidden_size: the size of a token's vector.

    Raises SourceError if sentence-transformers' files state another size.
    """
    sentence = source.sentence
    common: dict[str, Any] = {
        "task": source.task,
        "prompts": dict(sentence.prompts),
        "default_prompt": sentence.default_prompt,
        "include_prompt": sentence.include_prompt,
        "similarity": sentence.similarity,
    }
    if source.task != "embed":
        names: Mapping[Any, Any] = config.id2label or {}
        count = 1 if sentence.answers is not None else len(names)
        labels = () if source.task == "rerank" else tuple(str(names[i]) for i in range(count))
        return PoolingInfo(dimensions=count, activation=_activation(source, config), labels=labels, **common)
    size = hidden_size * len(sentence.poolings)
    if sentence.size not in (None, hidden_size):
        raise SourceError(
            f"{source.folder}: the pooling states vectors of {sentence.size} dimensions (word_embedding_dimension), "
            f"and the model's have {hidden_size}",
            hint="The files of the pooling and of the model don't belong together.",
        )
    size = next((m.outputs for m in reversed(sentence.modules) if hasattr(m, "outputs")), size)
    choices = _dimension_choices(source, config, size)
    return PoolingInfo(dimensions=size, normalize=sentence.normalize, dimension_choices=choices, **common)


def _dimension_choices(source: PooledSource, config: PretrainedConfig, size: int) -> tuple[int, ...]:
    """Returns the sizes below ``size`` to which vectors may be cut, as the recipe or else the files state them.

    Raises SourceError or RecipeError for one that is larger than the vectors.
    """
    stated = getattr(config, _MATRYOSHKA, None) or []
    if not isinstance(stated, list | tuple) or not all(isinstance(n, int) and n > 0 for n in stated):
        raise SourceError(
            f"{source.folder / CONFIG}: {_MATRYOSHKA} is {stated!r:.80}, not a list of sizes", hint="Correct the field."
        )
    cut = source.sentence.dimensions
    named: dict[str, Sequence[int]] = {"truncate_dim": () if cut is None else (cut,), _MATRYOSHKA: stated}
    if source.dimensions:
        named = {"dimensions": source.dimensions}
    for name, sizes in named.items():
        if too_large := next((n for n in sizes if n > size), None):
            error = RecipeError if source.dimensions else SourceError
            where = "[pooling] of the recipe" if source.dimensions else str(source.folder)
            raise error(
                f"{where}: {name} is {too_large}, and vectors have {size} dimensions", hint="Correct the field."
            )
    return tuple(sorted({n for sizes in named.values() for n in sizes if n < size}))


def _of_modules(directory: Path, sentence: SentenceModel, config: PretrainedConfig) -> PooledSource:
    """Returns the model of a folder whose modules.json lists a pooling, or the answers of a decoder."""
    if sentence.answers is not None:
        if sentence.poolings or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModelError(
                f"{directory / MODULES}: the module LogitScore needs a causal language model without a pooling",
                hint="Export a reranker that sentence-transformers can load.",
            )
        return PooledSource(
            sentence.transformer, "rerank", class_for(config, MODEL_FOR_CAUSAL_LM_MAPPING, directory), sentence
        )
    if not sentence.poolings:
        raise UnsupportedModelError(
            f"{directory / MODULES}: there is no Pooling, so the model gives a vector for each token (ColBERT)",
            hint=FOR_SEARCH,
        )
    return PooledSource(sentence.transformer, "embed", class_for(config, MODEL_MAPPING, directory), sentence)


def _is_encoder(config: PretrainedConfig, name: str) -> bool:
    """Returns True for the base model, or the masked language model, of a family of encoders."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        return False
    if any(hasattr(config, part) for part in ("vision_config", "audio_config", "text_config")):
        return False
    kind = config.model_type
    encodes = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return (
        type(config) in MODEL_MAPPING
        and encodes
        and (name.endswith(_BASES) if name else kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    )


def class_for(config: PretrainedConfig, classes: Any, directory: Path) -> type[PreTrainedModel]:
    """Returns transformers' class for a configuration: the one in ``architectures`` if it is in the table.

    Args:
        config: the configuration.
        classes: transformers' table of classes by the class of configuration.
        directory: the model's folder, for messages.

    Raises UnsupportedModelError if the table has no class for it.
    """
    known = classes.get(type(config), None)
    listed = known if isinstance(known, tuple | list) else (known,)
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    chosen = next((one for one in listed if one is not None and one.__name__ == name), listed[0])
    if chosen is None:
        raise UnsupportedModelError(
            f"{directory / CONFIG}: transformers has no class of that kind for {config.model_type!r}",
            hint="Encoders and decoders of text can be exported with a pooling.",
        )
    return chosen  # type: ignore[no-any-return]


def named_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class in ``architectures``, whose checkpoint may have tensors that the built class lacks."""
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    named = getattr(transformers, name, None)
    return named if isinstance(named, type) and issubclass(named, PreTrainedModel) else None


def _activation(source: PooledSource, config: PretrainedConfig) -> Activation:
    """Returns the function of scores and classes: the stated one, or else that of the library that made the model."""
    section = getattr(config, "sentence_transformers", None)
    stated = source.sentence.activation
    if stated is None and isinstance(section, dict):
        stated = section.get("activation_fn")
    stated = stated or getattr(config, "sbert_ce_default_activation_function", None)
    if stated is not None:
        if stated not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{source.folder / CONFIG}: activation_fn {stated!r:.80} can't be compiled",
                hint=f"There are {', '.join(_ACTIVATIONS)}.",
            )
        return _ACTIVATIONS[stated]
    if source.task == "rerank":
        return "sigmoid"
    problem = getattr(config, "problem_type", None)
    kinds: Mapping[str | None, Activation] = {"multi_label_classification": "sigmoid", "regression": "none"}
    return kinds.get(problem, "softmax")
