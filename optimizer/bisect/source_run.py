"""Runs a source with transformers' own forward pass and eager attention, and records values by hooks.

A hook on each module without submodules records its input and output, and a function around the model's own eager
attention records that function's arguments and result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.measure.source_runner import SourceRunner, has_interface
from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.passes.ir.value_name import LOGITS, ValueName, What
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import UnsupportedModelError

from .runs import Role, Tensor
from .values import Recording, Values, batch_axis, from_rows, to_rows

_OF_LEAF: tuple[What, ...] = ("input", "output")
_OF_ATTENTION: tuple[What, ...] = ("query", "key", "value", "context")

_NAME = "enginewright_watched"
"""The attention implementation under which our function is registered in transformers."""


class SourceRun:
    """Runs a source model in transformers, and records the values of its modules. The source itself stays unchanged.

    Args:
        source: a Hugging Face folder, a GGUF file, or a transformers model.
        context_length: tokens; rotary frequencies that depend on the longest position are those of this length.
        texts: True for a model that computes whole texts.
        section: the [pooling] of the recipe of such a model.

    Attributes:
        leaves: paths of the modules without modules of their own.
        model: the transformers model that runs.

    Raises:
        SourceError, UnsupportedModelError: as for an export.
    """

    def __init__(
        self,
        source: Path | PreTrainedModel,
        name: str,
        *,
        context_length: int | None = None,
        texts: bool = False,
        section: PoolingSection | None = None,
    ) -> None:
        self.name, self._texts = name, texts
        if texts and isinstance(source, Path):
            self.model = PooledRunner(source, section, context_length=context_length).model
        else:
            self.model = SourceRunner(source, context_length=context_length).model
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, eager_mask)
        if has_interface(self.model):
            self.model.set_attn_implementation(_NAME)
        self._paths = {id(module): path for path, module in self.model.named_modules()}
        children = {path for path, module in self.model.named_modules() if not any(True for _ in module.children())}
        self.leaves = frozenset(children - {""})

    @property
    def value_names(self) -> Collection[ValueName]:
        """Names the values that transformers' model can record: those of leaves and attentions, and the logits."""
        modules = {ValueName(path, what) for path in self.leaves for what in _OF_LEAF}
        return modules | {ValueName(path, what) for path in self._paths.values() for what in _OF_ATTENTION} | {LOGITS}

    def values(self, sequences: Sequence[torch.Tensor], given: Values | None = None) -> Values:
        """Runs each sequence [S] separately, and returns the values of all; see ``Recording`` for ``given``."""
        recording = Recording(sum(len(s) for s in sequences), given)
        start = 0
        for ids in sequences:
            watch = _Forward(recording, np.arange(start, start + len(ids)), self._paths)
            with _watching(self.model, watch), torch.no_grad():
                if self._texts:  # its result isn't one of each token
                    self.model(input_ids=ids[None].long(), attention_mask=torch.ones_like(ids[None]))
                else:
                    logits = self.model(input_ids=ids[None].long(), use_cache=False).logits
                    recording.see(LOGITS, to_rows(logits[0], 0), watch.tokens)
            start += len(ids)
        return recording.values

    def tensors(self, path: str) -> list[Tensor]:
        """Returns the weights of the module at ``path``, as float32; empty unless it is a linear or an embedding."""
        module = self.model.get_submodule(path)
        weights = []
        for role in _ROLES:
            value = getattr(module, role, None)
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding, Conv1D)) and isinstance(value, torch.Tensor):
                turned = isinstance(module, Conv1D) and role == "weight"

                def read(role: Role = role, turned: bool = turned) -> FloatArray:
                    tensor: torch.Tensor = getattr(module, role).detach().float()
                    rows: FloatArray = (tensor.t() if turned else tensor).numpy()
                    return rows

                weights.append(Tensor(path, role, f"{path}.{role}", (), read))
        return weights


_ROLES: tuple[Role, Role] = ("weight", "bias")


class _Forward:
    """One forward pass of one sequence."""

    def __init__(self, recording: Recording, tokens: np.ndarray, paths: dict[int, str]) -> None:
        self.tokens = tokens
        self._recording = recording
        self._paths = paths
        self._seen: set[ValueName] = set()

    def see(self, module: torch.nn.Module, what: What, value: object, axis: int | None = None) -> torch.Tensor | None:
        """Records a module's value.

        Args:
            module: the module.
            what: the kind of the value.
            value: the value.
            axis: its axis of tokens; None to find it.

        Returns the value that replaces it, in the same shape; None if it isn't replaced.
        """
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        name = ValueName(self._paths[id(module)], what)
        axis = batch_axis(value.shape, len(self.tokens)) if axis is None else axis
        if name in self._seen or axis is None:
            self._recording.drop(name)  # a module that runs twice, or a value that isn't one of each token
            return None
        self._seen.add(name)
        replacement = self._recording.see(name, to_rows(value, axis), self.tokens)
        return None if replacement is None else from_rows(replacement, value, axis)

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        other = self.see(module, "input", args[0]) if args else None
        return None if other is None else (other, *args[1:])

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: object) -> torch.Tensor | None:
        return self.see(module, "output", output)


_WATCH: ContextVar[_Forward] = ContextVar("enginewright_watched_forward")


@contextmanager
def _watching(model: torch.nn.Module, watch: _Forward) -> Iterator[None]:
    handles = []
    for module in model.modules():
        if not any(True for _ in module.children()):
            handles += [module.register_forward_pre_hook(watch.before), module.register_forward_hook(watch.after)]
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)
        for handle in handles:
            handle.remove()


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **others: Any
) -> tuple[torch.Tensor, Any]:
    """Computes the model's own eager attention: query, key, value [1, N, T, D] -> ([1, T, Nq, Dv], weights)."""
    watch = _WATCH.get()

    def see(what: What, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.transpose(1, 2)  # [1, T, N, D]
        other = watch.see(module, what, moved, axis=1)
        return tensor if other is None else other.transpose(1, 2)

    query, key, value = see("query", query), see("key", key), see("value", value)
    context, weights = _eager(module)(module, query, key, value, *args, **others)
    other = watch.see(module, "context", context, axis=1)
    return context if other is None else other, weights


def _eager(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Returns the eager attention function of the file that defines a module's class, or one of its base classes."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{type(module).__name__} has no eager attention that could be watched",
        hint="Compare two bundles, or two sources, of this model instead.",
    )
