"""Continuous batching: every step takes all decodes, then chunks of prefill up to a token budget.

First come, first served. Blocks are taken as tokens come (``kv_cache.cache_manager``); when they run out, the newest
running request gives its blocks up and starts over later from its prompt and the tokens it has, or from those that can
still be found (Orca, OSDI 2022; vLLM, SOSP 2023).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginewright.plugins.shared.contracts import NO_TOKEN, CacheGroup, ExecutorCaps, StepOutput
from enginewright.plugins.shared.errors import CapacityError, EnginewrightError
from enginewright.runtime.requests.outputs import TokenLogprobs
from enginewright.runtime.requests.request import Request

from ..kv_cache.block_pool import BlockPool
from ..kv_cache.cache_groups import bytes_for, format_bytes
from ..kv_cache.cache_manager import CacheManager
from ..kv_cache.slot_manager import SlotManager
from .base import Batch, Chunk
from .step_inputs import StepInputs


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_requests: most requests that run at a time.
        prefill_tokens: most prefill tokens of a step, over all requests; decodes come on top.
        prefill_chunk: most prefill tokens of one request in a step; None sets no limit of its own.
        prefix_cache: whether a request begins with what others have computed of its tokens.
    """

    max_requests: int = 64
    prefill_tokens: int = 512
    prefill_chunk: int | None = None
    prefix_cache: bool = False


