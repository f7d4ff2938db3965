"""The runtime's half: what runs the target "toy", and what it needs. Imports neither torch nor the compiler."""

from __future__ import annotations

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.cpu_blocks import CpuExecutor
from enginewright.runtime.executors.open import Asked, Opening, RuntimeTarget
from enginewright.runtime.executors.requirements import check_cpu
from enginewright.runtime.shared.contracts import CacheGroup


def groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    return tuple(group.to_group() for group in bundle.program(target).cache_groups)


def make(asked: Asked) -> Executor:
    return CpuExecutor(asked.bundle, asked.blocks, threads=asked.placement.threads, target=asked.target)


TARGET = RuntimeTarget(check_cpu, Opening(groups, make), carries=None)  # its files are data: no code of a bundle runs
