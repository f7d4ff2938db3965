"""The serving half: what runs the target "toy". Imports neither torch nor the compiler."""

from __future__ import annotations

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, ServedTarget


def make(asked: ExecutorArguments) -> Executor:
    return CpuExecutor(asked.bundle, asked.blocks, asked.placement, target=asked.target)


TARGET = ServedTarget(Opening(make), carries=None)  # its files are data: no code of a bundle runs
