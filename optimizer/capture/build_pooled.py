"""Builds the model of a folder that gives vectors, scores or classes, with unread weights, and describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.passes.ir.weights import Cast, WeightExpr
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RecipeError, SourceError, UnsupportedModelError

from . import huggingface
from .bind_weights import bind_weights
from .build_model import build_pooled, check_own_code
from .check_source import check_file
from .convert_weights import by_model_names
from .freeze_rope import freeze_rope, own_context_length
from .gguf import model as gguf_model
from .gguf.file import GgufFile, open_gguf
from .gguf.pooling import AFTER, Dense
from .model_info import model_info
from .pooled_section import with_section
from .pooled_source import PooledSource, find_pooled_source, named_class, pooling_info, transformer_folder
from .pooled_step import layers_of, modules_after
from .quantized.checkpoint import unpacked, without_idle_biases
from .sentence_transformers_files import DenseModule, NormModule, SentenceModel
from .text_inputs import text_inputs
from .tokenizer import gives_types


def find_pooled(path: Path, section: PoolingSection | None = None) -> tuple[PooledSource, PretrainedConfig] | None:
    """Returns the pooled model of a folder or a GGUF file, and its configuration; None for a model that generates text.

    ``section``: the recipe's [pooling]. With its field ``answers``, a model that generates text becomes a reranker.

    Raises:
        RecipeError: a field of the section isn't for this model.
        The errors of ``read_config`` and ``find_pooled_source``.
    """
    if path.is_file():
        return _in_file(path, section)
    config = huggingface.read_config(transformer_folder(path))
    source = find_pooled_source(path, config)
    if section is not None:
        source = with_section(path, source, section, config)
    if source is None:
        return None
    check_own_code(config)
    return replace(source, gives_types=gives_types(source.folder)), config


def _in_file(path: Path, section: PoolingSection | None) -> tuple[PooledSource, PretrainedConfig] | None:
    """Returns the result of ``find_pooled`` for a GGUF file."""
    check_file(path)
    pooled = _of_file(open_gguf(path))
    if section is None or (pooled is None and not section.model_fields_set):
        return pooled
    if pooled is None or section.answers:
        what = f"{path} generates text" if pooled is None else "answers is for models in Hugging Face folders"
        raise RecipeError(f"[pooling] of the recipe: {what}", hint="Leave it out.")
    source, config = pooled
    return with_section(path, source, section, config) or source, config


def _of_file(file: GgufFile) -> tuple[PooledSource, PretrainedConfig] | None:
    pooling = gguf_model.pooling_of(file)
    if pooling is None:
        return None
    modules = tuple(
        DenseModule(file.path, one.inputs, one.outputs, one.bias, one.activation)
        if isinstance(one, Dense)
        else NormModule(file.path, one.size, one.epsilon, one.bias)
        for one in pooling.modules
    )
    sentence = SentenceModel(
        file.path,
        poolings=(pooling.kind,),
        modules=modules,
        normalize=pooling.task == "embed",
        max_length=pooling.longest,
    )
    config = gguf_model.read_config(file)
    # llama.cpp gives all tokens the type 0.
    source = PooledSource(
        file.path,
        pooling.task,
        gguf_model.model_class(config),
        sentence,
        pooling.warnings,
        gives_types=False,
        template=pooling.template,
    )
    return source, config


def build_pooled_source(
    source: PooledSource, config: PretrainedConfig, *, eager: bool = False
) -> tuple[PreTrainedModel, dict[str, WeightExpr]]:
    """Builds a pooled model, with unread weights.

    Args:
        source: the model.
        config: its configuration.
        eager: as for ``build_model``.

    Returns the model, and its weights by its own names; those of the modules after the pooling begin with ``AFTER``.

    Raises:
        SourceError: a tensor is missing, damaged, or has another shape than the configuration states.
        UnsupportedModelError: the model can't be built.
    """
    directory = source.folder
    model = build_pooled(config, source.model_class, pools=not source.sentence.poolings, eager=eager)
    if directory.is_file():
        tensors = gguf_model.read_tensors(open_gguf(directory), model)
        after = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{AFTER}.")}
        return model, bind_weights(model, tensors, source=str(directory)) | after
    tensors = huggingface.read_tensors(directory)
    if (quantized := huggingface.read_quantization(directory)) is not None:
        tensors = unpacked(tensors, quantized)
    named = by_model_names(model, tensors, source=str(directory))
    if quantized is not None:
        named = without_idle_biases(named, tensors, model, model.base_model_prefix)
    named = _without_other_heads(model, config, source, named)
    return model, bind_weights(model, named, source=str(directory)) | _weights_after(source)


def pooled_context(
    model: PreTrainedModel, source: PooledSource, wanted: int | None, tokenizer_length: int | None
) -> int:
    """Fixes the rotary frequencies of ``model`` and returns its longest text in tokens.

    Args:
        model: from ``build_pooled``.
        source: the model's description.
        wanted: the length that the caller asks for; None takes what the files state.
        tokenizer_length: the length that the tokenizer states; None if it doesn't.

    Raises UnsupportedModelError if ``wanted`` is longer than the model's table of positions.
    """
    most = own_context_length(model.config) - (text_inputs(layers_of(model, source), model).first or 0)
    if wanted is not None and wanted > most:
        raise UnsupportedModelError(
            f"{type(model).__name__} is made for at most {most} tokens, and a context_length of {wanted} was asked for",
            hint="Choose a shorter context_length.",
        )
    if wanted is not None:
        return freeze_rope(model, wanted)
    return min(freeze_rope(model), most, source.sentence.max_length or tokenizer_length or most)


def pooled_info(model: PreTrainedModel, source: PooledSource, name: str, context_length: int) -> ModelInfo:
    """Returns the facts about an embedding model, reranker or classifier for its bundle, without chat templates.

    Raises the errors of ``pooling_info``.
    """
    info = model_info(model, name, context_length, {})
    size = int(getattr(model.config.get_text_config(), "hidden_size", 0))
    more = sum(p.numel() for p in modules_after(source)[0].parameters())
    return replace(info, pooling=pooling_info(source, model.config, size), parameters=info.parameters + more)


def _without_other_heads(
    model: PreTrainedModel, config: PretrainedConfig, source: PooledSource, tensors: Mapping[str, WeightExpr]
) -> dict[str, WeightExpr]:
    """Returns the tensors without those of heads and poolings that ``model`` doesn't have.

    A checkpoint of a masked language model has its head. One of a base model may have a pooling that no vector needs.
    """
    prefix = f"{model.base_model_prefix}."
    classes = {kind for kind in (named_class(config), source.model_class) if kind is not None}
    with torch.device("meta"):
        wholes = [kind._from_config(config) for kind in classes]
    built = {name.removeprefix(prefix) for name in model.state_dict()}
    others = {name.removeprefix(prefix) for whole in wholes for name in whole.state_dict()} - built
    heads = {name.partition(".")[0] for name in others} - {name.partition(".")[0] for name in built}

    def is_other(name: str) -> bool:
        short = name.removeprefix(prefix)
        return short in others or short.partition(".")[0] in heads

    return {name: expr for name, expr in tensors.items() if not is_other(name)}


def _weights_after(source: PooledSource) -> dict[str, WeightExpr]:
    """Returns the weights of the modules after the pooling, by name. Raises SourceError naming file and tensor."""
    weights: dict[str, WeightExpr] = {}
    modules = modules_after(source)[0]
    for number, (one, module) in enumerate(zip(source.sentence.modules, modules, strict=True)):
        stored = huggingface.read_tensors(one.folder)
        inside = "linear" if isinstance(one, DenseModule) else "norm"
        for name, parameter in module.named_parameters():
            expr = stored.get(f"{inside}.{name}")
            if expr is None or expr.shape != tuple(parameter.shape):
                what = "is missing" if expr is None else f"has shape {expr.shape}"
                raise SourceError(
                    f"{one.folder}: tensor {inside}.{name} {what}, and the module's config.json states "
                    f"{tuple(parameter.shape)}",
                    hint="The file and its configuration don't belong together: download both again.",
                )
            weights[f"{AFTER}.{number}.{name}"] = expr if expr.dtype == torch.float32 else Cast(expr, torch.float32)
    return weights
