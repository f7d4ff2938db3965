"""The engine: one step after the other. Not safe for several threads; see ``engine_loop``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from ..executors.base import Executor, Pending
from ..kv_cache.block_pool import BlockPool
from ..requests.proposers import Proposer
from ..requests.request import FailedRequestError, Request
from ..scheduler.base import Batch
from ..scheduler.branching import together
from ..scheduler.continuous import ContinuousScheduler
from ..scheduler.limits import SchedulerConfig
from ..shared.errors import CapacityError, OffloadError


class Engine:
    """Requests in, tokens out.

    Args:
        executor: runs the steps.
        config: limits of a step.
        proposers: propose tokens that are computed ahead, where ``config`` says so; closed with the engine.
        clock: seconds. All times that the engine measures are differences of it.
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
        """Cache group -> its blocks."""
        return self.scheduler.pools

    @property
    def preemptions(self) -> int:
        """The number of times that a request had to give its blocks up."""
        return self.scheduler.preemptions

    @property
    def steps_in_flight(self) -> int:
        """Steps that were begun, and whose results aren't taken yet."""
        return len(self._submitted)

    def step(self) -> list[Request]:
        """Begins a step, and ends the oldest of those that were begun, which is the same one but for executors that
        have several in flight. Returns the requests that got tokens or logits, finished ones among them.

        Raises FailedRequestError for an error in the work for some requests, such as those of a step that there is no
        memory for: they are to be failed, and the others go on. Whatever else is raised is an error of all.
        """
        if (batch := self.scheduler.schedule()) is not None:
            try:
                self._submitted.append((batch, self.executor.submit(batch.step)))
            except CapacityError as e:
                self._fail_step(batch, e)
            self.scheduler.prepare_next(batch)
        if batch is not None and len(self._submitted) < self.executor.caps.in_flight:
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
        """Raises FailedRequestError for the requests of a step that there is no memory for."""
        self.scheduler.give_up(batch)
        error = CapacityError(f"the engine failed at a step: {cause.message}", hint=cause.hint)
        error.__cause__ = cause
        raise FailedRequestError(*dict.fromkeys(together(chunk.request)[0] for chunk in batch.chunks)) from error

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises CapacityError if it could never fit."""
        self.scheduler.add(request)

    def fail(self, request: Request, cause: BaseException) -> Request:
        """Ends a request by an error, and releases its blocks; returns the one that its caller waits for."""
        return self.scheduler.fail(request, cause)

    def abort(self, request: Request) -> None:
        """Ends a request and releases its blocks; nothing happens if it has ended."""
        self.scheduler.abort(request)

    def abort_all(self) -> None:
        """Ends every request. Steps that are in flight run to their ends."""
        while self._submitted:
            with suppress(Exception):
                self._submitted.popleft()[1].result()
        self.scheduler.abort_all()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def close(self) -> None:
        """Frees the memory of what runs the steps, and of proposers."""
        self.executor.close()
        for proposer in self.proposers:
            proposer.close()
