"""The table of helpers: parts that may fail between two steps without ending a request, and the result used instead.

Each row is a kind of helper. It has for each method the result that is used if the method raises, as if the helper knew
nothing. So an error costs an estimate, a draft, a block on disk or a line of a metric, but neither a request nor the
engine. The caller handles the errors of methods that aren't listed. For example, the caller who waits for ``forget``
gets its error, and other methods work for one request, which then ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from enginewright.runtime.requests.proposers import NOTHING, Proposal
from enginewright.runtime.requests.request import Generation, Request

from ..kv_cache.tier import Found
from ..shared.counters import Counters
from ..shared.helpers import Fallbacks, guarded
from .step_times import LEAST_SECONDS

T = TypeVar("T")


def _nothing(*_: Any, **__: Any) -> None:
    """Returns None: the helper notes nothing."""


def _ranked_as_it_came(request: Request, running: Sequence[Request]) -> None:
    """Ranks a request by its priority and arrival, before those of the same priority that arrived later."""
    request.rank = (request.priority, request.queued, 0)


def _no_proposals(wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
    return [NOTHING] * len(wanted)


HELPERS: Mapping[str, Fallbacks] = {
    # First come, first served, with as many requests and prompt tokens as the step has room for.
    "policy": {
        "paused": frozenset(),
        "arrives": _ranked_as_it_came,
        "place": lambda request, running: len(running),
        "ended": _nothing,
        "after_step": _nothing,
        "describe": _nothing,
        "begin_step": lambda running: False,
        "comes_first": lambda running: False,
        "most_running": lambda running: 1 << 30,
        "prompt_tokens": lambda decodes, most: most,
    },
    # No tenant has had anything.
    "shares": {
        "had": lambda tenant: 0.0,
        "joins": _nothing,
        "begins": _nothing,
        "count": _nothing,
        "ends": _nothing,
    },
    # Every step is short, and any number of tokens fits into it: nobody is refused or paused for it.
    "step times": {
        "known": False,
        "row_tokens": 2.0,
        "seconds": lambda size: LEAST_SECONDS,
        "prompt_within": lambda seconds, rows, context: math.inf,
        "rows_within": lambda seconds, context: 1 << 20,
        "observe": _nothing,
        "describe": lambda: {},
    },
    # No drafts.
    "drafts": {
        "begin": lambda running, paused: False,
        "draft": lambda request: (),
        "skip": lambda most: 1,
        "after_step": _nothing,
        "learn": _nothing,
        "release": _nothing,
        "describe": _nothing,
    },
    "proposer": {"propose": _no_proposals, "observe": _nothing, "release": _nothing},
    # It takes for ever, so that nobody waits for it.
    "timed proposer": {
        "off": "it failed",
        "takes": lambda request: False,
        "propose": _no_proposals,
        "observe": _nothing,
        "release": _nothing,
        "seconds": lambda rows: math.inf,
        "behind": lambda request: math.inf,
        "describe": lambda: {},
    },
    # The draft of a guided answer is dropped (``requests.structured``).
    "masks of drafts": {},
    # Nothing is in the tier, and nothing comes into it.
    "prefix tier": {
        "computed": _nothing,
        "leaving": _nothing,
        "find": lambda parent, tokens, size: Found([], 0),
        "read": lambda name, tokens, blocks: False,
        "holds": lambda node: False,
        "part": lambda node, items: 0,
        "read_states": lambda node, blocks: False,
        "used": _nothing,
        "spill": _nothing,
        "describe": lambda: {"disk": {"problem": "it can't say how it is doing"}},
    },
    # The request whose listener fails is aborted (``engine.engine_loop``).
    "listener": {},
    # A request or a response isn't counted.
    "metrics": {"ended": _nothing, "aborted": _nothing, "responded": _nothing},
}
"""A kind of helper -> its fallbacks; see ``shared.helpers``."""

REFUSES = frozenset({"arrives"})
"""Methods of helpers that refuse a request by an EnginewrightError, which is raised instead of a fallback."""


def helper(kind: str, of: T, counters: Counters) -> T:
    """Wraps the helper ``of``, of a kind in ``HELPERS``: an error in it is counted, and a declared fallback replaces
    its result.
    """
    return guarded(kind, of, HELPERS[kind], counters, REFUSES)
