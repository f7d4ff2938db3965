"""The step of a pooled model, to be traced: hidden states of packed texts, their pooling, and what follows it.

The head of a classifier is the model's own code. It runs on the pooled row of each text, as if that were a text of one
token. This is proved on random hidden states first, for each kind of pooling until one gives the model's own result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from enginewright.runtime.shared.errors import UnsupportedModelError

from .attention_interface import begin_forward
from .build_model import architecture
from .pooled_source import PooledSource
from .sentence_transformers_files import DenseModule
from .text_inputs import TextInputs

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
}
"""The activations of Dense modules by name."""

_TRIED = ("cls", "last", "mean")
"""The kinds of pooling that the head of a classifier may have."""

_LENGTHS = (5, 8)
"""Tokens of the random hidden states on which a head is tried."""

_TOLERANCE = 1e-5


class PooledStep(torch.nn.Module):
    """A pooled model as a function of a step's inputs; those that it doesn't read are there for other programs.

    Args:
        model: from ``build_pooled``.
        source: the model's description.
        inputs: the model's inputs besides ids.
    """

    def __init__(self, model: PreTrainedModel, source: PooledSource, inputs: TextInputs) -> None:
        super().__init__()
        self.model_, self.inputs = model, inputs
        # A table of one type is looked up at 0, whatever the types.
        self.several_types = int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self.task, self.poolings = source.task, source.sentence.poolings
        self.answers = source.sentence.answers
        self.parameters_ = frozenset(inspect.signature(layers_of(model, source.task).forward).parameters)
        self.after, self.functions = modules_after(source)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        q_start: torch.Tensor,
        kv_len: torch.Tensor,
        rows: torch.Tensor,
        types: torch.Tensor,
    ) -> torch.Tensor:
        begin_forward(q_start, ids.shape[0])
        # [1, T] each; a mask of ones, for without one transformers tries to find the packing in the positions.
        arguments: dict[str, Any] = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        if self.inputs.first is not None:
            arguments["position_ids"] = (positions + self.inputs.first if self.inputs.first else positions)[None]
        if self.inputs.types:
            arguments["token_type_ids"] = (types if self.several_types else torch.zeros_like(ids))[None]
        if "use_cache" in self.parameters_:
            arguments["use_cache"] = False
        if self.task == "token_classify":
            classes: torch.Tensor = torch.ops.ew.take_rows(self.model_(**arguments).logits[0], rows)
            return classes
        hidden = layers_of(self.model_, self.task)(**arguments).last_hidden_state[0]  # [T, H]
        pooled = [torch.ops.ew.pool(hidden, q_start, kind) for kind in self.poolings]
        vectors = pooled[0] if len(pooled) == 1 else torch.cat(pooled, -1)
        if self.task != "embed":
            result = run_head(self.model_, vectors[:, None])
            return result if self.answers is None else score_of(result[:, 0], self.answers)
        for module, function in zip(self.after, self.functions, strict=True):
            vectors = FUNCTIONS[function](module(vectors))
        return vectors


def modules_after(source: PooledSource) -> tuple[torch.nn.ModuleList, list[str]]:
    """Returns the modules after the pooling, with undefined weights, and the activation of each."""
    modules, functions = torch.nn.ModuleList(), list[str]()
    for one in source.sentence.modules:
        dense = isinstance(one, DenseModule)
        modules.append(torch.nn.Linear(one.inputs, one.outputs, one.bias) if dense else torch.nn.LayerNorm(one.size))
        functions.append(one.activation if dense else "identity")
    return modules.eval().requires_grad_(False), functions


def score_of(logits: torch.Tensor, answers: tuple[int, int | None]) -> torch.Tensor:
    """logits [B, V] -> the logit of the token for yes, less that of the token for no if there is one: [B, 1]."""
    yes, no = answers
    score = logits[:, yes : yes + 1]
    return score if no is None else score - logits[:, no : no + 1]


def layers_of(model: PreTrainedModel, task: str) -> torch.nn.Module:
    """Returns the module that computes hidden states: the whole model unless it has a head that runs later."""
    return model if task in ("embed", "token_classify") else model.base_model


def head_pooling(model: PreTrainedModel) -> str:
    """Returns the kind of pooling with which a classifier's head gives the model's own result.

    The head runs on random hidden states of some tokens, and on their pooled row alone. ``model``'s head gets random
    weights for that, which are undefined before and after.

    Raises UnsupportedModelError if no kind gives the same.
    """
    generator = torch.Generator().manual_seed(0)
    layers = _part_before_head(model)
    for name, parameter in model.named_parameters():
        if not name.startswith(layers):
            parameter.data = torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5
    size = int(model.config.get_text_config().hidden_size)
    texts = [torch.randn(1, length, size, generator=generator) for length in _LENGTHS]
    with torch.no_grad():
        expected = [_last(run_head(model, text)) for text in texts]
        starts = [torch.tensor([0, length]) for length in _LENGTHS]
        for kind in _TRIED:
            pooled = [torch.ops.ew.pool(t[0], s, kind)[:, None] for t, s in zip(texts, starts, strict=True)]
            results = [_last(run_head(model, row)) for row in pooled]
            together = _last(run_head(model, torch.cat(pooled)))
            if all(torch.allclose(a, b, atol=_TOLERANCE) for a, b in zip(results, expected, strict=True)) and (
                torch.allclose(together, torch.cat(expected), atol=_TOLERANCE)
            ):
                return kind
    raise UnsupportedModelError(
        f"{architecture(model.config)}: its head gives another result for a text's pooled vector than for the text",
        hint=f"The head of a classifier may read the pooled row of a text, by {', '.join(_TRIED)}.",
    )


def _last(results: torch.Tensor) -> torch.Tensor:
    """Returns classes [B, C]; of logits for each token [B, S, V] those of the last token."""
    return results[:, -1] if results.dim() == 3 else results


def _part_before_head(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the beginnings of names of parameters that hidden states need: those of layers and embeddings."""
    prefix = model.base_model_prefix
    base = model.base_model
    pooler = getattr(base, "pooler", None)
    return tuple(f"{prefix}.{name}." for name, child in base.named_children() if child is not pooler)


def run_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the classes [B, C] that a classifier computes from hidden states [B, S, H] of its layers."""
    with _replaced_layers(model, hidden):
        ones = torch.ones(hidden.shape[:2], dtype=torch.long)
        logits: torch.Tensor = model(inputs_embeds=hidden, attention_mask=ones).logits
    return logits


@contextmanager
def _replaced_layers(model: PreTrainedModel, hidden: torch.Tensor) -> Iterator[None]:
    """While open, the base model of ``model`` returns ``hidden``, and its own pooler's result for it."""
    base = model.base_model
    pooler = getattr(base, "pooler", None)

    def forward(*_: object, **__: object) -> Any:
        pooled = None if pooler is None else pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)

    config = model.config.get_text_config()
    padding = config.pad_token_id
    config.pad_token_id = 0 if padding is None else padding  # without it, some classes refuse several rows
    replaced = vars(base).get("forward")  # transformers may have given this model another one
    base.forward = forward
    try:
        yield
    finally:
        del base.forward
        if replaced is not None:
            base.forward = replaced
        config.pad_token_id = padding
