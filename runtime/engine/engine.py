"""The engine, which runs one step after the other. It isn't thread-safe; ``engine_loop`` runs it in a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from ..executors.base import Executor, Interruptible, Pending
from ..kv_cache.block_pool import BlockPool
from ..requests.proposers import Proposer
from ..requests.request import FailedRequestError, Request
from ..scheduler.base import Batch
from ..scheduler.branching import together
from ..scheduler.continuous import ContinuousScheduler
from ..scheduler.limits import SchedulerConfig
from ..shared.errors import CapacityError, OffloadError


class Engine:
    """A scheduler and an executor: requests go in, and each step gives some of them tokens.

    Args:
        executor: runs the steps.
        config: the scheduler's limits.
        proposers: propose tokens to verify, if ``config`` allows it; closed with the engine.
        clock: returns seconds; only differences are used.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        proposers: Sequence[Proposer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor, self.proposers = executor, proposers
        groups, blocks = executor.cache_groups, executor.blocks
        self.scheduler = ContinuousScheduler(config, executor.caps, groups, blocks, clock, proposers)
        self._submitted: deque[tuple[Batch, Pending]] = deque()

    @property
    def pools(self) -> dict[str, BlockPool]:
        """The block pool of each cache group, by the group's name."""
        return self.scheduler.pools

    @property
    def preemptions(self) -> int:
        """The number of times that a request was preempted, which frees its blocks."""
        return self.scheduler.preemptions

    @property
    def steps_in_flight(self) -> int:
        """The number of submitted steps whose results haven't been read yet."""
        return len(self._submitted)

    def step(self) -> list[Request]:
        """Submits a step and completes the oldest submitted one; returns the requests that got tokens or logits.

        Finished requests are among them. If the executor has one step in flight, the submitted step is completed at
        once. If it has several, the list is empty until enough steps are in flight.

        Raises:
            FailedRequestError: the work for some requests failed, such as a step without enough memory. The caller must
                end these requests; the others continue.
            Exception: any other error concerns all requests.
        """
        if (batch := self.scheduler.schedule()) is not None:
            try:
                self._submitted.append((batch, self.executor.submit(batch.step)))
            except CapacityError as e:
                self._fail_step(batch, e)
            self.scheduler.prepare_next(batch)
        if batch is not None and len(self._submitted) < self.scheduler.caps.in_flight:
            return []
        first, pending = self._submitted.popleft()
        try:
            output = pending.result()
        except OffloadError as e:
            newest = self.scheduler.running[-1]
            self.scheduler.compute_again(first, e.lost)
            if e.full:
                raise FailedRequestError(newest) from e
            return []
        except CapacityError as e:
            self._fail_step(first, e)
        return self.scheduler.commit(first, output)

    def _fail_step(self, batch: Batch, cause: CapacityError) -> NoReturn:
        """Raises FailedRequestError for all requests of a step, because the step had too little memory."""
        self.scheduler.give_up(batch)
        error = CapacityError(f"the engine failed at a step: {cause.message}", hint=cause.hint)
        error.__cause__ = cause
        raise FailedRequestError(*dict.fromkeys(together(chunk.request)[0] for chunk in batch.chunks)) from error

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises CapacityError if the KV cache could never hold it."""
        self.scheduler.add(request)

    def fail(self, request: Request, cause: BaseException) -> Request:
        """Ends a request with the error ``cause`` and frees its blocks; returns the request that its caller
        waits for.
        """
        return self.scheduler.fail(request, cause)

    def abort(self, request: Request) -> None:
        """Ends a request and frees its blocks; does nothing if it has ended."""
        self.scheduler.abort(request)

    def abort_all(self) -> None:
        """Ends every request, after waiting for the steps in flight."""
        while self._submitted:
            with suppress(Exception):
                self._submitted.popleft()[1].result()
        self.scheduler.abort_all()

    def interrupt(self) -> None:
        """Ends a step with several runs after the current run. It can be called from any thread."""
        if isinstance(self.executor, Interruptible):
            self.executor.interrupt()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def close(self) -> None:
        """Closes the executor and the proposers."""
        self.executor.close()
        for proposer in self.proposers:
            proposer.close()
