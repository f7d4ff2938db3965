"""Limits of a step, and the check that a request can run at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from enginewright.runtime.requests.logit_rules import PLAIN
from enginewright.runtime.requests.request import Generation, Request

from ..kv_cache.pool_plan import bytes_for
from ..shared.contracts import CacheGroup, ExecutorCaps
from ..shared.errors import CapacityError, RequestError
from ..shared.memory import format_bytes
from .options import Scheduling


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step, and the options of scheduling.

    Attributes:
        max_requests: maximum number of requests that run at a time.
        prefill_tokens: maximum prefill tokens of a step, over all requests; decodes come in addition.
        prefill_chunk: maximum prefill tokens of one request in a step; None for no separate limit.
        prefix_cache: True if a request begins with its longest cached prefix.
        scheduling: the options of the policy; None for first come, first served.
        states_memory: bytes for snapshots of recurrent states; None for a snapshot of each running request.
        speculate: True computes drafts; None does so if the executor verifies them (``ExecutorCaps``).
        runs_seconds: seconds that the runs of one step may take together, if the executor takes steps with several
            (``ExecutorCaps.most_runs``). A stream gets their tokens together, and a new request may wait that long. 0
            runs each step once.
    """

    max_requests: int = 64
    prefill_tokens: int = 512
    prefill_chunk: int | None = None
    prefix_cache: bool = False
    scheduling: Scheduling | None = None
    speculate: bool | None = False
    states_memory: int | None = None
    runs_seconds: float = 0.0

    def most_running(self, caps: ExecutorCaps) -> int:
        """Returns the most requests that run at a time on an executor with these capabilities."""
        return min(self.max_requests, caps.max_tokens, caps.max_requests)

    def chunk_tokens(self, request: Request, tokens_left: int) -> int:
        """Returns the tokens of a request's next chunk; 0 if the request is computed whole and there is no room for it.

        ``tokens_left``: prompt tokens that the step still has room for.
        """
        if request.whole:
            return request.remaining if request.remaining <= tokens_left else 0
        return min(request.remaining, tokens_left, self.prefill_chunk or tokens_left)


def check_request(
    request: Request,
    caps: ExecutorCaps,
    groups: Sequence[CacheGroup],
    most_running: int,
    most_cached: Callable[[int, int], int],
) -> None:
    """Raises CapacityError or RequestError if a request couldn't run even alone.

    Args:
        request: the request.
        caps: the executor's capabilities.
        groups: the cache groups.
        most_running: most requests that run at a time.
        most_cached: takes a number of tokens and of sequences, and returns the tokens of each sequence that the empty
            KV cache can hold, at most the given number.
    """
    if request.whole:
        if request.prompt_length > caps.max_tokens:
            raise CapacityError(
                f"prompt: it has {request.prompt_length} tokens, and a step, which must compute all of them, has "
                f"{caps.max_tokens} at most",
                hint="Shorten the text.",
            )
        if not groups:
            return  # nothing of it is kept, and it draws no tokens
    params = request.params if isinstance(request, Generation) else PLAIN[0]
    for name in caps.lacks:
        if getattr(params, name) != getattr(PLAIN[0], name):
            raise RequestError(
                f"{name}: this target draws tokens on its own device, and the bundle has no kernel for it",
                hint="Leave it out, or open the bundle with another target; an export with this "
                "version may add the kernel to an older bundle.",
            )
    beams = 1 if request.search is None else request.search.params.num_beams
    if beams > 1 and request.rules is not None and not caps.masks:
        raise RequestError(
            "num_beams: this target has no beam searches with structured_outputs", hint="Use the cpu target."
        )
    if beams > 1 and not caps.shared_blocks:
        raise RequestError("num_beams: this target's caches are of whole requests", hint="Use the cpu target.")
    if beams > most_running:
        raise CapacityError(
            f"num_beams: {beams} sequences, and {most_running} requests run at a time",
            hint="Use fewer beams, or open the model with a larger max_requests.",
        )
    held = most_cached(request.most_cached, beams)
    if held >= request.most_cached:
        return
    need = beams * bytes_for(tuple(groups), request.most_cached)
    if beams > 1:
        raise CapacityError(
            f"num_beams: each of {beams} sequences may need {request.most_cached} tokens in the KV cache, "
            f"which has room for {held} of each",
            hint=f"Use fewer beams, lower max_tokens, or open the model with memory of at least {need} bytes "
            f"({format_bytes(need)}).",
        )
    raise CapacityError(
        f"memory: the request may need {request.most_cached} tokens in the KV cache, which holds {held}",
        hint=f"Open the model with memory of at least {need} bytes ({format_bytes(need)}), or lower max_tokens.",
    )
