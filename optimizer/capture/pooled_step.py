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
from .gradient_mode import without_gradient_mode
from .pooled_source import PooledSource
from .sentence_transformers_files import DenseModule
from .text_inputs import TextInputs, run_text

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
"""The kinds of pooling with which the head of a classifier is tested, in order."""

_LENGTHS = (5, 8)
"""The numbers of tokens of the random hidden states with which a head is tested."""

_TOLERANCE = 1e-5


class PooledStep(torch.nn.Module):
    """A pooled model as a function of a step's inputs.

    It has the inputs of all programs, and ignores some of them.

    Args:
        model: from ``build_pooled``.
        source: the model's description.
        inputs: the model's inputs besides ids.
    """

    def __init__(self, model: PreTrainedModel, source: PooledSource, inputs: TextInputs) -> None:
        super().__init__()
        self.model_, self.inputs = model, inputs
        # A table of one type is looked up at 0, whatever the types; so is any for a tokenizer that gives none.
        self.several_types = source.gives_types and int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self.task, self.source, self.poolings = source.task, source, source.sentence.poolings
        self.answers = source.sentence.answers
        self.parameters_ = frozenset(inspect.signature(layers_of(model, source).forward).parameters)
        self.after, self.functions = modules_after(source)
        self.head: Head | None = None
        if not self.poolings and self.task != "token_classify":
            self.head = Head(model)
            self.poolings = ("last",) if self.answers is not None else (self.head.pooling(),)

    @without_gradient_mode
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
        hidden = layers_of(self.model_, self.source)(**arguments).last_hidden_state[0]  # [T, H]
        pooled = [torch.ops.ew.pool(hidden, q_start, kind) for kind in self.poolings]
        vectors = pooled[0] if len(pooled) == 1 else torch.cat(pooled, -1)
        if self.head is not None:
            result = self.head(vectors[:, None])
            return result if self.answers is None else score_of(result[:, 0], self.answers)
        for module, function in zip(self.after, self.functions, strict=True):
            vectors = FUNCTIONS[function](module(vectors))
        return vectors


def modules_after(source: PooledSource) -> tuple[torch.nn.ModuleList, list[str]]:
    """Returns the modules after the pooling, with undefined weights, and the activation of each."""
    modules, functions = torch.nn.ModuleList(), list[str]()
    for one in source.sentence.modules:
        if isinstance(one, DenseModule):
            modules.append(torch.nn.Linear(one.inputs, one.outputs, one.bias))
            functions.append(one.activation)
        else:
            modules.append(torch.nn.LayerNorm(one.size, one.epsilon, bias=one.bias))
            functions.append("identity")
    return modules.eval().requires_grad_(False), functions


def score_of(logits: torch.Tensor, answers: tuple[int, int | None]) -> torch.Tensor:
    """Returns the logit of the token for yes, minus that of the token for no: logits [B, V] -> [B, 1].

    ``answers``: the ids of these two tokens; the second is None if the score is the logit for yes alone.
    """
    yes, no = answers
    score = logits[:, yes : yes + 1]
    return score if no is None else score - logits[:, no : no + 1]


def layers_of(model: PreTrainedModel, source: PooledSource) -> torch.nn.Module:
    """Returns the module that computes hidden states: the whole model unless it has a head that runs later."""
    return model if source.sentence.poolings or source.task == "token_classify" else model.base_model


