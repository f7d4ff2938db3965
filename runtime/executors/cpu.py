"""The cpu target: our C++ interpreter of the lowered program."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from enginewright.plugins.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.plugins.cpu.executable import CpuProgram

from ..bundle.reader import Bundle


class CpuExecutor:
    """See ``executors.base.Executor``. A step runs on a thread of its own, with the interpreter lock released.

    Args:
        bundle: with a ready target cpu.
        blocks: cache group -> blocks to allocate.
        threads: of the kernels; 0 takes as many as there are cores.
        isa: instruction set ("avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable"); None takes the
            best there is.
    """

    def __init__(self, bundle: Bundle, blocks: Mapping[str, int], *, threads: int = 0, isa: str | None = None) -> None:
        program = bundle.program("cpu")
        weights = {use.name: bundle.weight(use.name) for use in program.weights}
        self.blocks = dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = tuple(g.to_group() for g in program.cache_groups)
        self.caps = ExecutorCaps()
        self._program = CpuProgram(program, weights, blocks=self.blocks, threads=threads, isa=isa)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enginewright-cpu")

    def submit(self, step: StepInput) -> Future[StepOutput]:
        return self._thread.submit(self._program.run, step)

    def describe(self) -> dict[str, str | int]:
        return {"target": "cpu", "isa": self._program.isa, "threads": self._program.threads}

    def close(self) -> None:
        self._thread.shutdown()
