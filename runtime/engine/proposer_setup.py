"""The options and the engine parts that a proposer of ``PROPOSERS`` is opened with."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property

from ..bundle.reader import Bundle
from ..executors.target import Placement
from ..requests.proposers import Proposer
from ..scheduler.limits import SchedulerConfig
from ..shared.memory import default_budget


@dataclass(frozen=True)
class ProposerSetup:
    """The settings of a model that is being opened, before its KV cache is allocated.

    Attributes:
        speculate: the argument of ``LLM``: "auto", "lookup", or the path of a draft model's bundle.
        bundle, target, placement: the model, and where it runs.
        context: the most tokens of a request.
        config: the scheduler's limits.
        memory: bytes for KV caches and proposers; None takes the default share of the free memory.
    """

    speculate: str | os.PathLike[str] | None
    bundle: Bundle
    target: str
    placement: Placement
    context: int
    config: SchedulerConfig
    memory: int | None

    @cached_property
    def budget(self) -> int:
        """The bytes for KV caches and proposers: ``memory``, or the default share of the free memory."""
        return default_budget() if self.memory is None else self.memory

    def after(self, proposer: Proposer) -> ProposerSetup:
        """Returns the setup for the next proposer, with the bytes of ``proposer`` subtracted from the memory."""
        return replace(self, memory=self.budget - proposer.bytes) if proposer.bytes else self
