"""A request that is to begin in the KV cache."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from enginewright.runtime.requests.request import Request

from .tier import Tier


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request without blocks, and the conditions on which it may begin.

    Attributes:
        request: the request.
        others: the running requests. If one of them is about to compute the request's next block, the request waits.
        promised: cache group -> number of blocks that other requests will take; 0 for a group that isn't listed.
        force: True if all blocks that another tenant keeps may be evicted.
        tier: the tier in which prefixes are looked up; None for the engine's own tier.
        in_flight: those of ``others`` with a step in flight, whose tokens can't be found yet.
    """

    request: Request
    others: Iterable[Request] = ()
    promised: Mapping[str, int] = field(default_factory=dict)
    force: bool = False
    tier: Tier | None = None
    in_flight: Container[Request] = ()
