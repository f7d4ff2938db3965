"""Classes of requests, with the times that each is promised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestClass:
    """Targets in seconds; None where there is none.

    Attributes:
        name: what requests name.
        ttft: from the request to its first new token.
        tpot: for each further token, on average over the answer so far.
        priority: of requests that bring none of their own; lower goes first.
    """

    name: str = ""
    ttft: float | None = None
    tpot: float | None = None
    priority: int = 0


NO_TARGETS = RequestClass()
"""The class of requests that name none, where none is the default."""
