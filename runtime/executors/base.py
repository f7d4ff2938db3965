"""What runs a step, whatever the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from enginewright.plugins.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> StepOutput:
        """Waits for the step, and raises what went wrong in it."""


class Executor(Protocol):
    """A loaded program with its KV cache. Steps run one after the other, in the order of submission.

    A step whose result was never taken is harmless: it writes only to slots that its requests held, and a later step
    that gives them to another request writes them before it reads them.
    """

    @property
    def caps(self) -> ExecutorCaps:
        """What it can do."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of its program."""

    @property
    def blocks(self) -> Mapping[str, int]:
        """Cache group -> blocks that it allocated."""

    def submit(self, step: StepInput) -> Pending:
        """Starts a step. The arrays must not change until the result is there."""

    def describe(self) -> dict[str, str | int]:
        """What runs: instruction set, threads, device. For people."""

    def close(self) -> None:
        """Waits for the running step and frees the cache."""
