"""Finds the inputs (positions, types of tokens) that make a model compute what it does for an unpadded text without
them.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from enginewright.runtime.shared.errors import UnsupportedModelError

from .attention_interface import begin_forward, capturing

_TOKENS = 5


class TextInputs(NamedTuple):
    """The inputs of a model besides ids.

    Attributes:
        first: the position of a text's first token: 0, or one after the padding id (RoBERTa); None if the model isn't
            given positions.
        types: True if the model is given the types of tokens, of which all are 0 by default.
    """

    first: int | None
    types: bool


def text_inputs(layers: torch.nn.Module, model: PreTrainedModel) -> TextInputs:
    """Returns the inputs with which ``layers`` looks up the same rows of all tables as it does without them.

    It runs on a few tokens. The values of weights don't matter.

    Args:
        layers: the module of ``model`` that computes hidden states.
        model: from ``build_pooled``.

    Raises UnsupportedModelError if the positions of tokens don't follow each other, or the layers can't run.
    """
    parameters = inspect.signature(layers.forward).parameters
    try:
        usual = _looked_up(layers, model)
        first = _first_position(layers, model, usual) if "position_ids" in parameters else None
        types = torch.zeros(1, _TOKENS, dtype=torch.long)
        reads_types = "token_type_ids" in parameters and _equal(usual, _looked_up(layers, model, token_type_ids=types))
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as e:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't run on a text alone: {type(e).__name__}: {e}",
            hint="Models that need more than the ids of a text's tokens can't be compiled.",
        ) from e
    return TextInputs(first, reads_types)


def _first_position(layers: torch.nn.Module, model: PreTrainedModel, usual: list[torch.Tensor]) -> int:
    """Returns the position of the first token. ``usual``: the rows that are looked up without positions."""
    counted = _looked_up(layers, model, position_ids=_positions(0))
    starts = {int((a - b).flatten()[0]) for a, b in zip(usual, counted, strict=False) if not torch.equal(a, b)}
    first = next(iter(starts), 0)
    if len(starts) > 1 or (first and not _equal(usual, _looked_up(layers, model, position_ids=_positions(first)))):
        raise UnsupportedModelError(
            f"{type(model).__name__}: the positions of a text's tokens don't follow each other from a first one on",
            hint="Positions are 0, 1, 2, ..., or the same with a number added.",
        )
    return first


def _positions(first: int) -> torch.Tensor:
    return torch.arange(first, first + _TOKENS)[None]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


class _Lookups(TorchFunctionMode):
    """Records the rows that each lookup in a table takes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding:
            self.rows.append(args[0].clone())
        return func(*args, **(kwargs or {}))


def _looked_up(layers: torch.nn.Module, model: PreTrainedModel, **inputs: torch.Tensor) -> list[torch.Tensor]:
    """Returns the rows that each lookup takes, in order, of a text with ``inputs`` besides its ids."""
    with _Lookups() as lookups:
        run_text(layers, model, **inputs)
    rows: list[torch.Tensor] = lookups.rows
    return rows


def run_text(layers: torch.nn.Module, model: PreTrainedModel, **inputs: torch.Tensor) -> Any:
    """Runs ``layers`` of ``model`` on a few tokens, with ``inputs`` besides their ids, and returns the output."""
    config = model.config.get_text_config()
    named = {value for name, value in vars(config).items() if name.endswith("_token_id") and isinstance(value, int)}
    token = next(i for i in range(config.vocab_size) if i not in named)
    ids = torch.full((1, _TOKENS), token)
    with torch.no_grad(), capturing(model, whole_texts=True):
        begin_forward(torch.tensor([0, _TOKENS]), _TOKENS)
        return layers(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
