"""``capture``: the model of a source, traced, with weights that are not read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.bundle.manifest import SourceSection
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RecipeError, SourceError, UnsupportedModelError

from . import huggingface, module
from .bind_weights import bind_weights
from .build_model import build_model, check_decoder, class_of_part, is_decoder
from .build_pooled import build_pooled_source, find_pooled, pooled_context, pooled_info
from .check_source import CONFIG, GENERATION_CONFIG, TEXT, check_file
from .check_tokenizer import SourceTokenizer, check_tokenizer
from .convert_weights import by_model_names
from .find_source import describe_source, model_name
from .freeze_rope import freeze_rope
from .generation_settings import generation_defaults
from .gguf import model as gguf_model
from .gguf.file import GgufFile, open_gguf
from .merge_adapters import AdapterMerge
from .model_info import model_info
from .model_source import Adapter, AnySource, ModelSource
from .pooled_section import with_templates
from .pooled_source import PooledSource, is_pooled_class
from .quantized.checkpoint import unpacked, without_idle_biases
from .text_part import TextPart, find_text_part, simplify_rotations, text_tensors, unties
from .tokenizer import in_lower_case, load_tokenizer, read_tokenizer_json, tokenizer_files
from .trace import trace, trace_pooled

__all__ = ["CapturedModel", "build_from_directory", "build_from_gguf", "build_from_source", "capture"]

Tokenizer = PreTrainedTokenizerBase | str | Path


@dataclass(frozen=True)
class CapturedModel:
    """A source model as a graph, with everything that an export needs from the source.

    Attributes:
        program: graph of the model, whose weights aren't read yet.
        model_info: sizes, token ids and defaults that the runtime needs.
        tokenizer_files: the tokenizer's files for the bundle; None if the source has none.
        source: description of the source for the bundle's manifest.
        warnings: messages for the user about settings of the source that are ignored, and about possible faults in it.
    """

    program: Program
    model_info: ModelInfo
    tokenizer_files: TokenizerFiles | None
    source: SourceSection
    warnings: tuple[str, ...] = ()


def capture(
    source: AnySource,
    *,
    tokenizer: Tokenizer | None = None,
    context_length: int | None = None,
    name: str | None = None,
    part: str | None = None,
    pooling: PoolingSection | None = None,
) -> CapturedModel:
    """Captures a decoder-only language model, or a model that gives vectors, scores or classes, without its weights.

    Args:
        source: a Hugging Face directory, a GGUF file, a transformers model, or a ``ModelSource`` with adapters. Nothing
            is downloaded (see ``find_source``), and no code or pickle of the model is run.
        tokenizer: replaces the source's own: a transformers tokenizer, or a directory with one.
        context_length: the longest request in tokens; rotary frequencies that depend on the length are fixed for it.
            The default is the longest length that needs no scaling, or the model's maximum; see ``freeze_rope``.
        name: the model's name; by default that of its file or folder.
        part: "text" captures the text decoder of a model that also takes images or sounds, and any other decoder
            whole. By default a model with other parts is refused.
        pooling: the recipe's [pooling]: facts about a model of vectors or scores that its files don't state.

    Raises:
        RecipeError: a field of ``pooling`` isn't for this model.
        SourceError: the source is missing, incomplete or damaged; names file, field or tensor.
        UnsupportedModelError: the model can't be compiled; names the module or field that is the reason.
    """
    replacement = _tokenizer_of(tokenizer)
    model_source = ModelSource.of(source)
    path, adapters = model_source.path, model_source.adapters
    if pooling is not None and path is None:
        raise RecipeError("[pooling] of the recipe is for models in folders and GGUF files", hint="Leave it out.")
    if path is None:
        captured = _capture_module(model_source.model_object, replacement, context_length, part)
    elif not path.is_dir() and not path.is_file():
        raise SourceError(f"{path} doesn't exist", hint="Pass a Hugging Face directory or a GGUF file.")
    elif (pooled := find_pooled(path, pooling)) is not None:
        captured = _capture_pooled(path, adapters, *pooled, replacement, context_length)
    elif path.is_dir():
        captured = _capture_directory(path, adapters, replacement, context_length, part)
    else:
        captured = _capture_gguf(path, adapters, replacement, context_length)
    if adapters:
        described = captured.source.model_copy(update={"adapters": tuple(one.describe() for one in adapters)})
        captured = replace(captured, source=described)
    return captured if name is None else replace(captured, model_info=replace(captured.model_info, name=name))


def capture_shapes(source: Path) -> tuple[Program, ModelInfo]:
    """Captures a model whose weights have shapes and no values; of a directory, config.json is enough.

    The weights of a GGUF file are those of ``capture``, because its header has their types. If a model has other parts,
    only the text decoder is captured. Raises the errors of ``capture``; evaluating a weight of a directory raises
    SourceError.
    """
    if source.is_dir():
        model = _build(*_decoder_of(source, TEXT))
        unread = {name: _unread(name, p) for name, p in model.named_parameters()}
        weights = bind_weights(model, unread, source=str(source))
    else:
        model, weights = build_from_gguf(_open_gguf(source))
    context = freeze_rope(model)
    return trace(model, weights), model_info(model, model_name(source), context, {})


def _unread(name: str, parameter: torch.nn.Parameter) -> WeightExpr:
    def read() -> torch.Tensor:
        raise SourceError(f"weight {name} has a value that matters, and only the configuration was read")

    return Source(name, tuple(parameter.shape), parameter.dtype, read)


def build_from_directory(
    directory: Path, part: str | None = TEXT, *, eager: bool = False, adapters: Sequence[Adapter] = ()
) -> tuple[PreTrainedModel, dict[str, WeightExpr]]:
    """Builds the model of a Hugging Face directory, with unread weights.

    Args:
        directory: the folder of the model.
        part: as for ``capture``; by default the text decoder, the only part that bundles have.
        eager: as for ``build_model``.
        adapters: merged into the weights.

    Returns the model, and its weights by its own names. Raises the errors of ``capture``.
    """
    source = str(directory)
    config, model_class = _decoder_of(directory, part)
    tensors = huggingface.read_tensors(directory)
    if (quantized := huggingface.read_quantization(directory)) is not None:
        tensors = unpacked(tensors, quantized)
    model = _build(config, model_class, eager=eager)
    stored = tensors
    if model_class is not None:
        tensors = text_tensors(model, tensors, source)
        if unties(model, tensors):
            config.tie_word_embeddings = False
            model = _build(config, model_class, eager=eager)
    merge = AdapterMerge(model, adapters, tensors, whole=None if stored is tensors else stored) if adapters else None
    if merge is not None:
        tensors = merge.on_checkpoint(tensors)
    named = by_model_names(model, tensors, source=source)
    if quantized is not None:
        named = without_idle_biases(named, tensors, model, model.base_model_prefix)
    weights = bind_weights(model, named, source=source)
    if merge is None:
        return model, weights
    if merge.unties:
        model = _untied(model, lambda: _build(config, model_class, eager=eager), config, source)
    return model, merge.on_model(weights)


def _untied(
    tied: PreTrainedModel, build: Callable[[], PreTrainedModel], config: PretrainedConfig, source: str
) -> PreTrainedModel:
    """Builds the model again with a separate head, because an adapter changes the token embedding and the head
    differently.

    Raises UnsupportedModelError if the class can't have a separate head.

    Args:
        tied: the model with a tied head.
        build: builds a model from ``config``.
        config: the configuration, which is changed.
        source: the folder or file, for messages.
    """
    config.tie_word_embeddings = False
    model = build()
    if len(list(model.parameters())) == len(list(tied.parameters())):
        raise UnsupportedModelError(
            f"{source}: an adapter changes the table of tokens and the head differently, and {type(model).__name__} "
            "can't have two",
            hint="Train the adapter with ensure_weight_tying=True.",
        )
    return model


def _decoder_of(directory: Path, part: str | None) -> tuple[PretrainedConfig, type[PreTrainedModel] | None]:
    """Returns a directory's configuration and None; or the configuration of its text decoder and the decoder's class.

    It refuses models that aren't decoders, so callers read weights only afterwards.
    """
    config = huggingface.read_config(directory)
    text_part: TextPart | None = None
    if part == TEXT and not is_decoder(config):
        text_part = find_text_part(config, str(directory / CONFIG))
    if text_part is None:
        model_class = class_of_part(config)
        check_decoder(config, model_class)
        return config, model_class
    return text_part.config, text_part.model_class


def _build(
    config: PretrainedConfig, model_class: type[PreTrainedModel] | None, *, eager: bool = False
) -> PreTrainedModel:
    """Builds the decoder of a configuration and class that ``_decoder_of`` returned; see ``build_model``."""
    model = build_model(config, model_class, eager=eager)
    if model_class is not None:
        simplify_rotations(model)
    return model


def build_from_gguf(
    file: GgufFile, *, eager: bool = False, adapters: Sequence[Adapter] = ()
) -> tuple[PreTrainedModel, dict[str, WeightExpr]]:
    """Builds the model of an open GGUF file, with the results of ``build_from_directory``."""
    config, source = gguf_model.read_config(file), str(file.path)
    gguf_model.check_generates(file)
    model = build_model(config, eager=eager)
    weights = bind_weights(model, gguf_model.read_tensors(file, model), source=source)
    if not adapters:
        return model, weights
    merge = AdapterMerge(model, adapters, None)
    if merge.unties:
        model = _untied(model, lambda: build_model(config, eager=eager), config, source)
        gguf_model.read_tensors(file, model)  # writes its rotary frequencies
    return model, merge.on_model(weights)


def build_from_source(source: ModelSource, *, eager: bool = False) -> tuple[PreTrainedModel, dict[str, WeightExpr]]:
    """Builds the model of a folder or a GGUF file with its adapters. If it has other parts, only the text decoder is
    built.
    """
    path = source.path
    assert path is not None
    if path.is_dir():
        return build_from_directory(path, eager=eager, adapters=source.adapters)
    return build_from_gguf(_open_gguf(path), eager=eager, adapters=source.adapters)


def _capture_module(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None, context_length: int | None, part: str | None
) -> CapturedModel:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} isn't a transformers model, so its attention can't be found",
            hint="Pass a transformers decoder, a Hugging Face directory or a GGUF file.",
        )
    decoder = is_decoder(model.config, type(model))
    if not decoder and part is None and is_pooled_class(type(model), model.config):
        raise UnsupportedModelError(
            f"{type(model).__name__}: an encoder's pooling, prompts and labels are in its folder, not in the object",
            hint="Save the model and its tokenizer with save_pretrained(), and export the folder.",
        )
    if part is not None and not decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__}: a part of a model can be taken of its folder only",
            hint=f"Save the model with save_pretrained(), and export the folder with part={part!r}; "
            "or pass its text decoder.",
        )
    twin = build_model(model.config, type(model))
    tensors = module.read_module_tensors(model)
    weights = bind_weights(twin, tensors, source=type(model).__name__)
    module.copy_computed_buffers(model, twin)
    context = freeze_rope(twin, context_length)
    settings = getattr(model, "generation_config", None)
    name = Path(str(getattr(model.config, "_name_or_path", "") or type(model).__name__)).name
    generation = settings.to_diff_dict() if settings is not None else {}
    described = SourceSection(kind="module", name=type(model).__name__)
    files = None if tokenizer is None else tokenizer_files(tokenizer)
    original = None if tokenizer is None else SourceTokenizer.of_transformers(tokenizer)
    eos = getattr(tokenizer, "eos_token_id", None)
    info = model_info(twin, name, context, generation, eos, where="generation_config")
    warnings = _warnings(info, generation, "generation_config", files, original, type(model).__name__)
    return CapturedModel(trace(twin, weights), info, files, described, warnings)


def _capture_directory(
    directory: Path,
    adapters: Sequence[Adapter],
    tokenizer: PreTrainedTokenizerBase | None,
    context_length: int | None,
    part: str | None,
) -> CapturedModel:
    model, weights = build_from_directory(directory, part, adapters=adapters)
    context = freeze_rope(model, context_length)
    from_source = tokenizer is None
    tokenizer = tokenizer or load_tokenizer(directory)
    files = None if tokenizer is None else tokenizer_files(tokenizer)
    generation, where = huggingface.read_generation_settings(directory), str(directory / GENERATION_CONFIG)
    eos = getattr(tokenizer, "eos_token_id", None)
    info = model_info(model, model_name(directory), context, generation, eos, where=where)
    original = None if tokenizer is None else SourceTokenizer.of_transformers(tokenizer)
    if from_source and (tokenizer_json := read_tokenizer_json(directory)) is not None:
        original = SourceTokenizer.of_json(tokenizer_json)
    warnings = _warnings(info, generation, where, files, original, str(directory))
    return CapturedModel(trace(model, weights), info, files, describe_source(directory), warnings)


def _capture_pooled(
    path: Path,
    adapters: Sequence[Adapter],
    pooled: PooledSource,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    context_length: int | None,
) -> CapturedModel:
    if adapters:
        raise UnsupportedModelError(
            f"{path}: adapters can be merged into language models only, and this is a model for {pooled.task}",
            hint="Merge the adapter with peft's merge_and_unload(), and export the merged model.",
        )
    model, weights = build_pooled_source(pooled, config)
    longest, inside, original = None, None, None
    if path.is_file():
        file = _open_gguf(path)
        inside = file.metadata.get("general.name")
        files = gguf_model.read_tokenizer(file)[0] if tokenizer is None else tokenizer_files(tokenizer)
        tokenizer_json = None if files is None or tokenizer is not None else files.tokenizer_json
    else:
        tokenizer_json = read_tokenizer_json(pooled.folder) if tokenizer is None else None
        tokenizer = tokenizer or load_tokenizer(pooled.folder)
        longest = getattr(tokenizer, "model_max_length", None)
        files = None if tokenizer is None else tokenizer_files(tokenizer)
    context = pooled_context(model, pooled, context_length, longest if isinstance(longest, int) else None)
    if tokenizer_json is not None:
        original = SourceTokenizer.of_json(tokenizer_json)
    elif tokenizer is not None:
        original = SourceTokenizer.of_transformers(tokenizer)
    info = pooled_info(model, pooled, model_name(path, inside), context)
    warnings = _warnings(info, {}, str(path), files, original, str(path))
    if files is not None and pooled.sentence.lower_case:
        files = in_lower_case(files)
    assert info.pooling is not None
    described, of_template = with_templates(pooled, info.pooling, files)
    program = trace_pooled(model, pooled, weights)
    every = (*pooled.warnings, *of_template, *warnings)
    return CapturedModel(program, replace(info, pooling=described), files, describe_source(path), every)


def _capture_gguf(
    path: Path, adapters: Sequence[Adapter], tokenizer: PreTrainedTokenizerBase | None, context_length: int | None
) -> CapturedModel:
    file = _open_gguf(path)
    model, weights = build_from_gguf(file, adapters=adapters)
    context = freeze_rope(model, context_length)
    if tokenizer is None:
        files, generation = gguf_model.read_tokenizer(file)
    else:
        files, generation = tokenizer_files(tokenizer), gguf_model.generation_settings(file)
    name = model_name(path, file.metadata.get("general.name"))
    info = model_info(model, name, context, generation, getattr(tokenizer, "eos_token_id", None), where=str(path))
    original = None if tokenizer is None else SourceTokenizer.of_transformers(tokenizer)
    if tokenizer is None and files is not None and files.tokenizer_json is not None:
        original = SourceTokenizer.of_json(files.tokenizer_json)
    warnings = _warnings(info, generation, str(path), files, original, str(path))
    return CapturedModel(trace(model, weights), info, files, describe_source(path), warnings)


def _warnings(
    info: ModelInfo,
    generation: Mapping[str, Any],
    where: str,
    files: TokenizerFiles | None,
    original: SourceTokenizer | None,
    source: str,
) -> tuple[str, ...]:
    """Returns warnings about unsupported generation settings and about the tokenizer. Raises the errors of
    ``check_tokenizer``.
    """
    warnings = generation_defaults(generation, where)[1]
    if files is not None and original is not None:
        ends = info.eos_token_ids
        warnings += check_tokenizer(files, original, info.vocab_size, end_tokens=ends, source=source)
    return tuple(warnings)


def _open_gguf(path: Path) -> GgufFile:
    check_file(path)
    return open_gguf(path)


def _tokenizer_of(tokenizer: Tokenizer | None) -> PreTrainedTokenizerBase | None:
    if tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    loaded: Any = load_tokenizer(Path(tokenizer)) if Path(tokenizer).is_dir() else None
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise SourceError(f"{tokenizer} isn't a directory with a tokenizer", hint="It needs a tokenizer.json.")
    return loaded