class ContinuousScheduler:
    """See ``scheduler.base.Scheduler``.

    Every waiting request is newer than every running one: the queue is served from its front only, and who is
    preempted was the newest running and goes back to the front. So the oldest request always advances, and all finish.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        caps: ExecutorCaps,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = clock
        self.caps = caps
        manager = SlotManager if caps.kept_slots and config.prefix_cache else CacheManager
        self.cache = manager(
            groups,
            blocks,
            step_tokens=min(config.prefill_tokens, config.prefill_chunk or config.prefill_tokens, caps.max_tokens),
            shared_blocks=caps.shared_blocks,
            prefix_cache=config.prefix_cache,
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0
        self._most_running = min(config.max_requests, caps.max_tokens, caps.max_requests)
        self._inputs = StepInputs(self.groups, self.cache.windows)
        self._decoded_last = False
        self._began = 0.0  # when the last step was scheduled
        self._refused: tuple[Request, int] | None = None  # who had to wait, and ``cache.changes`` then

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
        if (held := self.most_cached(request.most_cached)) < request.most_cached:
            need = bytes_for(tuple(self.groups.values()), request.most_cached)
            raise CapacityError(
                f"memory: the request may need {request.most_cached} tokens in the KV cache, which holds {held}",
                hint=f"Open the model with memory of at least {need} bytes ({format_bytes(need)}), "
                "or lower max_tokens.",
            )

    def most_cached(self, tokens: int) -> int:
        """So many tokens, or what the KV cache can hold of one request if that is fewer. Safe from any thread."""
        held = {name: self.pools[name].total_blocks * group.block_size for name, group in self.groups.items()}
        too_small = [held[name] for name, g in self.groups.items() if self.cache.most_held(g, tokens) > held[name]]
        return min([tokens, *too_small])

    def add(self, request: Request) -> None:
        self.check(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        if request.finished:
            return
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.cache.release(request)
        request.finish("abort")

    def abort_all(self) -> None:
        for request in [*self.running, *self.waiting]:
            self.abort(request)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Batch:
        preemptions = self.preemptions
        decodes = self._decodes()
        tokens_left = min(self.config.prefill_tokens, self.caps.max_tokens - len(decodes))
        prefills: list[Chunk] = []
        if self.caps.ragged or not decodes or self._decoded_last:
            prefills = self._prefills(decodes, tokens_left)
            if preemptions == self.preemptions:
                prefills += self._admitted(tokens_left - sum(c.count for c in prefills))
        if not self.caps.ragged and prefills:  # one phase a step: they alternate
            decodes = []
        self._decoded_last = bool(decodes)
        assert decodes or prefills, "the oldest request can always advance"
        chunks = decodes + prefills
        step = self._inputs.of(chunks)
        step.copies = {name: np.array(pairs, np.int32) for name, pairs in self.cache.copies.items() if pairs}
        step.clears = {name: np.array(blocks, np.int32) for name, blocks in self.cache.clears.items() if blocks}
        self._began = self._clock()
        return Batch(tuple(chunks), step)

    def prepare_next(self, batch: Batch) -> None:
        """Takes the block that each request's next token will need, as long as some are free."""
        for chunk in batch.chunks:
            cached = chunk.start + chunk.count + 1
            if chunk.samples and cached <= chunk.request.most_cached:
                self.cache.grow(chunk.request, cached)

    def commit(self, batch: Batch, output: StepOutput) -> list[Request]:
        self.cache.copies, self.cache.clears = {}, {}
        if self.cache.disk is not None:
            self.cache.disk.computed(len(batch.step.ids), self._clock() - self._began)
        advanced, row = [], 0
        tokens = [] if output.tokens is None else output.tokens.tolist()
        for chunk in batch.chunks:
            request, first = chunk.request, row
            row += chunk.rows
            if request.finished:
                continue  # aborted while the step ran
            request.computed = chunk.start + chunk.count
            self.cache.stepped(request)
            if NO_TOKEN in tokens[first:row]:
                request.fail(_not_finite(request))
            elif request.scores:
                assert output.logits is not None
                request.accept_logits(chunk.start, output.logits[first:row])
            elif chunk.samples:
                request.accept(tokens[first], _logprobs(request, output, first))
            if chunk.rows:
                advanced.append(request)
            self._retire(request)
        return advanced

    def _retire(self, request: Request) -> None:
        if request.finished:
            self.running.remove(request)
            self.cache.release(request)

    def _decodes(self) -> list[Chunk]:
        """One token of every running request that lacks just one; preempts the newest where blocks run out."""
        chunks = []
        for request in self._oldest_first():
            if request.remaining == 1 and self._make_room(request):
                chunks.append(Chunk(request, request.computed, 1))
        return chunks

    def _make_room(self, request: Request) -> bool:
        """Takes a block for the next token if it needs one; False if ``request`` itself had to be preempted."""
        while not self.cache.grow(request, request.computed + 1, force=request is self.running[0]):
            if self._preempt_newest() is request:
                return False
        return True

    def _prefills(self, decodes: Sequence[Chunk], tokens_left: int) -> list[Chunk]:
        """Chunks of running requests that lack more than one token, ``tokens_left`` tokens together at most."""
        if len(decodes) == len(self.running):  # as in most steps
            return []
        decoding = {id(c.request) for c in decodes}
        chunks = []
        for request in self._oldest_first():
            if id(request) in decoding or tokens_left < 1:
                continue
            count = self._chunk_size(request, tokens_left)
            oldest = request is self.running[0]
            while not self.cache.grow(request, request.computed + count, force=oldest):
                newest = self.running[-1]
                if newest is request or id(newest) in decoding:
                    count = self.cache.fitting(request, count, force=oldest)
                else:
                    self._preempt_newest()
            if count:
                chunks.append(Chunk(request, request.computed, count))
                tokens_left -= count
        return chunks

    def _admitted(self, tokens_left: int) -> list[Chunk]:
        """First chunks of waiting requests, as long as there are blocks for all the tokens they have so far."""
        if not self.waiting or (self.running and self._refused == (self.waiting[0], self.cache.changes)):
            return []
        chunks = []
        promised = dict.fromkeys(self.pools, 0)  # blocks that running prefills will still take
        for request in self.running:
            self._promise(request, promised)
        while tokens_left > 0 and self.waiting and len(self.running) < self._most_running:
            request, first = self.waiting[0], not self.running
            if not self.cache.begin(request, self.running, promised, force=first):
                self._refused = request, self.cache.changes
                break
            self.running.append(self.waiting.popleft())
            request.started = request.started or self._clock()
            count = self._chunk_size(request, tokens_left)
            chunks.append(Chunk(request, request.computed, count))
            tokens_left -= count
            grown = self.cache.grow(request, request.computed + count, force=first)
            assert grown, "there are blocks for all of its tokens"
            self._promise(request, promised)
        return chunks

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

    def _preempt_newest(self) -> Request:
        request = self.running.pop()
        self.cache.release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        return request


def _not_finite(request: Request) -> EnginewrightError:
    where = "of its prompt" if request.scores else f"for new token {request.output_length}"
    return EnginewrightError(
        f"request: the model's logits {where} are NaN or infinite",
        hint="Check the bundle with `optimize verify`: its weights are damaged, or numbers overflow in its format. "
        "Other requests went on.",
    )


def _logprobs(request: Request, output: StepOutput, row: int) -> TokenLogprobs | None:
    n = request.params.logprobs
    if n is None:
        return None
    assert output.tokens is not None and output.token_logprobs is not None
    assert output.top_ids is not None and output.top_logprobs is not None
    top = zip(output.top_ids[row, :n].tolist(), output.top_logprobs[row, :n].tolist(), strict=True)
    return TokenLogprobs(int(output.tokens[row]), float(output.token_logprobs[row]), tuple(top))
