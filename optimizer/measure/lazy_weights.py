"""Loads the weights of a model only while they are used, so that a model can run that is larger than memory.

A module's parameters become properties of its class, and reading a property evaluates its ``WeightExpr``. The value is
cached while the module's own ``forward`` runs, so that a loop over experts reads their tensor once, and freed when
``forward`` returns. Code that reads another module's parameter gets the value too, but it isn't cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from enginewright.passes.ir.weights import WeightExpr

_STATE = "_enginewright_weights"


class _Weights:
    """The expressions of one module's parameters, with a cache of their values that lasts while the module runs."""

    def __init__(self, exprs: Mapping[str, WeightExpr]) -> None:
        self.exprs = exprs
        self._held: dict[str, torch.Tensor] = {}
        self._running = 0

    def get(self, name: str) -> torch.Tensor:
        value = self._held.get(name)
        if value is None:
            value = self.exprs[name].evaluate()
            if self._running:
                self._held[name] = value
        return value

    def enter(self, *_: object) -> None:
        self._running += 1

    def leave(self, *_: object) -> None:
        self._running -= 1
        if not self._running:
            self._held.clear()


def load_weights(model: torch.nn.Module, weights: Mapping[str, WeightExpr]) -> None:
    """Evaluates all weights and stores them in ``model``; tied parameters share one tensor.

    ``weights`` has an expression for every parameter and for every saved buffer, by its name in the model.
    """
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].evaluate()
    _load_buffers(model, weights)


def bring_weights_lazily(model: torch.nn.Module, weights: Mapping[str, WeightExpr]) -> None:
    """Makes each module of ``model`` evaluate its weights whenever it runs. ``weights`` is as for ``load_weights``.

    The parameters themselves become NaN placeholders without memory: code that bypasses the properties computes NaN.
    """
    placeholders: dict[int, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        if not parameters:
            continue
        state = _Weights({name: weights[f"{path}.{name}" if path else name] for name in parameters})
        for name, parameter in parameters.items():
            module._parameters[name] = placeholders.setdefault(id(parameter), placeholder(parameter))
        module.__class__ = _with_properties(type(module), tuple(parameters))
        module.__dict__[_STATE] = state
        module.register_forward_pre_hook(state.enter)
        module.register_forward_hook(state.leave, always_call=True)
    _load_buffers(model, weights)


@contextmanager
def held(module: torch.nn.Module) -> Iterator[None]:
    """Keeps the cached weights of ``module`` until the context ends, instead of freeing them after each ``forward``."""
    state: _Weights | None = module.__dict__.get(_STATE)
    if state is not None:
        state.enter()
    try:
        yield
    finally:
        if state is not None:
            state.leave()


def placeholder(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Returns a float32 parameter of the same shape that is NaN everywhere and takes no memory."""
    return torch.nn.Parameter(torch.tensor(math.nan).expand(parameter.shape), requires_grad=False)


def _with_properties(kind: type[torch.nn.Module], names: tuple[str, ...]) -> type[torch.nn.Module]:
    def reader(name: str) -> property:
        def read(module: Any) -> torch.Tensor:
            state: _Weights = module.__dict__[_STATE]
            try:
                return state.get(name)
            except AttributeError as e:  # Module.__getattr__ would take it for a parameter that isn't a property
                raise RuntimeError(f"weight {name} can't be read") from e

        return property(read)

    members: dict[str, Any] = {name: reader(name) for name in names}
    return type(kind.__name__, (kind,), members | {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _load_buffers(model: torch.nn.Module, weights: Mapping[str, WeightExpr]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in weights.keys() - parameters.keys():
        model.get_buffer(name).copy_(weights[name].evaluate())
