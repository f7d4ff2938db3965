"""Copies of blocks in pinned main memory: they are made on a stream of their own while steps compute.

A copy goes through a stage, a piece of the GPU's memory. The steps' stream gathers a block from all layers into a
stage; the copies' stream moves it to main memory. Back it is the other way round. Each stream waits for the other's
events, so the host waits for neither. Blocks are read and written on the steps' stream, in order with the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from enginewright.runtime.kv_cache.block_store import Payload

from .program import CudaProgram

MOST_STAGES, _STAGES_BYTES = 8, 64 << 20
"""Stages that are used in turn, and the most bytes of them; there are at least two."""


class Event(Protocol):
    """The work of a lane up to some time."""

    def synchronize(self) -> None:
        """Waits for the work."""


class Lane(Protocol):
    """A stream: its work is done in order."""

    def run(self, work: Callable[[], object]) -> None:
        """Queues work."""

    def record(self) -> Event:
        """Returns an event of the work so far."""

    def wait(self, event: Event) -> None:
        """Has later work wait for an event."""


@dataclass
class _Stage:
    """Memory for one block on its way.

    Attributes:
        memory: uint8, on the device.
        last: the event after its last use; None before the first.
        lane: the lane of that event.
    """

    memory: Tensor
    last: Event | None = None
    lane: Lane | None = field(default=None, compare=False)


class PinnedCopies:
    """Copies of a program's blocks. It implements the copying of ``kv_cache.host_tier.HostCopies``.

    Args:
        program: the program with its pools.
        memory: cache group -> pinned memory, uint8 [copies, bytes of a block].
        steps: the stream of steps.
        copies: another stream.
    """

    def __init__(self, program: CudaProgram, memory: Mapping[str, Tensor], steps: Lane, copies: Lane) -> None:
        self._program, self._memory, self._steps, self._copies = program, memory, steps, copies
        size = max(one.shape[1] for one in memory.values())
        count = max(2, min(MOST_STAGES, _STAGES_BYTES // size))
        self._stages = [_Stage(torch.empty(size, dtype=torch.uint8, device=program.device)) for _ in range(count)]
        self._saved: dict[tuple[str, int], Event] = {}

    def save(self, group: str, block: int, slot: int) -> None:
        """Copies a block to main memory."""
        stage, to = self._stage_for(self._steps), self._memory[group][slot]
        part = stage.memory[: len(to)]
        self._steps.run(lambda: self._program.read_block(group, block, part))
        self._copies.wait(self._steps.record())
        self._copies.run(lambda: to.copy_(part, non_blocking=True))
        stage.last, stage.lane = self._copies.record(), self._copies
        self._saved[group, slot] = stage.last

    def load(self, group: str, slot: int, block: int) -> None:
        """Copies a block from main memory."""
        stage, source = self._stage_for(self._copies), self._memory[group][slot]
        part = stage.memory[: len(source)]
        self._copies.run(lambda: part.copy_(source, non_blocking=True))
        self._steps.wait(self._copies.record())
        self._steps.run(lambda: self._program.write_block(group, block, part))
        stage.last, stage.lane = self._steps.record(), self._steps

    def read(self, group: str, slot: int) -> Payload:
        """Returns the bytes of a copy, after waiting for it."""
        if (saved := self._saved.pop((group, slot), None)) is not None:
            saved.synchronize()
        return self._memory[group][slot].numpy().copy()

    def _stage_for(self, lane: Lane) -> _Stage:
        """Returns the next stage, once the work of its last use is before that of ``lane``."""
        self._stages.append(stage := self._stages.pop(0))
        if stage.last is not None and stage.lane is not lane:
            lane.wait(stage.last)
        return stage
