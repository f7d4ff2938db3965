"""Opens the tvm target for serving."""

from __future__ import annotations

from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, ServedTarget


def _make(asked: ExecutorArguments) -> Executor:
    from .executor import TvmExecutor

    return TvmExecutor(asked.bundle, asked.blocks, threads=asked.placement.threads, target=asked.target)


TARGET = ServedTarget(Opening(_make, gives_back=True), carries="compiled libraries")
