"""Continuous batching: every step takes all decodes, then chunks of prefill up to a token budget.

``policy`` decides who is served in which order, ``drafts`` what is computed ahead. Blocks are taken as tokens come
(``kv_cache.cache_manager``); when they run out, the newest running request gives its blocks up and starts over later
from its prompt and the tokens it has, or from those that can still be found (Orca, OSDI 2022; vLLM, SOSP 2023).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from enginewright.runtime.requests.proposers import Proposer
from enginewright.runtime.requests.request import BeamSearch, FailedRequestError, Generation, PromptRequest, Request

from ..kv_cache.block_pool import BlockPool
from ..kv_cache.cache_manager import CacheManager
from ..shared.contracts import NO_TOKEN, CacheGroup, ExecutorCaps, StepInput, StepOutput
from ..shared.errors import EnginewrightError, shown
from ..shared.helpers import HelperErrors
from .base import Batch, Chunk, step_input
from .branching import branch, places, places_taken, together
from .drafts import drafts_for
from .helpers import helper
from .limits import SchedulerConfig, check_request
from .policy import Policy, RankedPolicy
from .step_inputs import StepInputs
from .step_outputs import logprobs_of, not_finite, scored, top
from .step_times import StepSize, StepTimes

T = TypeVar("T")


class ContinuousScheduler:
    """Decides, each step anew, which tokens of which requests run. Not safe for several threads.

    Every waiting request is newer than every running one: the queue is served from its front only, and who is
    preempted was the newest running and goes back to the front. So the oldest request always advances, and all finish.
    With ranks "older" is of a lower rank.

    Policy, times of steps, drafts and disk are helpers: where one of them raises, its declared fallback takes the place
    of its result (``helpers``).

    Attributes:
        chunks: what the last step had.
        helper_errors: the errors of helpers so far.
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
        self.config = config
        self.helper_errors = HelperErrors()
        self._clock = clock
        self.caps = caps
        self.cache = CacheManager(
            groups,
            blocks,
            caps,
            step_tokens=min(config.prefill_tokens, config.prefill_chunk or config.prefill_tokens, caps.max_tokens),
            prefix_cache=config.prefix_cache,
            guard=partial(self._helper, "disk tier"),
        )
        self._most_running = min(config.max_requests, caps.max_tokens, caps.max_requests)
        self.times = self._helper("step times", StepTimes(caps.row_seconds))
        policy = Policy(self._most_running)
        if config.scheduling:
            most, errors = min(config.prefill_tokens, caps.max_tokens), self.helper_errors
            policy = RankedPolicy(config.scheduling, self.times, self._most_running, most, clock, self._found, errors)
        self.policy = self._helper("policy", policy)
        self.waiting = self.policy.waiting
        self.running: list[Request] = []  # oldest first
        drafts = drafts_for(config.speculate, caps, self.times.decodes, proposers, clock, self.helper_errors)
        self.drafts = self._helper("drafts", drafts)
        self.preemptions = 0
        self.chunks: tuple[Chunk, ...] = ()
        # Of steps that are in flight at a time, each is followed by one of the same requests.
        self._inputs = [StepInputs(self.groups, caps.masks, caps.ports) for _ in range(caps.in_flight)]
        self._flying: set[Request] = set()  # whose step was scheduled, and isn't committed
        self._leaving: set[Request] = set()  # of these, who has ended, and keeps the blocks that the step writes to
        self._decoded_last = False
        self._refused: tuple[Request, int] | None = None  # who had to wait, and ``cache.changes`` then

    def _helper(self, kind: str, of: T) -> T:
        return helper(kind, of, self.helper_errors)

    @property
    def groups(self) -> dict[str, CacheGroup]:
        """The cache groups by name."""
        return self.cache.groups

    @property
    def pools(self) -> dict[str, BlockPool]:
        """Cache group -> its blocks."""
        return self.cache.pools

    def check(self, request: Request) -> None:
        """Raises CapacityError if the request could not even run alone. Safe from any thread."""
        check_request(request, self.caps, tuple(self.groups.values()), self._most_running, self.most_cached)

    def most_cached(self, tokens: int, sequences: int = 1) -> int:
        """Returns the number of tokens of each of ``sequences`` that the empty KV cache can hold, ``tokens`` at most.

        It is safe from any thread.
        """
        return self.cache.room(tokens, sequences)

    def expected_seconds(self) -> float:
        """Returns the seconds that the last step should take, from the plan or from similar steps; 0 if unknown."""
        return self.times.seconds(StepSize.from_chunks(self.chunks)) if self.times.known else 0.0

    def add(self, request: Request) -> None:
        self.check(request)
        self.policy.arrives(request, self.running)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        if request.finished:
            return
        for one in together(request):
            self._remove(one)
            one.abort()

    def abort_all(self) -> None:
        self.cache.drop_copies()
        for request in self.running:  # a step that failed may have written anything
            self.cache.doubt(request)
        self._landed(self._flying)
        for request in [*self.running, *self.waiting]:
            self.abort(request)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._leaving)

    def schedule(self) -> Batch | None:
        """Makes the next step: all decodes with their drafts, then prompts up to a budget of tokens.

        Whoever finds no block on the way has the newest running request give way, and so nobody begins in that step.
        Requests of steps that are in flight are left out, and keep what they have; so None is returned while all that
        could run are in flight.
        """
        scheduled, alone = self._clock(), not self._flying and (self.caps.in_flight == 1 or len(self.running) == 1)
        self._make_way()
        preemptions = self.preemptions
        # What decodes: every request that lacks one token. What is proposed comes behind that.
        paused = self.policy.paused
        decodes = self._decodes(paused, ahead=alone and self.drafts.begin(self.running, paused))
        # What of prompts: of a request that goes before those that run, of those that run, then of who waits.
        prefills, tokens_left = list[Chunk](), 0
        if self.waiting or len(decodes) < len(self.running):  # unlike in most steps
            most = min(self.config.prefill_tokens, self.caps.max_tokens - _tokens(decodes))
            tokens_left = self.policy.prompt_tokens(decodes, most)
            if self.caps.ragged and self.policy.comes_first(self.running) and preemptions == self.preemptions:
                prefills = self._admitted(tokens_left)
            if self.caps.ragged or not decodes or self._decoded_last:
                prefills += self._prefills([*decodes, *prefills], tokens_left - _tokens(prefills))
                if preemptions == self.preemptions:
                    prefills += self._admitted(tokens_left - _tokens(prefills))
        if not self.caps.ragged and prefills:  # one phase a step: they alternate
            decodes = []
        if not decodes and not prefills and self._flying:
            return None
        if not decodes and not prefills:  # searches wait for a sequence of theirs, and others keep its room
            self._preempt(list(self.running))  # the others, too: the oldest search, which begins again, fits alone
            self._gather()
            prefills = self._admitted(tokens_left)
        self._decoded_last = bool(decodes)
        assert decodes or prefills, "the oldest request can always advance"
        step = self._step_of(chunks := decodes + prefills)
        self.chunks = tuple(chunks)
        if self.caps.in_flight > 1:
            self._flying.update(chunk.request for chunk in chunks)
            self._inputs.append(self._inputs.pop(0))
        return Batch(self.chunks, step, scheduled, self._clock(), alone)

    def prepare_next(self, batch: Batch) -> None:
        """Takes the block that each request's next token will need, as long as some are free."""
        for chunk in batch.chunks:
            cached = chunk.start + chunk.count + 1
            if cached > chunk.request.capacity and chunk.samples and cached <= chunk.request.most_cached:
                with suppress(Exception):  # a step is running: what fails here fails again when the next one is made
                    self.cache.grow(chunk.request, cached)

    def _step_of(self, chunks: Sequence[Chunk]) -> StepInput:
        try:
            step = self._inputs[0].build(chunks)
        except Exception:
            for chunk in chunks:
                try:
                    step_input([chunk], self.groups)
                except Exception as e:
                    raise FailedRequestError(chunk.request) from e
            raise
        self.cache.hand_over(step)
        if self.caps.in_flight == 1:  # nothing is written at once, or read from a disk, before it has run
            self.cache.landed(step)
        return step

    def commit(self, batch: Batch, output: StepOutput) -> list[Request]:
        count, now = len(batch.step.ids), self._clock()
        self.cache.landed(batch.step)
        self.cache.ran(batch.step)
        self._landed(chunk.request for chunk in batch.chunks)
        if self.cache.disk is not None:
            self.cache.disk.computed(count, now - batch.began)
        if batch.alone:
            self.drafts.after_step(batch, now - batch.scheduled)
        self.policy.after_step(batch.chunks, count, now - batch.began)
        advanced, row, searches = list[Request](), 0, dict[BeamSearch, None]()
        tokens = [] if output.tokens is None else output.tokens.tolist()
        for chunk in batch.chunks:
            request, first = chunk.request, row
            row += chunk.rows
            if request.finished:
                continue  # aborted while the step ran, or failed with another sequence of its search
            try:
                changed = self._commit_chunk(chunk, tokens[first:row], first, batch.step, output)
            except Exception as e:  # noqa: BLE001  the others go on
                changed = self.fail(request, e)
            if changed is not None:
                advanced.append(changed)
            if request.search is not None:
                searches[request.search] = None
        return advanced + [changed for search in searches if (changed := self._branched(search)) is not None]

    def give_up(self, batch: Batch) -> None:
        """Takes note that a step never ran: its requests are to be failed, and others that it was to copy something for
        begin again."""
        of_step = {one for chunk in batch.chunks for one in together(chunk.request)}
        self._compute_again(batch, {}, set(), kept=of_step)

    def compute_again(self, batch: Batch, lost: Mapping[str, Collection[int]]) -> None:
        """Has the requests of a step that failed begin again, and others that hold ``lost`` blocks of a cache group, or
        blocks that the step was to copy something to: with what is left of what they computed."""
        self._compute_again(batch, lost, {one for chunk in batch.chunks for one in together(chunk.request)}, kept=set())

    def _compute_again(
        self, batch: Batch, blocks_lost: Mapping[str, Collection[int]], again: set[Request], kept: set[Request]
    ) -> None:
        """Has ``again`` begin again, and whoever holds blocks that are lost, but those of ``kept``."""
        self.cache.landed(batch.step)
        self.cache.never_ran(batch.step)
        self._landed(chunk.request for chunk in batch.chunks)
        lost = {name: {*blocks} for name, blocks in blocks_lost.items()}
        for name, pairs in batch.step.copies.items():
            lost[name] = lost.get(name, set()) | set(pairs[:, 1].tolist())
        for request in self.running:
            if any(not set(blocks).isdisjoint(request.tables.get(name, ())) for name, blocks in lost.items()):
                again.update(together(request))
        self._preempt([request for request in self.running if request in again and request not in kept])
        for name, blocks in lost.items():
            self.cache.lose(name, blocks)

    def _commit_chunk(
        self, chunk: Chunk, drawn: Sequence[int], first: int, step: StepInput, output: StepOutput
    ) -> Request | None:
        """Gives a request what came of its chunk: tokens ``drawn``, in rows from ``first`` on. Returns it where its
        caller gets something."""
        request, end = chunk.request, first + chunk.rows
        if chunk.draft and drawn[0] != NO_TOKEN:
            self.drafts.verify(chunk, drawn, output, first)
            if request.computed < chunk.start + chunk.count:
                self.cache.rollback(request, chunk.start, request.computed)
            self.cache.after_step(request, finite=NO_TOKEN not in drawn)
            self._retire(request)
            return request
        request.computed = chunk.start + chunk.count
        self.cache.after_step(request, finite=bool(drawn) and NO_TOKEN not in drawn)
        sound = drawn.index(NO_TOKEN) if NO_TOKEN in drawn else chunk.rows
        if chunk.scores and isinstance(request, Generation):
            request.accept_scored(chunk.start, sound, scored(request, output, chunk.start, first, sound))
        if sound < chunk.rows:
            new_token = chunk.samples and sound >= chunk.rows - 1 - len(chunk.draft)
            return self.fail(request, not_finite(request, None if new_token else chunk.start + sound))
        if isinstance(request, PromptRequest):
            request.accept_rows(chunk.start, output, slice(first, end))
        elif chunk.samples and isinstance(request, Generation):
            if request.search is not None:
                request.search.take(request, top(output, end - 1, request.search.looked_at))
                return None
            request.accept(drawn[-1], logprobs_of(request, output, end - 1))
        self._retire(request)
        return request if chunk.samples or request.scores else None

    def _branched(self, search: BeamSearch) -> Request | None:
        """Has a beam search go on, if all its sequences are ready; returns its root if it has ended just now."""
        if not search.ready or search.root.finished:
            return None
        before = list(search.members)
        try:
            if not branch(search, self.cache, self.running):
                self._preempt(search.members)
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
        """Ends a request, or all sequences of its search, by an error; returns the one that its caller waits for."""
        error = cause
        if not isinstance(error, EnginewrightError):
            hint = "Other requests went on. Please report it, with what you passed."
            error = EnginewrightError(f"request: it failed in the engine: {shown(cause, 300)}", hint=hint)
            error.__cause__ = cause
        for one in together(request):
            one.fail(error)
            self._remove(one)
        return together(request)[0]

    def _remove(self, request: Request) -> None:
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self._release(request)
        self.policy.ended(request)

    def _release(self, request: Request) -> None:
        if request in self._flying:  # what the next owner of its blocks reads from the disk would be written over
            self._leaving.add(request)
            self.cache.doubt(request)  # nobody looks at what the step gives
            return
        self.cache.release(request)
        self.drafts.release(request)

    def _landed(self, requests: Iterable[Request]) -> None:
        """The step of these requests has run, or never will."""
        if not self._flying:  # as in every step of an executor that has one step at a time
            return
        landed = set(requests)
        self._flying -= landed
        for request in self._leaving & landed:
            self._release(request)
        self._leaving -= landed

    def forget(self, tenant: str | None) -> int:
        """Forgets a tenant, or all, in the KV cache and in the proposers; returns how many files that were."""
        self.drafts.forget(tenant)
        return self.cache.forget(tenant)

    def _retire(self, request: Request) -> None:
        if request.finished:
            self.running.remove(request)
            self._release(request)
            self.policy.ended(request)

    def _make_way(self) -> None:
        """Has one request give its place up, if it has less priority than the first that waits, which needs that."""
        if self.policy.begin_step(self.running):
            needed = self.cache.lacking(self.waiting[0], len(self.waiting[0].tokens))
            tenant = self.waiting[0].tenant
            full = any(pool.available(tenant) < needed[name] for name, pool in self.pools.items())
            if full or places_taken(self.running) + places(self.waiting[0]) > self._most_running:
                self._preempt(self._newest())

    def _found(self, request: Request) -> int:
        """Returns the number of a request's tokens in the prefix cache."""
        if (index := self.cache.index) is None or request.wants_prompt:
            return 0
        return index.find(request.namespace, request.items, len(request.items) - 1).tokens

    def _decodes(self, paused: Collection[Request], *, ahead: bool) -> list[Chunk]:
        """Takes the last token of every running request that lacks just one, but of those that are ``paused``; with
        drafts if the step looks ``ahead``. Preempts the newest where blocks run out."""
        chunks, preemptions = list[Chunk](), self.preemptions
        most = self._most_decodes()
        for request in self._oldest_first():
            if (paused and request in paused) or (self._flying and self._flies(request)):
                continue
            if len(chunks) >= most and (request.search is None or chunks[-1].request.search is not request.search):
                break
            try:
                if request.remaining == 1 and (request.capacity > request.computed or self._make_room(request)):
                    chunks.append(self._drafted(request) if ahead else Chunk(request, request.computed, 1))
            except Exception as e:
                raise FailedRequestError(request) from e
        return chunks if preemptions == self.preemptions else self._still_running(chunks)

    def _most_decodes(self) -> int:
        """Returns the share of the running requests that one step takes: the other steps in flight take theirs."""
        return -(-len(self.running) // self.caps.in_flight)

    def _flies(self, request: Request) -> bool:
        """Returns True if a step in flight has the request, or another sequence of its search."""
        return any(one in self._flying for one in together(request))

    def _drafted(self, request: Request) -> Chunk:
        """Takes its last token, and a draft behind it if there are blocks for that."""
        draft = self.drafts.draft(request)
        most = request.computed + 1 + len(draft)
        if draft and not (self.cache.grow(request, most) and self.cache.before_drafts(request)):
            draft = ()
        return Chunk(request, request.computed, 1 + len(draft), draft)

    def _make_room(self, request: Request) -> bool:
        """Takes a block for the next token if it needs one; False if ``request`` itself had to be preempted."""
        while not self.cache.grow(request, request.computed + 1, force=self._is_first(request)):
            newest = self._newest()
            if not newest:
                return False
            self._preempt(newest)
            if request in newest:
                return False
        return True

    def _still_running(self, chunks: list[Chunk]) -> list[Chunk]:
        """Without those of requests that were preempted, as the older sequences of a beam search may be."""
        running = set(self.running)
        return [chunk for chunk in chunks if chunk.request in running]

    def _is_first(self, request: Request) -> bool:
        """Returns True for the oldest running request, or a sequence of it."""
        first = self.running[0]
        return request is first or (request.search is not None and request.search is first.search)

    def _prefills(self, decodes: Sequence[Chunk], tokens_left: int) -> list[Chunk]:
        """Returns chunks of running requests that lack more than one token: at most ``tokens_left`` tokens in all.

        A request that lacks one token and isn't in ``decodes`` pauses, or is left to another step in flight.
        """
        if len(decodes) == len(self.running):
            return []
        decoding = {id(c.request) for c in decodes}
        chunks, preemptions = [], self.preemptions
        for request in self._oldest_first():
            if id(request) in decoding or tokens_left < 1 or request.remaining == 1:
                continue
            if self._flying and self._flies(request):
                continue
            try:
                count = self._fitted(request, self._chunk_size(request, tokens_left), decoding)
            except Exception as e:
                raise FailedRequestError(request) from e
            if count:
                chunks.append(Chunk(request, request.computed, count))
                tokens_left -= count
        return chunks if preemptions == self.preemptions else self._still_running(chunks)

    def _fitted(self, request: Request, count: int, decoding: Collection[int]) -> int:
        """Returns how many of the next ``count`` tokens have room, without preempting requests of ``decoding``."""
        oldest = self._is_first(request)
        while not self.cache.grow(request, request.computed + count, force=oldest):
            newest = self._newest()
            if not newest or any(one is request or id(one) in decoding for one in newest):
                count = self.cache.fitting(request, count, force=oldest)
            else:
                self._preempt(newest)
        return count

    def _admitted(self, tokens_left: int) -> list[Chunk]:
        """First chunks of waiting requests, as long as there are blocks for all the tokens they have so far."""
        if not self.waiting or (self.running and self._refused == (self.waiting[0], self.cache.changes)):
            return []
        chunks = []
        promised = dict.fromkeys(self.pools, 0)  # blocks that running prefills will still take
        for request in self.running:
            self._promise(request, promised)
        while tokens_left > 0 and self.waiting:
            request, occupied = self.waiting[0], places_taken(self.running)
            # The policy may leave a search waiting, but never a part of it: its sequences wait for each other.
            begun = request.search is not None and any(one in self.running for one in request.search.members)
            most = self._most_running if begun else self.policy.most_running(self.running)
            if occupied + places(request) > self._most_running or occupied >= most:
                break
            try:
                chunk = self._begun(request, tokens_left, promised)
            except Exception as e:
                raise FailedRequestError(request) from e
            if chunk is None:
                self._refused = request, self.cache.changes
                break
            chunks.append(chunk)
            tokens_left -= chunk.count
            self._promise(request, promised)
        return chunks

    def _begun(self, request: Request, tokens_left: int, promised: Mapping[str, int]) -> Chunk | None:
        """The first chunk of the first waiting request, which runs then; None if there are no blocks for it."""
        first = not self.running or self._is_first(request)
        if not self.cache.begin(request, self.running, promised, force=first):
            return None
        self.running.insert(self.policy.place(request, self.running), self.waiting.popleft())
        request.started = request.started or self._clock()
        count = self._chunk_size(request, tokens_left)
        chunk = Chunk(request, request.computed, count)
        grown = self.cache.grow(request, request.computed + count, force=first)
        assert grown or self.caps.owners > 1, "there are blocks for all of its tokens"
        if not grown:  # what came from a disk lies so that no owner has the rest of a split
            self._preempt([request])
            return None
        return chunk

    def _promise(self, request: Request, promised: dict[str, int]) -> None:
        """Counts the blocks that a request will take until it has computed the tokens that it has so far."""
        for name, needed in self.cache.lacking(request, len(request.tokens)).items():
            promised[name] += needed

    def _oldest_first(self) -> Iterator[Request]:
        """The running requests; those that are preempted meanwhile are at the end, and don't come any more."""
        i = 0
        while i < len(self.running):
            yield self.running[i]
            i += 1

    def _chunk_size(self, request: Request, tokens_left: int) -> int:
        return min(request.remaining, tokens_left, self.config.prefill_chunk or tokens_left)

    def _newest(self) -> list[Request]:
        """The newest running request, or all running sequences of its beam search; none if all are in flight."""
        newest = next((r for r in reversed(self.running) if not (self._flying and self._flies(r))), None)
        if newest is None:
            return []
        return [newest] if newest.search is None else [r for r in self.running if r.search is newest.search]

    def _gather(self) -> None:
        """Moves all sequences of the first search that waits to the front: they begin before other searches do."""
        if self.waiting:
            first = [one for one in together(self.waiting[0]) if one in self.waiting]
            for request in reversed(first):
                self.waiting.remove(request)
                self.waiting.appendleft(request)

    def _preempt(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        for request in reversed(requests):
            self.running.remove(request)
            self._release(request)
            self.waiting.appendleft(request)
            if request.search is not None:
                request.search.forget()
        self.preemptions += 1


def _tokens(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.count for chunk in chunks)
