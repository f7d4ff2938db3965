"""Helpers that the engine calls between two steps, made to raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from enginewright.runtime.engine.draft_model import DraftModel
from enginewright.runtime.engine.engine import Engine

from .scenario import Trouble


@dataclass(frozen=True)
class Helper:
    """A method that is made to raise.

    Attributes:
        of: gives the object that has it; None where this engine has none.
        name: of the method.
        ends: whether a request may end with an error by it: it was called while blocks or tables changed.
    """

    of: Callable[[Engine], Any]
    name: str
    ends: bool = False


def _draft_model(engine: Engine) -> DraftModel | None:
    return next((one for one in engine.proposers if isinstance(one, DraftModel)), None)


HELPERS = {
    "policy.after_step": Helper(lambda engine: engine.scheduler.policy, "after_step"),
    "policy.begin_step": Helper(lambda engine: engine.scheduler.policy, "begin_step"),
    "policy.comes_first": Helper(lambda engine: engine.scheduler.policy, "comes_first"),
    "policy.prompt_tokens": Helper(lambda engine: engine.scheduler.policy, "prompt_tokens"),
    "policy.most_running": Helper(lambda engine: engine.scheduler.policy, "most_running"),
    "policy.ended": Helper(lambda engine: engine.scheduler.policy, "ended"),
    "times.observe": Helper(lambda engine: engine.scheduler.times, "observe"),
    "times.seconds": Helper(lambda engine: engine.scheduler.times, "seconds"),
    "decodes.took": Helper(lambda engine: engine.scheduler.times.decodes, "took"),
    "decodes.seconds": Helper(lambda engine: engine.scheduler.times.decodes, "seconds"),
    "draft_model.propose": Helper(_draft_model, "propose"),
    "draft_model.behind": Helper(_draft_model, "behind"),
    "draft_model.release": Helper(_draft_model, "release"),
    "disk.computed": Helper(lambda engine: engine.scheduler.cache.tier, "computed"),
    "disk.find": Helper(lambda engine: engine.scheduler.cache.tier, "find", ends=True),
    "disk.read": Helper(lambda engine: engine.scheduler.cache.tier, "read", ends=True),
    "disk.leaving": Helper(lambda engine: engine.scheduler.cache.tier, "leaving", ends=True),
}


class HelperError(RuntimeError):
    """Raised by a helper because the scenario says so."""


def plant(engine: Engine, troubles: Sequence[Trouble], raised: list[str]) -> None:
    """Has helpers of an engine raise; ``raised`` gets their names when they do."""
    for trouble in troubles:
        helper = HELPERS[trouble.helper]
        owner = _unguarded(helper.of(engine))
        if owner is not None:
            setattr(owner, helper.name, _Raising(getattr(owner, helper.name), trouble, raised))


def _unguarded(helper: Any) -> Any:
    """The helper itself, below the wrapper that keeps its errors from the engine."""
    return helper.__dict__["_guarded"][1] if "_guarded" in getattr(helper, "__dict__", {}) else helper


class _Raising:
    def __init__(self, method: Callable[..., Any], trouble: Trouble, raised: list[str]) -> None:
        self._method, self._trouble, self._raised = method, trouble, raised
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, self._calls = self._calls, self._calls + 1
        if call == self._trouble.call or (self._trouble.often and call > self._trouble.call):
            self._raised.append(self._trouble.helper)
            raise HelperError(self._trouble.helper)
        return self._method(*args, **kwargs)
