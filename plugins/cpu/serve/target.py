"""How the cpu target is served."""

from __future__ import annotations

from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, ServedTarget


def _make(asked: ExecutorArguments) -> Executor:
    from .executor import CpuExecutor

    placement = asked.placement
    return CpuExecutor(
        asked.bundle,
        asked.blocks,
        threads=placement.threads,
        isa=placement.isa,
        load=placement.load,
    )


TARGET = ServedTarget(Opening(_make, gives_back=True, takes=("isa", "load"), exact=True), carries=None)
