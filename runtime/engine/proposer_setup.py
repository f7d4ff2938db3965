"""The argument with which the rows of ``PROPOSERS`` open a proposer."""

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
    """A model that is being opened, before its own KV cache is.

    Attributes:
        speculate: the argument of ``LLM``: "auto", "lookup", or the path of a draft model's bundle.
        bundle, target, placement: the model, and where it runs.
        context: tokens that a request may have.
        config: limits of a step.
        memory: bytes for KV caches and proposers; None: as many as the machine has to spare (``budget``).
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
        """The bytes of ``memory``."""
        return default_budget() if self.memory is None else self.memory

    def after(self, proposer: Proposer) -> ProposerSetup:
        """Returns the setup for the next proposer: its memory is smaller by the bytes that ``proposer`` takes."""
        return replace(self, memory=self.budget - proposer.bytes) if proposer.bytes else self
