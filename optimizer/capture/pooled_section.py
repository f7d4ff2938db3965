"""Adds the facts of a recipe's [pooling] to a pooled model, and finds the text of a reranker's pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from enginewright.optimizer.recipes.sections import PLACES, PoolingSection
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.contracts import DOCUMENT, QUERY, PoolingInfo
from enginewright.runtime.shared.errors import EnginewrightError, RecipeError, UnsupportedModelError
from enginewright.runtime.text.tokenizer import Tokenizer

from .pooled_source import PooledSource, class_for
from .sentence_transformers_files import SentenceModel, transformer_settings
from .tokenizer import load_tokenizer

_TRIED = (("place-of-query", "place-of-document"), (" a\nb c: Query? \n", "  {d} e\n\n" * 9))
"""Pairs of texts with which a chat template is rendered, to see where it writes them and if it changes them."""


def with_section(
    directory: Path, source: PooledSource | None, section: PoolingSection, config: PretrainedConfig
) -> PooledSource | None:
    """Adds the facts in a recipe's [pooling] to a model.

    Args:
        directory: the model's folder or GGUF file.
        source: the model as its files describe it; None for one that generates text.
        section: the recipe's [pooling].
        config: the model's configuration.

    Raises RecipeError naming a field that isn't for this model.
    """
    if section.answers:
        if (source is not None and source.sentence.answers is None) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = config.model_type if source is None else source.task
            raise _not_for("answers", f"decoders that write text, and {directory} is a model of {kind}")
        settings = SentenceModel(directory, **transformer_settings(directory)) if source is None else source.sentence
        answers = tuple(_token(directory, text) for text in section.answers)
        settings = replace(settings, answers=(answers[0], answers[1] if len(answers) > 1 else None))
        chosen = class_for(config, MODEL_FOR_CAUSAL_LM_MAPPING, directory)
        source = PooledSource(settings.transformer, "rerank", chosen, settings)
    if source is None:
        if stated := next(iter(section.model_fields_set), None):
            raise _not_for(stated, f"models of vectors or scores, and {directory} generates text")
        return None
    if section.dimensions and source.task != "embed":
        raise _not_for("dimensions", f"models of vectors, and {directory} is for {source.task}")
    if section.template is not None and source.task != "rerank":
        raise _not_for("template", f"rerankers, and {directory} is for {source.task}")
    return replace(source, dimensions=section.dimensions, template=section.template or source.template)


def with_templates(
    source: PooledSource, pooling: PoolingInfo, files: TokenizerFiles | None
) -> tuple[PoolingInfo, tuple[str, ...]]:
    """Returns the description of a pooled model with the templates of its pairs, and warnings.

    A recipe's template is used, or else that of the chat template, if texts pass through it.

    Args:
        source: the model.
        pooling: its description without templates.
        files: the tokenizer's files; None if there is none.

    Raises UnsupportedModelError if the chat template doesn't write a query and a document.
    """
    warnings: tuple[str, ...] = ()
    template = source.template
    if template is None and source.sentence.messages is not None:
        if source.task != "rerank" or files is None:
            raise UnsupportedModelError(
                f"{source.folder}: its texts pass through a chat template (modality_config), which is for pairs of a "
                f"reranker with a tokenizer, and this is a model for {source.task}",
                hint="Save it with texts as its only modality.",
            )
        template, warnings = _of_chat_template(source, files)
    if template is None:
        if source.sentence.answers is not None:
            warnings = (
                f"{source.folder} is a decoder, and no file states the text around a query and a document: they follow "
                "each other. template in the recipe's [pooling] states it",
            )
        return pooling, warnings
    head, tail = template.split(DOCUMENT)
    return msgspec.structs.replace(pooling, query_template=head, document_template=DOCUMENT + tail), warnings


def _of_chat_template(source: PooledSource, files: TokenizerFiles) -> tuple[str, tuple[str, ...]]:
    """Returns the text of a pair as the chat template writes it, and warnings."""
    tokenizer, sentence = Tokenizer(files), source.sentence
    default = sentence.default_prompt and sentence.prompts[sentence.default_prompt]

    def rendered(*pair: str) -> str:
        system = [("system", default)] if default else []
        messages = [
            {"role": role, "content": text if sentence.messages == "flat" else [{"type": "text", "text": text}]}
            for role, text in [*system, *zip(("query", "document"), pair, strict=True)]
        ]
        text = tokenizer.render_chat(messages, **{"add_generation_prompt": False, **sentence.template_options})
        for place, one in zip((QUERY, DOCUMENT), pair, strict=True):
            text = text.replace(one, place)
        return text

    try:
        template, other = (rendered(*pair) for pair in _TRIED)
        trimmed = rendered(*(text.strip() for text in _TRIED[1]))
    except EnginewrightError as e:
        raise _unsupported(source, f"its chat template refuses a query and a document: {e.message}") from e
    if PLACES.findall(template) != [QUERY, DOCUMENT] or trimmed != template:
        raise _unsupported(source, "its chat template doesn't write a query, and a document after it, as they are")
    changes = (
        f"{source.folder}: the chat template removes spaces around a query or a document, and the bundle keeps them"
    )
    return template, () if other == template else (changes,)


def _token(directory: Path, text: str) -> int:
    """Returns the id of a text that is a single token. Raises RecipeError for another text."""
    tokenizer = load_tokenizer(directory)
    ids = [] if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise RecipeError(
            f"[pooling] of the recipe: answers: {text!r} has {len(ids)} tokens, and an answer is one token",
            hint="Name tokens of the model, such as yes and no.",
        )
    return int(ids[0])


def _not_for(name: str, reason: str) -> RecipeError:
    return RecipeError(f"[pooling] of the recipe: {name} is for {reason}", hint="Leave the field out.")


def _unsupported(source: PooledSource, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source.folder}: {problem}", hint="State the text of a pair as template in the recipe's [pooling]."
    )
