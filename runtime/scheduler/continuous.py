"""Continuous batching: every step takes all decodes, then chunks of prompts up to a token budget.

``ContinuousScheduler.schedule`` is the list of a step's phases. Each phase is a class with its own state:
``Admission``, ``DecodePhase`` and ``PrefillPhase``, over the ``RequestQueues``. Blocks are allocated as tokens are
added (``kv_cache.cache_manager``). If there are none left, the newest running request is preempted: its blocks are
freed, and it later starts again from its prompt and its tokens so far, or from a cached prefix (Orca, OSDI 2022; vLLM,
SOSP 2023).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from enginewright.runtime.requests.proposers import Proposer
from enginewright.runtime.requests.request import BeamSearch, FailedRequestError, Generation, PromptRequest, Request

from ..kv_cache.block_pool import BlockPool
from ..kv_cache.cache_manager import CacheManager
from ..shared.contracts import NO_TOKEN, CacheGroup, ExecutorCaps, StepInput, StepOutput
from ..shared.counters import Counters
from ..shared.errors import EnginewrightError, shown
from .admission import Admission
from .base import Batch, Chunk, step_input
from .branching import branch, together
from .chaining import Chain, sources_of
from .decode_phase import DecodePhase
from .drafts import drafts_for
from .helpers import helper
from .limits import SchedulerConfig, check_request
from .policy import Policy, RankedPolicy
from .prefill_phase import PrefillPhase
from .request_queues import RequestQueues
from .several_runs import SeveralRuns, until
from .step_inputs import StepInputs
from .step_outputs import logprobs_of, not_finite, scored, top
from .step_times import StepSize, StepTimes
from .waiting import WaitingQueue

T = TypeVar("T")


class ContinuousScheduler:
    """Decides, each step anew, which tokens of which requests run. Not safe for several threads.

    Every waiting request is newer than every running one: requests begin from the front of the queue only, and a
    preempted request, which was the newest running one, returns to the front. So the oldest request always advances,
    and all finish. With ranks the order is by rank instead of age.

    Sequences of a beam search wait for each other, so the oldest request may be unable to advance alone. It gets its
    next token all the same:

    1. A search begins only if there are places for all of its sequences, and blocks of the kinds whose number doesn't
       depend on tokens (states). These stay promised to the search while it runs (``Admission``).
    2. If no request can advance, pending snapshots are cancelled. If that isn't enough, all running requests are
       preempted, and the oldest search begins alone (``PrefillPhase.chunks_of_first_search``).
    3. Then that search has each block or can take it: no other request holds one, pending snapshots are cancelled,
       and kept blocks of every tenant are evicted for the oldest request. ``check`` refuses a search whose sequences
       don't fit together. So all its sequences compute their tokens, and the search goes on.
    4. Preemption takes no token from a request, and each has a limit of tokens. So step 2 comes to an end.

    Policy, step times, drafts and the tier of prefixes are helpers: if one of them raises, its declared fallback
    replaces its result (``helpers``).

    Args:
        config: limits of a step.
        caps: the executor's capabilities.
        groups: the cache groups of the program.
        blocks: cache group -> number of its blocks.
        clock: seconds.
        proposers: sources of drafts, if ``config.speculate`` allows drafts.

    Attributes:
        chunks: the chunks of the last step.
        counters: the counters, which the scheduler passes to its helpers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        caps: ExecutorCaps,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
        proposers: Sequence[Proposer] = (),
    ) -> None:
        if caps.chains and caps.verifies and config.speculate is not False:  # proposers need the tokens of a step
            caps = replace(caps, in_flight=1, chains=False)
        self.config, self.caps, self._clock = config, caps, clock
        self.counters = Counters()
        self.cache = CacheManager(
            groups,
            blocks,
            caps,
            step_tokens=min(config.prefill_tokens, config.prefill_chunk or config.prefill_tokens, caps.max_tokens),
            prefix_cache=config.prefix_cache,
            guard=partial(self._helper, "prefix tier"),
        )
        self.times = self._helper("step times", StepTimes(caps.row_seconds))
        self.policy = self._helper("policy", self._policy())
        drafts = drafts_for(config.speculate, caps, self.times.decodes, proposers, clock, self.counters)
        self.drafts = self._helper("drafts", drafts)
        self.queues = RequestQueues(self.policy, self.cache, self.drafts, self.counters)
        self._admission = Admission(self.queues, config, caps, clock)
        self._chain, self._last_commit = Chain(self.queues), -math.inf
        alternating = 1 if caps.chains else caps.in_flight
        self._decode = DecodePhase(self.queues, alternating)
        self._prefill = PrefillPhase(self.queues, self._admission, config, caps)
        # Of steps that are in flight at a time, each is followed by one of the same requests.
        self._outputs = self.drafts.outputs  # looked up once: the helper's wrapper costs time in every chunk of a step
        self._runs = SeveralRuns(self.queues, config, caps, self._outputs)
        steps = (StepInputs(self.groups, caps.masks, caps.ports, self._outputs) for _ in range(alternating))
        self._inputs = deque(steps)
        self.chunks: tuple[Chunk, ...] = ()

    def _policy(self) -> Policy:
        """Returns the policy for the options of scheduling."""
        most_running = self.config.most_running(self.caps)
        if not self.config.scheduling:
            return Policy(most_running)
        most_prompt = min(self.config.prefill_tokens, self.caps.max_tokens)
        prefix_tokens, counters = self.cache.prefix_tokens, self.counters
        return RankedPolicy(
            self.config.scheduling, self.times, most_running, most_prompt, self._clock, prefix_tokens, counters
        )

    def _helper(self, kind: str, of: T) -> T:
        return helper(kind, of, self.counters)

    @property
    def groups(self) -> dict[str, CacheGroup]:
        """Name of a cache group -> the group."""
        return self.cache.groups

    @property
    def pools(self) -> dict[str, BlockPool]:
        """The block pool of each cache group, by the group's name."""
        return self.cache.pools

    @property
    def running(self) -> list[Request]:
        """The running requests, oldest first."""
        return self.queues.running

    @property
    def waiting(self) -> deque[Request] | WaitingQueue:
        """The waiting requests; the first is the next to run."""
        return self.queues.waiting

    @property
    def preemptions(self) -> int:
        """The number of times that a request was preempted."""
        return self.counters.values.get("num_preemptions", 0)

    def check(self, request: Request) -> None:
        """Raises CapacityError if the request could not even run alone. Safe from any thread."""
        most_running = self.config.most_running(self.caps)
        check_request(request, self.caps, tuple(self.groups.values()), most_running, self.most_cached)

    def most_cached(self, tokens: int, sequences: int = 1) -> int:
        """Returns the tokens that the empty KV cache can hold for each of ``sequences`` sequences, at most ``tokens``.

        It is thread-safe.
        """
        return self.cache.room(tokens, sequences)

    def expected_seconds(self) -> float:
        """Returns the estimated time in seconds of the step that was scheduled last; 0 if unknown.

        It comes from measured steps, or from the plan in the options.
        """
        return self.times.seconds(StepSize.from_chunks(self.chunks)) if self.times.known else 0.0

    def add(self, request: Request) -> None:
        self.check(request)
        self.policy.arrives(request, self.running)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        if request.finished:
            return
        for one in together(request):
            self.queues.remove(one)
            one.abort()

    def abort_all(self) -> None:
        self.cache.drop_copies()
        for request in self.running:  # a step that failed may have written anything
            self.cache.doubt(request)
        self._chain.newest = None
        self.queues.step_over(list(self.queues.in_flight.elements()))
        for request in [*self.running, *self.waiting]:
            self.abort(request)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.queues.leaving)

    # Before a step

    def schedule(self) -> Batch | None:
        """Makes the next step: all decodes with their drafts, then prompts up to a budget of tokens.

        Requests of steps in flight are left out, unless they can go on without the host (``chaining``), and keep their
        blocks. Returns None while all requests that could run are in flight.
        """
        if self._chain.newest is None:  # as in each step of an executor without chains
            return self._schedule({})
        with self._chain.ahead() as rows:
            return self._schedule(rows)

    def _schedule(self, rows: Mapping[Request, int]) -> Batch | None:
        """Makes the next step; ``rows`` is the value of ``Chain.ahead``."""
        scheduled, alone = self._clock(), self._runs_alone()
        self._admission.make_way()
        decodes = self._decode.chunks(alone=alone)
        prefills = self._prefill.chunks(decodes)
        if prefills and not self.caps.ragged:  # steps of decodes and of prompts alternate
            decodes = []
        if not decodes and not prefills:
            if self.queues.in_flight:
                return None
            prefills = self._prefill.chunks_of_first_search()
        self._prefill.decoded_last = bool(decodes)
        self.chunks = (*decodes, *prefills)
        assert self.chunks, "the oldest request can always advance"
        runs = self._runs.count(decodes, prefills)
        step = self._step_input(self.chunks)
        if runs > 1:
            step.runs, step.until = runs, until(decodes)
        step.sources = sources_of(self.chunks, rows) if rows else None
        batch = Batch(self.chunks, step, scheduled, self._clock(), alone)
        if self.caps.in_flight > 1:
            self.queues.in_flight.update(chunk.request for chunk in self.chunks)
            self._chain.newest = batch if self.caps.chains else None
        return batch

    def _runs_alone(self) -> bool:
        """Returns True if no other step is in flight while the next one runs; then the next one may have drafts."""
        return not self.queues.in_flight and (self.caps.in_flight == 1 or len(self.running) == 1)

    def _step_input(self, chunks: Sequence[Chunk]) -> StepInput:
        """Makes the arrays of a step. Raises FailedRequestError for the request whose chunk causes an error."""
        try:
            step = self._inputs[0].build(chunks)
        except Exception:
            for chunk in chunks:
                try:
                    step_input([chunk], self.groups)
                except Exception as e:
                    raise FailedRequestError(chunk.request) from e
            raise
        spans = ((chunk.request, chunk.start + chunk.count, len(chunk.draft)) for chunk in chunks)
        self.cache.store_states(step, spans)
        self.cache.hand_over(step)
        if self.caps.in_flight == 1:  # nothing is written at once, or read from a disk, before it has run
            self.cache.landed(step)
        self._inputs.rotate(-1)
        return step

    def prepare_next(self, batch: Batch) -> None:
        """Allocates the block that each request's next token will need, as long as blocks are free."""
        for chunk in batch.chunks:
            cached = chunk.start + chunk.count + batch.step.runs
            if cached > chunk.request.capacity and chunk.samples and cached <= chunk.request.most_cached:
                with suppress(Exception):  # a step is running: what fails here fails again when the next one is made
                    self.cache.grow(chunk.request, cached)

    # After a step

    def commit(self, batch: Batch, output: StepOutput) -> list[Request]:
        """Passes a step's tokens and rows to its requests. Returns the requests whose callers get new output."""
        self.cache.ran(batch.step)
        tokens = [] if output.tokens is None else output.tokens.tolist()
        if self.queues.leaving:
            self._after_ended(batch, tokens)
        self._step_over(batch)
        if batch.step.runs > 1:
            return self._commit_runs(batch, tokens, output)
        self._observe_step(batch)
        advanced, row = list[Request](), 0
        searches: dict[BeamSearch, None] = {}
        for index, chunk in enumerate(batch.chunks):
            first = row
            row += chunk.rows
            if chunk.request.search is not None:
                searches[chunk.request.search] = None
            if (changed := self._committed(chunk, tokens[first:row], first, output, index)) is not None:
                advanced.append(changed)
        for search in searches:
            if (root := self._branched(search)) is not None:
                advanced.append(root)
        return advanced

    def _commit_runs(self, batch: Batch, runs: Sequence[Sequence[int]], output: StepOutput) -> list[Request]:
        """Commits each run of a step, as ``commit`` does with a step of its own.

        Args:
            batch: the step, in which all requests decode one token.
            runs: the tokens of each run.
            output: the output of the step.
        """
        self._observe_step(batch, len(runs))
        advanced = dict[Request, None]()
        for at in range(len(runs)):
            for row, chunk in enumerate(batch.chunks):
                request = chunk.request
                if request.finished:
                    continue
                of_run = Chunk(request, request.computed, 1) if at else chunk
                drawn = [run[row] for run in runs[at:]]
                if (changed := self._committed(of_run, drawn, row, output, row)) is not None:
                    advanced[changed] = None
        return list(advanced)

    def _committed(
        self, chunk: Chunk, drawn: Sequence[int], first: int, output: StepOutput, index: int
    ) -> Request | None:
        """Calls ``_commit_chunk``, and ends the request with the error if it raises."""
        if chunk.request.finished:
            return None  # aborted while the step ran, or failed with another sequence of its search
        try:
            return self._commit_chunk(chunk, drawn, first, output, index)
        except Exception as e:  # noqa: BLE001  the others go on
            return self.fail(chunk.request, e)

    def _after_ended(self, batch: Batch, tokens: Sequence[int]) -> None:
        """Makes the tokens of requests that ended while the step ran available to other requests, if their keys are
        finite.

        They are finite if the step could draw a next token. The last token of such a request may be among those that
        the step has computed.

        Args:
            batch: the step.
            tokens: the drawn tokens of its rows.
        """
        row = 0
        for chunk in batch.chunks:
            drawn = tokens[row : row + chunk.rows]
            row += chunk.rows
            request, end = chunk.request, chunk.start + chunk.count
            if not drawn or NO_TOKEN in drawn or request not in self.queues.leaving or request.error:
                continue
            if end <= len(request.tokens):
                request.computed = end
                self.cache.after_step(request)
            else:  # it has tokens that nobody will know
                self.cache.trust(request)

    def _step_over(self, batch: Batch) -> None:
        """Frees the blocks that were reserved for a step, after it has run or failed."""
        self._chain.over(batch)
        self.cache.landed(batch.step)
        if self.queues.in_flight:  # not in steps of an executor that has one step at a time
            self.queues.step_over(chunk.request for chunk in batch.chunks)

    def _observe_step(self, batch: Batch, runs: int = 1) -> None:
        """Passes the time of a step to the tier, the drafts and the policy. ``runs``: how often the step ran."""
        tokens, now = len(batch.step.ids), self._clock()
        # A step that follows another one begins when that one ends.
        seconds = now - (max(batch.began, self._last_commit) if self.caps.chains else batch.began)
        self._last_commit = now
        if self.cache.tier is not None:
            self.cache.tier.computed(tokens * runs, seconds)
        if batch.alone:
            self.drafts.after_step(batch, (now - batch.scheduled) / runs)
        for _ in range(runs):
            self.policy.after_step(batch.chunks, tokens, seconds / runs)
        self._runs.took(batch.chunks, seconds / runs)

    def give_up(self, batch: Batch) -> None:
        """Records that a step never ran. The caller ends the step's requests; requests for which the step should have
        copied blocks begin again.
        """
        of_step = {one for chunk in batch.chunks for one in together(chunk.request)}
        self._compute_again(batch, {}, set(), kept=of_step)

    def compute_again(self, batch: Batch, lost: Mapping[str, Collection[int]]) -> None:
        """Makes the requests of a failed step begin again from their remaining blocks.

        Other requests begin again if they have ``lost`` blocks (by cache group), or blocks that the step should have
        copied.
        """
        self._compute_again(batch, lost, {one for chunk in batch.chunks for one in together(chunk.request)}, kept=set())

    def _compute_again(
        self, batch: Batch, blocks_lost: Mapping[str, Collection[int]], again: set[Request], kept: set[Request]
    ) -> None:
        """Makes the requests ``again`` begin again, and all others with lost blocks except ``kept``."""
        self.cache.never_ran(batch.step)
        self._step_over(batch)
        lost = {name: {*blocks} for name, blocks in blocks_lost.items()}
        for name, pairs in batch.step.copies.items():
            lost[name] = lost.get(name, set()) | set(pairs[:, 1].tolist())
        for request in self.running:
            if any(not set(blocks).isdisjoint(request.tables.get(name, ())) for name, blocks in lost.items()):
                again.update(together(request))
        self.queues.preempt([request for request in self.running if request in again and request not in kept])
        for name, blocks in lost.items():
            self.cache.lose(name, blocks)

    def _commit_chunk(
        self, chunk: Chunk, drawn: Sequence[int], first: int, output: StepOutput, index: int
    ) -> Request | None:
        """Gives a request the results of its chunk. Returns the request if its caller gets new output.

        Args:
            chunk: the chunk.
            drawn: the tokens that the step drew at the chunk's rows; empty if it drew none. Those of later runs of the
                step may follow.
            first: the chunk's first row in ``output``.
            output: the output of the step.
            index: the chunk's position in the step.
        """
        request, end = chunk.request, first + chunk.rows
        if chunk.draft and drawn[0] != NO_TOKEN:
            self.drafts.verify(chunk, drawn, output, first)
            if request.computed < chunk.start + chunk.count:
                self.cache.rollback(request, chunk.known, request.computed)
            self.cache.after_step(request, finite=NO_TOKEN not in drawn)
            if request.finished:
                self.queues.remove(request)
            return request
        request.computed = chunk.start + chunk.count
        self.cache.after_step(request, finite=bool(drawn) and NO_TOKEN not in drawn)
        sound = drawn.index(NO_TOKEN) if NO_TOKEN in drawn else chunk.rows
        if chunk.scores and isinstance(request, Generation):
            request.accept_scored(chunk.start, sound, scored(request, output, chunk.start, first, sound))
        if sound < chunk.rows:
            new_token = chunk.samples and sound >= chunk.rows - 1 - len(chunk.draft)
            return self.fail(request, not_finite(request, None if new_token else chunk.start + sound))
        if chunk.samples and isinstance(request, Generation):
            if request.search is not None:
                request.search.take(request, top(output, end - 1, request.search.looked_at))
                return None
            request.accept(drawn[chunk.rows - 1], logprobs_of(request, output, end - 1))
            if self._outputs:
                self.drafts.learn(chunk, 0, output, first)
        elif isinstance(request, PromptRequest):
            request.accept_rows(chunk.start, output, slice(first, end), index)
        if request.finished:
            self.queues.remove(request)
        return request if chunk.samples or request.scores else None

    def _branched(self, search: BeamSearch) -> Request | None:
        """Continues a beam search if all its sequences are ready; returns its root if it has just ended."""
        if not search.ready or search.root.finished:
            return None
        before = list(search.members)
        try:
            if not branch(search, self.cache, self.running):
                self.queues.preempt(search.members)
            for member in before:
                if member not in search.members:
                    self.policy.ended(member)
        except Exception as e:  # noqa: BLE001  the others go on
            return self.fail(search.root, e)
        if not search.finished:
            return None
        for member in search.members:
            self.policy.ended(member)
        return search.root

    def fail(self, request: Request, cause: BaseException) -> Request:
        """Ends a request with an error. For a sequence of a beam search, ends all sequences of the search.

        Returns the request that its client waits for: the first sequence of a search, otherwise ``request``.
        """
        error = cause
        if not isinstance(error, EnginewrightError):
            hint = "Other requests went on. Please report it, with what you passed."
            error = EnginewrightError(f"request: it failed in the engine: {shown(cause, 300)}", hint=hint)
            error.__cause__ = cause
        for one in together(request):
            one.fail(error)
            self.queues.remove(one)
        return together(request)[0]

    def forget(self, tenant: str | None) -> int:
        """Deletes a tenant's data from the KV cache and the proposers, or all data if ``tenant`` is None; returns the
        number of deleted files.
        """
        self.drafts.forget(tenant)
        return self.cache.forget(tenant)
