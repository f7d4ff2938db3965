"""The text decoder of a model that also takes images or sounds: its configuration, its class, and its tensors.

Such a model's config.json has a ``text_config``. The decoder's class is transformers' class for that configuration: a
causal language model, or a model without a head, which then gets the whole model's head. No model family is
special-cased.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
)

from enginewright.optimizer.shared.config_sizes import check_sizes
from enginewright.passes.ir.weights import WeightExpr
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

_WHOLES = (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
_HEADS = ("ForConditionalGeneration", "ForCausalLM")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn", "proportional")
_PROBED = 512
"""The number of positions for which the tables of two rotations are compared."""

_Named = TypeVar("_Named")
_SCALES_LOGITS = re.compile(r".*logit.*|lm_head_multiplier|output_multiplier.*")


@dataclass(frozen=True)
class TextPart:
    """The text decoder of a model with other parts: its configuration and class, the arguments of ``build_model``."""

    config: PretrainedConfig
    model_class: type[PreTrainedModel]


class _WithHead(PreTrainedModel):
    """A text model with the head that its whole has: transformers has no causal model of such a family's text alone.

    Positions are [B, T], as of any text; a model with positions in time, height and width takes them for all three.
    """

    base_model_prefix = "model"
    _text_model: type[PreTrainedModel]  # set by _with_head

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = self._text_model(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        table = self.model.get_input_embeddings()
        name = next(name for name, module in self.model.named_modules() if module is table)
        self._tied_weights_keys = {"lm_head.weight": f"model.{name}.weight"}
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Returns logits [B, T, V] of token ids [B, T]; with ``logits_to_keep``, only of the selected positions."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **options,
        )
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, rows, :])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


def find_text_part(config: PretrainedConfig, source: str) -> TextPart | None:
    """Returns the text decoder inside of a model's configuration; None for any model that has no such part.

    ``config`` isn't changed. ``source`` is its file, for messages.

    Raises:
        UnsupportedModelError: transformers has no decoder for the part.
        SourceError: a size in its configuration is invalid.
    """
    inside = getattr(config, "text_config", None)
    if not isinstance(inside, PretrainedConfig) or not any(type(config) in mapping for mapping in _WHOLES):
        return None
    named = getattr(config, "architectures", None) or [f"{config.model_type}{_HEADS[0]}"]
    encodes = any(getattr(c, "is_encoder_decoder", False) for c in (config, inside))
    if encodes or not str(named[0]).endswith(_HEADS):
        return None
    check_sizes(inside, f"{source}: text_config")
    text = copy.deepcopy(inside)
    if hasattr(text, "quantization_config"):
        del text.quantization_config
    # What the whole says wins, as it does in transformers' class for the whole.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    for name in _SPECIAL:
        if (token := getattr(config, name, None)) is not None:
            setattr(text, name, token)
    model_class = _model_class(text, source)
    text.architectures = [model_class.__name__]
    return TextPart(text, model_class)


def _model_class(text: PretrainedConfig, source: str) -> type[PreTrainedModel]:
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        return cast("type[PreTrainedModel]", causal)
    base: Any = MODEL_MAPPING.get(type(text), None)
    if not isinstance(base, type):
        raise UnsupportedModelError(
            f"{source}: text_config: transformers has no decoder for the model type {text.model_type!r}",
            hint="The text part of this model can't be built alone.",
        )
    for name, value in vars(text).items():
        if _SCALES_LOGITS.fullmatch(name) and isinstance(value, int | float) and value not in (0, 1):
            raise UnsupportedModelError(
                f"{source}: text_config: {name} is {value}, and transformers has no causal model of "
                f"{text.model_type!r} that says where it counts",
                hint="The text part of this model can't be built alone.",
            )
    return _with_head(base)


def _with_head(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a class with ``base`` and a head; its attention and loading are those of the base's family."""
    name = f"{base.__name__.removesuffix('Model')}ForCausalLM"
    family = cast("type[PreTrainedModel]", base.__bases__[0])
    return type(name, (_WithHead, family), {"_text_model": base, "__module__": __name__})


