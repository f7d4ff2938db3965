"""Gives a model its weights while they are used: a model that is larger than the memory can run.

A module's parameters become properties of its class. Reading one evaluates its ``WeightExpr``; while the module's own
forward runs the value is held, so that a loop over experts reads their tensor once, and freed when it returns. Code
that reaches for another module's parameter gets it too, and holds it no longer than it needs it.
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
    """One module's parameters as expressions, and the values that its running forward has used."""

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
    """Gives ``model`` all its weights at once; parameters that are tied get one tensor.

    ``weights`` has an expression for every parameter, and for saved buffers.
    """
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].evaluate()
    _load_buffers(model, weights)


def bring_weights_lazily(model: torch.nn.Module, weights: Mapping[str, WeightExpr]) -> None:
    """Makes ``model`` evaluate its weights module by module, each time that it runs; see ``load_weights``.

    The parameters themselves become NaN without memory, so that nothing can continue with a weight that wasn't brought.
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
    """Keeps a module's weights, once they are read, until the context ends and not only while the module runs."""
    state: _Weights | None = module.__dict__.get(_STATE)
    if state is not None:
        state.enter()
    try:
        yield
    finally:
        if state is not None:
            state.leave()


def placeholder(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A float32 parameter of the same shape that is NaN throughout and takes no memory."""
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