class Head:
    """The head of a model: computes the result from the layers' hidden states, with the model's own code.

    One module is replaced while the model runs: the base model, or the part of it that gives hidden states.

    Args:
        model: from ``build_pooled``.

    Raises UnsupportedModelError if no module gives the hidden states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, base = model, model.base_model
        self._pooler = getattr(base, "pooler", None)
        self._replaced = base if self._pooler is None else self._module_to_replace(base, self._pooler)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the classes [B, C] for hidden states [B, S, H]; logits [B, S, V] of a language model."""
        table: Any = self._model.get_input_embeddings()
        embeds = torch.zeros(*hidden.shape[:2], table.weight.shape[-1])
        ones = torch.ones(hidden.shape[:2], dtype=torch.long)
        with self._hidden_states(hidden):
            logits: torch.Tensor = self._model(inputs_embeds=embeds, attention_mask=ones).logits
        return logits

    def pooling(self) -> str:
        """Returns the kind of pooling with which the head gives the model's own result.

        The head runs on random hidden states of some tokens, and on their pooled row alone. For that, it gets random
        weights; they are undefined before and afterwards.

        Raises UnsupportedModelError if no kind gives the same.
        """
        generator, base = torch.Generator().manual_seed(0), self._model.base_model
        prefix = self._model.base_model_prefix
        layers = tuple(f"{prefix}.{name}." for name, child in base.named_children() if child is not self._pooler)
        for name, parameter in self._model.named_parameters():
            if not name.startswith(layers):
                parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        size = int(self._model.config.get_text_config().hidden_size)
        texts = [torch.randn(1, length, size, generator=generator) for length in _LENGTHS]
        with torch.no_grad():
            expected = torch.cat([self(text) for text in texts])
            for kind in _TRIED:
                rows = [torch.ops.ew.pool(text[0], torch.tensor([0, text.shape[1]]), kind) for text in texts]
                results = torch.cat([*(self(row[:, None]) for row in rows), self(torch.cat(rows)[:, None])])
                if results.shape[1:] == expected.shape[1:] and torch.allclose(
                    results, torch.cat([expected, expected]), atol=_TOLERANCE
                ):
                    return kind
        raise UnsupportedModelError(
            f"{architecture(self._model.config)}: its head gives another result for a text's pooled vector than for "
            "the text",
            hint=f"The head of a classifier may read the pooled row of a text, by {', '.join(_TRIED)}.",
        )

    def _module_to_replace(self, base: torch.nn.Module, pooler: torch.nn.Module) -> torch.nn.Module:
        """Returns the module whose output is replaced by hidden states while the head runs.

        It is the base model if its result comes from a pooler over its hidden states. Otherwise it is the module that
        computes the hidden states.
        """
        calls: dict[torch.nn.Module, tuple[Any, Any]] = {}
        hooks = [
            child.register_forward_hook(lambda module, args, output: calls.setdefault(module, (args, output)) and None)
            for child in base.children()
        ]
        try:
            result = run_text(base, self._model)
        finally:
            for hook in hooks:
                hook.remove()
        hidden = result.last_hidden_state
        args, pooled = calls.get(pooler, ((), None))
        if args and args[0] is hidden and pooled is result.pooler_output:
            return base
        for module, (_, output) in calls.items():
            if output is hidden or (isinstance(output, tuple | dict) and output[0] is hidden):
                return module
        raise UnsupportedModelError(
            f"{architecture(self._model.config)}: no part of {type(base).__name__} gives the hidden states that its "
            "head reads",
            hint="The head of a classifier has to read the hidden states of all layers.",
        )

    @contextmanager
    def _hidden_states(self, hidden: torch.Tensor) -> Iterator[None]:
        """Makes the replaced module return ``hidden`` within the block; a base model also returns its pooler's
        result.
        """
        module, pooler = self._replaced, self._pooler
        whole = module is self._model.base_model

        def forward(*_: object, **__: object) -> Any:
            pooled = pooler(hidden) if whole and pooler is not None else None
            return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)

        config = self._model.config.get_text_config()
        padding = config.pad_token_id
        config.pad_token_id = 0 if padding is None else padding  # without it, some classes refuse several rows
        replaced = vars(module).get("forward")  # transformers may have given this model another one
        module.forward = forward
        try:
            yield
        finally:
            del module.forward
            if replaced is not None:
                module.forward = replaced
            config.pad_token_id = padding
