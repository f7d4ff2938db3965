"""How the cuda target is served."""

from __future__ import annotations

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, Placement, ServedTarget


def _make(asked: ExecutorArguments) -> Executor:
    from .executor import CudaExecutor

    return CudaExecutor(asked.bundle, asked.blocks, asked.context, target=asked.target)


def _memory(bundle: Bundle, target: str, placement: Placement, context: int) -> int:
    from .executor import cuda_budget

    return cuda_budget(bundle, target, context)


TARGET = ServedTarget(Opening(_make, memory_of=_memory, gives_back=True), carries="compiled kernels")