def is_text_with_head(model_class: type[PreTrainedModel]) -> bool:
    """Returns True if the class was made in this module, from a text model and a head."""
    return issubclass(model_class, _WithHead)


def text_tensors(model: PreTrainedModel, tensors: Mapping[str, _Named], source: str) -> dict[str, _Named]:
    """Returns the tensors of a multimodal checkpoint's text decoder, by the names of the decoder's own checkpoint.

    They have a common prefix, such as ``language_model.model.`` or ``model.language_model.``: the prefix with most of
    the decoder's names. The head is below the prefix or one level above it. All tensors below the prefix are returned,
    so that unknown ones are reported; the others belong to images and sounds.

    Raises SourceError if there are none.
    """
    # base_model_prefix isn't always the attribute's name.
    base = next((f"{name}." for name, m in model.named_children() if isinstance(m, PreTrainedModel)), "")
    state = model.state_dict()
    inside = {name.removeprefix(base) for name in state if name.startswith(base)}
    prefixes = Counter[str]()
    for name in tensors:
        parts = name.split(".")
        prefixes.update(
            name[: len(name) - len(rest)] for at in range(len(parts)) if (rest := ".".join(parts[at:])) in inside
        )
    if not prefixes:
        raise SourceError(
            f"{source}: no tensor is one of the text decoder {type(model).__name__}, such as {min(inside)}",
            hint="Download the whole checkpoint again.",
        )
    prefix = max(prefixes, key=lambda p: (prefixes[p], p))
    decoder_tensors = {base + name.removeprefix(prefix): e for name, e in tensors.items() if name.startswith(prefix)}
    above = prefix.split(".")[:-1]
    for head in (name for name in state if not name.startswith(base)):
        places = [".".join([*above[:depth], head]) for depth in range(len(above), -1, -1)]
        if (place := next((name for name in places if name in tensors), None)) is not None:
            decoder_tensors[head] = tensors[place]
    return decoder_tensors


def unties(model: PreTrainedModel, tensors: Mapping[str, WeightExpr]) -> bool:
    """Returns True if a checkpoint's head differs from its token embedding although the configuration ties the two.

    transformers then loads both tensors as separate weights.

    Args:
        model: the text decoder, with tied weights as configured.
        tensors: the checkpoint's tensors by parameter, as ``text_tensors`` returns them. Head and embedding are read.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not table.weight:
        return False
    stored = [tensors[name] for name, parameter in parameters.items() if parameter is head.weight and name in tensors]
    return len(stored) > 1 and any(not torch.equal(stored[0].evaluate(), other.evaluate()) for other in stored[1:])


class _TextRotation(torch.nn.Module):
    """Rotary tables of a multimodal model for text, whose positions in time, height and width are equal."""

    inv_freq: torch.Tensor  # [F]

    def __init__(self, frequencies: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines [B, T, 2F], each frequency in both halves. Positions are [3, B, T] or [B, T]."""
        positions = position_ids[0] if position_ids.dim() == 3 else position_ids
        angles = positions[..., None].float() * self.inv_freq  # [B, T, F]
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(x.dtype), (angles.sin() * self.scale).to(x.dtype)


def simplify_rotations(model: PreTrainedModel) -> None:
    """Replaces a text decoder's rotations by three positions (time, height, width) by rotations by a single position.

    Multimodal rotary embeddings (Qwen2-VL, arXiv 2409.12191) assign some frequencies to each of the three; in text the
    three are equal. A module is replaced only if both compute the same tables for the same positions, bit for bit.
    """
    for path, module in list(model.named_modules()):
        frequencies = getattr(module, "inv_freq", None)
        if not hasattr(module, "mrope_section") or not isinstance(frequencies, torch.Tensor):
            continue
        if module.rope_type not in _FIXED_ROTATIONS:
            continue  # its frequencies depend on the batch
        simple = _TextRotation(frequencies, float(module.attention_scaling))
        positions, x = torch.arange(_PROBED).expand(3, 1, -1), torch.zeros(1)
        with torch.no_grad():
            expected, simplified = module(x, positions), simple(x, positions)
        if len(expected) == 2 and all(torch.equal(a, b) for a, b in zip(expected, simplified, strict=True)):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, simple)
