"""Runs an engine over a bundle for measurements. It can skip the computation of prompts."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from enginewright.plugins.cpu.compile.step_runner import fill_caches
from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.native.step_profile import StepProfile
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.base import Executor, Pending
from enginewright.runtime.executors.open import open_executor, target_groups
from enginewright.runtime.executors.static_shapes import StaticShapes
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.pool_plan import PoolPlan
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.errors import CapacityError

from .options import WARM_UP, BenchPlan, new_tokens

_MOST_TOKENS = 1 << 30


class PromptsAsRead:
    """An executor that computes nothing while ``skipping`` is set; the caches keep their contents.

    So decode steps far into a text can be timed without the minutes of computing its prompt. While skipping, it accepts
    steps of any size, so that all requests are at the same position.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.skipping = False
        self.cache_groups, self.blocks = inner.cache_groups, inner.blocks
        self.caps = replace(inner.caps, max_tokens=_MOST_TOKENS)

    def submit(self, step: StepInput) -> Pending:
        if not self.skipping:
            return self.inner.submit(step)
        done: Future[StepOutput] = Future()
        done.set_result(StepOutput(tokens=np.zeros(len(step.rows), np.int32)))
        return done

    def describe(self) -> dict[str, str | int]:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()


class Server:
    """Engines over one executor.

    Args:
        bundle: an open bundle.
        target: the result of ``choose_target``.
        plan: the sizes that must fit.
        threads, partition: see ``BenchOptions``.
        memory: bytes for the KV cache; None for a quarter of the free memory.
        seed: seed of the prompts, which all differ.

    Raises the errors of ``open_executor``.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: str,
        plan: BenchPlan,
        *,
        threads: int = 0,
        partition: Partition = Partition(),
        memory: int | None = None,
        seed: int = 0,
    ) -> None:
        self.executor = open_executor(
            bundle,
            target,
            _whole_blocks(bundle, target, plan.context),
            Placement(threads=threads, partition=partition),
            SchedulerConfig(max_requests=plan.requests, prefill_tokens=_MOST_TOKENS),
            memory=memory,
            buckets=True,
        )
        self._skips = PromptsAsRead(self.executor)
        self._engine = Engine(self.executor, SchedulerConfig(max_requests=plan.requests))
        self._decoding = Engine(self._skips, SchedulerConfig(max_requests=plan.requests, prefill_tokens=_MOST_TOKENS))
        self._random = np.random.default_rng(seed)
        self._vocabulary = bundle.model.vocab_size
        inner = self.executor.inner if isinstance(self.executor, StaticShapes) else self.executor
        self.cpu = inner if isinstance(inner, CpuExecutor) else None
        if self.cpu is not None:
            fill_caches(self.cpu.program)

    @property
    def cache_bytes(self) -> int:
        """The bytes of all KV blocks."""
        return PoolPlan.from_blocks(self.executor.cache_groups, self.executor.blocks).bytes

    @property
    def reads_prompts(self) -> bool:
        """Returns True if a prompt has to run before its decode steps can be timed."""
        return self.cpu is None

    def profile_into(self, profile: StepProfile | None) -> None:
        """Adds the times of the cpu target's steps to ``profile`` from now on; None stops that."""
        assert self.cpu is not None
        self.cpu.profile = profile

    def prompt(self, tokens: int, steps: int) -> tuple[float, list[float]]:
        """Returns the seconds to one request's first token, and of each of the ``steps`` tokens after it."""
        request = self._request(tokens, steps + 1)
        start = time.perf_counter()
        self._engine.add_request(request)
        while request.output_length == 0:
            self._engine.step()
        first = time.perf_counter() - start
        return first, self._timed(self._engine, steps)

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Returns the seconds of ``steps`` decode steps of ``batch`` requests with ``context`` tokens before them.

        Raises CapacityError if the caches are too small.
        """
        whole = context + new_tokens(steps)
        for group in self.executor.cache_groups:
            if batch * -(-whole // group.block_size) > self.executor.blocks[group.name]:
                raise CapacityError(f"the KV cache has no room for {batch:,} requests of {whole:,} tokens")
        engine = self._engine if self.reads_prompts else self._decoding
        requests = [self._request(context, new_tokens(steps)) for _ in range(batch)]
        try:
            self._skips.skipping = not self.reads_prompts
            for request in requests:
                engine.add_request(request)
            while any(request.output_length == 0 for request in requests):
                engine.step()
            self._skips.skipping = False
            self._timed(engine, WARM_UP)
            return self._timed(engine, steps)
        finally:
            self._skips.skipping = False
            engine.abort_all()

    def close(self) -> None:
        """Closes the engines and the executor."""
        self.executor.close()

    def _request(self, tokens: int, most: int) -> Request:
        ids = self._random.integers(0, self._vocabulary, tokens).tolist()
        return Generation(ids, SamplingParams(max_tokens=most, ignore_eos=True))

    @staticmethod
    def _timed(engine: Engine, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        return times


def _whole_blocks(bundle: Bundle, target: str, context: int) -> int:
    """Returns ``context`` rounded up to whole blocks. If each request has a slot, returns it unchanged."""
    sizes = [g.block_size for g in target_groups(bundle, target, context) if g.block_size < context]
    return max((-(-context // size) * size for size in sizes), default=context)
