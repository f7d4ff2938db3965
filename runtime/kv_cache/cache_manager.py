"""The interface of the KV cache for the scheduler: requests begin with known prefixes, grow, branch and end.

It has three parts. A kind of cache decides what the blocks of a group hold, and for how long (``kinds``);
``HeldBlocks`` decides which blocks each request has; ``Prefixes`` decides which of them other requests can find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from enginewright.runtime.requests.block_tables import NO_BLOCK
from enginewright.runtime.requests.request import Request

from ..shared.contracts import KV_BLOCK_SIZE, CacheGroup, ExecutorCaps, StepInput
from ..shared.step_schema import SLOTS, group_port
from .candidate import Candidate
from .held_blocks import HeldBlocks
from .kept_slots import KeptSlots
from .kinds.base import CacheKind, numbers_found_as
from .prefix_index import PrefixIndex
from .prefixes import IndexedPrefixes, Prefixes, PrefixUse
from .tier import Tier

Span = tuple[Request, int, int]
"""A request's tokens in a step: (request, end, drafted).

They are the tokens of the request from the first uncomputed one to index ``end``, exclusive. The last ``drafted`` of
them are a draft.
"""


class CacheManager(HeldBlocks):
    """The KV cache for the scheduler: the blocks that requests hold, and the prefixes that other requests find.

    Args:
        groups, blocks, caps, step_tokens: see ``HeldBlocks``.
        prefix_cache: True if requests may reuse tokens that others have computed, where the executor and the kinds of
            its caches support that.
        guard: wraps the tier, so that it never raises.

    Raises the errors of ``HeldBlocks``.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        caps: ExecutorCaps,
        *,
        step_tokens: int,
        prefix_cache: bool,
        guard: Callable[[Tier], Tier] = lambda tier: tier,
    ) -> None:
        super().__init__(groups, blocks, caps, step_tokens, self._evicted)
        self.prefixes = prefixes_of(self, caps) if prefix_cache else Prefixes(self)
        self._guard = guard
        self._tier: Tier | None = None
        names = list(self.kinds)
        self._states = {names[i]: i for i in numbers_found_as("copies", self.kinds.values())}
        # Only the kinds that override a method are asked: most don't.
        self._after_steps = [k.after_step for k in self.kinds.values() if _has(k, CacheKind.after_step)]
        self._before_drafts = [k.before_drafts for k in self.kinds.values() if _has(k, CacheKind.before_drafts)]
        self._rollbacks = [k.rollback for k in self.kinds.values() if _has(k, CacheKind.rollback)]

    @property
    def index(self) -> PrefixIndex | None:
        """The tree that finds blocks by their tokens; None if the prefix cache doesn't work by blocks."""
        return self.prefixes.index

    @property
    def use(self) -> PrefixUse:
        """The counts of the prefix cache so far."""
        return self.prefixes.use

    @property
    def tier(self) -> Tier | None:
        """The tier to which evicted blocks go, and in which they are found again; None for none."""
        return self._tier

    @tier.setter
    def tier(self, tier: Tier | None) -> None:
        self._tier = None if tier is None else self._guard(tier)

    def begin(self, candidate: Candidate) -> bool:
        """Begins a request with the longest known prefix of its tokens: sets its tables and ``computed``.

        Returns False if the pools have too few blocks for all of its tokens so far. The request then has to wait, and
        has no blocks.
        """
        if candidate.tier is None and self.tier is not None:
            candidate = replace(candidate, tier=self.tier)
        return self.prefixes.begin(candidate)

    def prefix_tokens(self, request: Request) -> int:
        """Returns the length in tokens of the longest prefix of ``request`` that the prefix index has."""
        if self.index is None or request.wants_prompt:
            return 0
        return self.index.find(request.namespace, request.items, len(request.items) - 1).tokens

    def fork(self, source: Request, request: Request, *, force: bool = False) -> bool:
        """Begins a request with everything that another request of the same tokens has computed, for a beam search.

        Args:
            source: the other request.
            request: the request, which has no blocks.
            force: True if all blocks that another tenant keeps may be evicted.

        Returns:
            False if too few blocks are free for those that the two can't share. The request then has no blocks.
        """
        kinds = self.kinds.values()
        while not all(kind.can_fork(source, request, force=force) for kind in kinds):
            if not self.cancel_snapshots():
                return False
        for kind in kinds:
            kind.fork(source, request)
        request.computed = source.computed
        self.set_capacity(request, 0)
        self.prefixes.fork(source, request)
        return True

    def after_step(self, request: Request, *, finite: bool = True) -> None:
        """Makes the tokens that a step has computed available to other requests, and releases blocks that no later step
        needs.

        Args:
            request: a request of the step.
            finite: True if the row of its last token is finite. Then so are all keys on which the row depends.
        """
        if finite:
            self.trust(request)
        else:
            self.doubt(request)
        self.prefixes.after_step(request)
        for after_step in self._after_steps:
            after_step(request)

    def store_states(self, step: StepInput, spans: Iterable[Span]) -> None:
        """Changes a step so that it stores states of recurrent layers, as snapshots for later requests and before
        drafts.

        Args:
            step: the step, which stores no states so far. Its slots are changed in place.
            spans: the tokens of each request of the step, in the step's order.
        """
        if not self._states:
            return
        stored: dict[str, dict[int, int]] = {name: {} for name in self._states}  # token of the step -> slot
        row = 0
        for request, end, drafted in spans:
            first = row - request.computed
            row = first + end
            known = end - drafted
            for tokens, blocks in self.prefixes.snapshots(request, known - (drafted > 0)).items():
                for name, at in self._states.items():
                    stored[name][first + tokens - 1] = blocks[at] * self.groups[name].block_size + tokens - 1
            for name in self._states if drafted else ():
                stored[name][first + known - 1] = request.tables[name][1] * self.groups[name].block_size + known - 1
        if any(stored.values()):
            step.arrays = step.arrays.copy()  # the next step may derive its arrays from these
        for name, slots in stored.items():
            if slots:
                port = group_port(SLOTS, name)
                step.arrays[port] = step.arrays[port].copy()
                step.arrays[port][list(slots)] = list(slots.values())

    @property
    def goes_back(self) -> bool:
        """True if ``rollback`` needs no ``before_drafts``: every cache can remove tokens from its end."""
        return not self._rollbacks

    def before_drafts(self, request: Request) -> bool:
        """Stores what ``rollback`` needs, before a step with a draft.

        Returns False if there are too few free blocks for it.
        """
        return all(before_drafts(request) for before_drafts in self._before_drafts)

    def rollback(self, request: Request, known: int, tokens: int) -> None:
        """Returns a request to its first ``tokens``, after a draft was rejected, and sets ``request.computed``.

        If a cache can't return to ``tokens``, ``computed`` is less, and the rest is computed again.

        Args:
            request: the request.
            known: the tokens before the draft.
            tokens: the tokens up to the last accepted one.
        """
        for rollback in self._rollbacks:
            tokens = rollback(request, known, tokens)
        request.computed = tokens

    def release(self, request: Request, *, partly: bool = True) -> None:
        """Releases all blocks of a request. Others can find its computed tokens until the memory is needed.

        ``partly``: True if tokens in a partly filled last block can be found too.
        """
        self.prefixes.leave(request, partly=partly)
        if request.error is not None and self._clears_blocks:
            self._clear(request)
            self._unverified.discard(request)
        self.take_all(request)
        self._unverified.discard(request)
        self.changes += 1

    def cancel_snapshots(self) -> bool:
        """Frees the blocks of snapshots that requests can't find yet. Returns False if there are none."""
        return self.prefixes.cancel_snapshots()

    def _clear(self, request: Request) -> None:
        """Has the blocks that only this request holds set to zero before their next use, and removes them from the
        prefix cache.
        """
        for i, (name, pool) in enumerate(self.pools.items()):
            held = [block for block in request.tables.get(name, ()) if block != NO_BLOCK]
            sole = [block for block in held if pool.requests(block) == 1]
            for block in sole:
                self.prefixes.discard(i, block)
                pool.drop(block)
            self.clears.setdefault(name, []).extend(sole)

    def forget(self, tenant: str | None) -> int:
        """Removes the prefixes of a tenant, or of all tenants if ``tenant`` is None; returns the number of deleted
        files.
        """
        self.prefixes.forget(tenant)
        return 0 if self.tier is None else self.tier.delete(tenant)

    def lose(self, name: str, blocks: Iterable[int]) -> None:
        """Removes blocks whose contents are lost from the prefix cache.

        Args:
            name: the cache group.
            blocks: the lost blocks, which no request may hold.
        """
        for block in blocks:
            self.prefixes.discard(list(self.groups).index(name), block)
            self.pools[name].drop(block)

    def save_all(self, tier: Tier) -> None:
        """Writes all blocks of the prefix cache to a tier's folder.

        The first blocks of prefixes are written last. So they are the newest, and are deleted last.
        """
        for node in reversed(self.index.nodes() if self.index is not None else []):
            tier.leaving(node, wait=True)

    def statistics(self, running: Sequence[Request]) -> dict[str, Any] | None:
        """Returns the counts of the prefix cache so far, and of each group's blocks by use; None without a cache.

        ``unused_tokens`` of a group: the places in held blocks that have no computed token yet.
        """
        if not self.prefixes.finds:
            return None
        blocks = {}
        for name, pool in self.pools.items():
            kind, kept_blocks = self.kinds[name], pool.kept_blocks
            unused = sum(max(kind.tokens_in(len(r.tables.get(name, ()))) - r.computed, 0) for r in tuple(running))
            blocks[name] = {
                "held": pool.total_blocks - pool.free_blocks,
                "shared": pool.shared_blocks,
                "kept": kept_blocks,
            }
            blocks[name] |= {
                "free": pool.free_blocks - kept_blocks,
                "evictions": pool.evictions,
                "unused_tokens": unused,
            }
        tier = {} if self.tier is None else self.tier.describe()
        return asdict(self.use) | {"blocks": blocks, "disk": None, "host": None} | tier

    def _evicted(self, group: int, block: int) -> None:
        self.prefixes.evicted(group, block, self.tier)


def prefixes_of(held: HeldBlocks, caps: ExecutorCaps) -> Prefixes:
    """Returns the prefix cache for these kinds of cache and this executor; one that finds nothing if they support
    none.
    """
    kinds = held.kinds.values()
    ways = {kind.found_as for kind in kinds}
    if ways == {"slots"}:
        return KeptSlots(held)
    sizes = {kind.size for kind in kinds if kind.found_as == "blocks"} or {KV_BLOCK_SIZE}
    if caps.shared_blocks and ways and "slots" not in ways and len(sizes) == 1:
        return IndexedPrefixes(held, sizes.pop())
    return Prefixes(held)


def _has(kind: CacheKind, default: Callable[..., Any]) -> bool:
    """Returns True if a kind overrides ``default``, a method of the base class."""
    return getattr(type(kind), default.__name__) is not default
