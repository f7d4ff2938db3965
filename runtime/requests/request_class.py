"""Classes of requests, with targets for their latencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestClass:
    """A class of requests. Targets are in seconds; None is no target.

    Attributes:
        name: the name by which requests choose the class.
        ttft: the target for the time to the first token.
        tpot: the target for the mean time per further token.
        priority: the priority of requests that have none of their own; lower runs first.
    """

    name: str = ""
    ttft: float | None = None
    tpot: float | None = None
    priority: int = 0


NO_TARGETS = RequestClass()
"""The class of requests that name no class, if no default class is declared."""
