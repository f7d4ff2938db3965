"""Finds the module of a model that works only for some numbers of tokens, to name it in the error.

torch.export reports that the number of tokens T had to be fixed or bounded, but not by which module. Every assumption
is a guard, so the culprit is the module that was running when the first guard was added that doesn't hold for every T.
Tracing ends there: nothing later changes the verdict, and unrolling recurrences takes half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.overrides import TorchFunctionMode

_TRIED = (2, 3, 5, 7, 13, 64, 100, 129, 1000, 4097, 2**19 + 1)
"""Numbers of tokens with which a guard is tested. All guards of a model that takes any number hold for them."""


class TokenCountError(RuntimeError):
    """Ends the tracing of a model that works for some numbers of tokens only."""


@dataclass
class TokenCountWatch:
    """Watches a trace and notes the module that was running when each guard was added."""

    longest: int
    tokens: sympy.Expr | None = None
    shape_env: Any = None  # a ShapeEnv, whose stubs don't know its guards

    def __post_init__(self) -> None:
        self._running: list[str] = []
        self._events: list[tuple[int, str]] = []  # guards that are older, and the module that runs from then on
        self._checked = 0  # guards
        self._ended = False

    def enter(self, path: str) -> None:
        """Records that the module at ``path`` is about to run."""
        self._running.append(path)
        self._note()

    def leave(self) -> None:
        """Records that the module of the last ``enter`` has run."""
        self._running.pop()
        self._note()

    def culprit(self) -> str | None:
        """Returns the module that fixed T, with its assumption; None if there is none.

        An example is ``layers.0.mixer (modeling_x.py:12 in scan) assumes ...``.
        """
        if self.shape_env is None or self.tokens is None:
            return None
        guards = [(i, g) for i, g in enumerate(self.shape_env.guards) if not self._holds_for_all(g.expr)]
        if not guards:
            return None
        # That T is not one certain number is often only torch's asking whether a tensor is contiguous.
        index, guard = next((f for f in guards if not isinstance(f[1].expr, sympy.Ne)), guards[0])
        path = [running for older, running in self._events if older <= index][-1]
        place = str(guard.sloc).strip("()").rsplit("/", 1)[-1]
        where = f"{path or 'the model'}{f' ({place})' if place.startswith('modeling_') else ''}"
        if isinstance(guard.expr, sympy.Eq) and guard.expr.lhs == self.tokens and guard.expr.rhs.is_Integer:
            return f"{where} fixes the number of tokens in a step"
        assumed = guard.expr.xreplace({self.tokens: sympy.Symbol("T")})
        text = f"{assumed.lhs} == {assumed.rhs}" if isinstance(assumed, sympy.Eq) else str(assumed)
        return f"{where} assumes {text} of the number of tokens T in a step"

    def _note(self) -> None:
        if self.shape_env is not None:
            self._events.append((len(self.shape_env.guards), self._running[-1] if self._running else ""))
        self.check()

    def check(self) -> None:
        """Raises TokenCountError, once, if a guard was added that doesn't hold for every number of tokens."""
        if self.shape_env is not None and len(self.shape_env.guards) > self._checked:
            new = self.shape_env.guards[self._checked :]
            self._checked += len(new)
            if not self._ended and any(
                not isinstance(g.expr, sympy.Ne) and not self._holds_for_all(g.expr) for g in new
            ):
                self._ended = True  # the modules around this one are left by the error itself
                raise TokenCountError(self.culprit())

    def _holds_for_all(self, guard: Any) -> bool:
        """Returns True if a guard isn't an assumption on T, or holds for every number of tokens that is tried."""
        if guard.free_symbols != {self.tokens}:
            return True  # of other sizes, or that two inputs agree in T
        tried = (n for n in (*_TRIED, self.longest) if n <= self.longest)
        return all(guard.xreplace({self.tokens: sympy.Integer(n)}) == sympy.true for n in tried)


class _AfterEachCall(TorchFunctionMode):
    """Checks the guards after each call of a function of torch, because a module may unroll a recurrence without
    submodules.
    """

    def __init__(self, watch: TokenCountWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._watch.check()
        return result


@contextmanager
def watching(model: torch.nn.Module, longest: int) -> Iterator[TokenCountWatch]:
    """Records, within the block, which module of ``model`` runs; its forward must get ``input_ids`` [1, T] by keyword.

    ``longest``: the maximum of T.
    """
    watch = TokenCountWatch(longest)

    def begin(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")  # a head that runs after the layers gets none
        size = None if ids is None else ids.shape[1]
        if isinstance(size, torch.SymInt):
            watch.tokens, watch.shape_env = size.node.expr, size.node.shape_env

    def enter(path: str) -> Any:
        return lambda *_: watch.enter(path)

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path)))
        hooks.append(module.register_forward_hook(lambda *_: watch.leave(), always_call=True))
    try:
        with _AfterEachCall(watch):
            yield watch
    finally:
        for hook in hooks:
            hook.remove()
