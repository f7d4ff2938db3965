"""An executor that runs ``model`` over blocks that it owns. It takes what any executor takes, and believes nothing.

A step in flight runs when the scenario says so: at its submission, at the next one's, or when its result is asked for.
Whatever is wrong with a step is a ``ViolationError``: arrays that disagree with each other, a block that two requests
write or that one writes and another reads, a step that was changed after its submission.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import (
    NO_TOKEN,
    STATE,
    CacheGroup,
    ExecutorCaps,
    Int32Array,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from enginewright.runtime.shared.errors import EnginewrightError, OffloadError
from enginewright.runtime.shared.step_schema import IDS, layers_of
from tests.host_copies import CopiesInMemory
from tests.several_runs import run_several

from .model import (
    ALL,
    POISON,
    VOCAB,
    WEIGHT_ARRAY,
    Cells,
    Distribution,
    Draw,
    Model,
    first_cells,
    mix,
    mix_cells,
    next_state,
    tokens_of,
)

_NAN = np.uint64(2**64 - 1)
"""The second cell of a place that is NaN, where a block leaves the executor's memory."""


class ViolationError(AssertionError):
    """An invariant that does not hold."""


class RankDiedError(EnginewrightError):
    """A process that runs a part of the model is gone, and with it the memory of all blocks."""


class Clock:
    """Seconds that pass only when something is simulated to take them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def check(holds: bool | np.bool_, message: str) -> None:
    """Raises ViolationError if an invariant does not hold."""
    if not holds:
        raise ViolationError(message)


class Submitted:
    """A step that was submitted to ``SimulatedExecutor``.

    Attributes:
        requests: what tells the step's requests from those of other steps; set by ``SimulatedExecutor.submitting``.
    """

    requests: Sequence[object] = ()

    def __init__(self, executor: SimulatedExecutor, step: StepInput, number: int) -> None:
        self._executor, self.step, self.number = executor, step, number
        self.output: StepOutput | None = None
        self.error: Exception | None = None
        self.ran = self.taken = False
        self.digest = 0
        self.counts = np.diff(step.q_start)  # [B]
        self.owner = np.repeat(np.arange(len(step.kv_len)), self.counts)  # [T]

    def result(self) -> StepOutput:
        """Runs the steps up to this one and returns its output, or raises its fault."""
        self.taken = True
        self._executor.run_until(self)
        if self.error is not None:
            self._executor.faulted.append(self._executor.fault_of(self.number))
            raise self.error
        assert self.output is not None
        return self.output


class SimulatedExecutor(CopiesInMemory):
    """An ``executors.base.Executor`` that computes a made-up model; the module describes it.

    Its blocks can be read and written, as ``BlockMemory`` defines it.

    Args:
        model: the model whose tokens it computes.
        groups, blocks: cache groups and the blocks of each.
        caps: its abilities.
        clock: advanced by the seconds of each step.
        seconds: rows that decode, tokens of prompts, tokens that both see -> seconds of such a step.
        waits: a step's number -> True if the step runs as late as possible.
        faults: a step's number -> its fault: "error", "dies", "lost" (an ``OffloadError`` after which blocks are gone)
            or "full" (one because nothing can be written).
        padding: cache group -> the first block that no request gets.

    Attributes:
        steps: number of steps submitted.
        states_that_go_on: number of states that another step left, and a request went on from.
        snapshots: number of states that steps stored besides those after their last tokens.
        overlapped: number of those submitted while another was in flight.
        placed: number of tokens that a step took from the one before it.
        runs_again: number of runs of a step after its first.
        submitting: called with each step before it is taken.
        faulted: the faults that were raised, in order.
        dead: True after the fault "dies".
    """

    cache_identity = b"simulated"

    def __init__(
        self,
        model: Model,
        groups: Sequence[CacheGroup],
        blocks: Mapping[str, int],
        caps: ExecutorCaps,
        clock: Clock,
        seconds: Callable[[int, int, int], float],
        *,
        waits: Callable[[int], bool] = lambda number: False,
        faults: Mapping[int, str] | None = None,
        padding: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.caps, self.clock = model, caps, clock
        self.cache_groups, self.blocks = tuple(groups), dict(blocks)
        self._seconds, self._waits, self._faults = seconds, waits, dict(faults or {})
        self._padding = dict(padding or {})
        self.steps = self.overlapped = self.placed = self.runs_again = 0
        self.states_that_go_on = self.snapshots = 0
        self.submitting: Callable[[Submitted], None] = lambda step: None
        self.faulted: list[str] = []
        self.dead = False
        self._flying: list[Submitted] = []
        self._drawn = np.zeros(0, np.int32)  # the tokens of the last step that ran
        self._poisoned = False
        # [2, P * K] for each group: first and second cells; of states [2, P]: the state, and how many tokens it is of.
        # Memory that nobody has written has any contents.
        places = {g.name: blocks[g.name] * (1 if g.kind == STATE else g.block_size) for g in groups}
        self._cells = {name: mix_cells(np.arange(2 * n, dtype=np.uint64)).reshape(2, -1) for name, n in places.items()}
        self._bad = {name: np.zeros(n, np.bool_) for name, n in places.items()}

    # What the engine calls

    def submit(self, step: StepInput) -> Submitted:
        """Takes a step; it runs when its result is needed, or earlier."""
        number, self.steps = self.steps, self.steps + 1
        if self.dead:
            raise RankDiedError("rank 1 has died", hint="Open the bundle again.")
        pending = Submitted(self, step, number)
        self.submitting(pending)
        self._check(pending)
        self._flying = [one for one in self._flying if not one.taken]
        self.overlapped += bool(self._flying)
        check(len(self._flying) < self.caps.in_flight, "more steps in flight than the executor takes")
        self._check_beside(pending)
        self._check_sources(pending)
        self._flying.append(pending)
        if self._waits(number):
            pending.digest = _digest(step)
        else:
            self.run_until(pending)
        return pending

    def run_until(self, last: Submitted) -> None:
        """Runs the steps that were submitted up to one, in order."""
        for before, pending in zip((None, *self._flying), self._flying, strict=False):
            if not pending.ran:
                if pending.digest:
                    check(pending.digest == _digest(pending.step), "a step was changed after its submission")
                pending.ran = True
                try:
                    if before is not None and before.error is not None and _share(before, pending):
                        raise RuntimeError("the step that it goes on from failed") from before.error
                    pending.output = self._run(pending) if pending.step.runs == 1 else self._run_several(pending)
                except (RuntimeError, EnginewrightError) as e:
                    pending.error = e
            if pending is last:
                break

    def describe(self) -> dict[str, str | int]:
        return {"target": "simulated"}

    def close(self) -> None:
        self._flying.clear()

    def read_block(self, group: str, block: int) -> npt.NDArray[np.uint8]:
        """Copies the bytes of a block."""
        size = self._size(group)
        cells = self._cells[group][:, block * size : (block + 1) * size].copy()
        cells[1, self._bad[group][block * size : (block + 1) * size]] = _NAN
        return cells.reshape(-1).view(np.uint8)

    def write_block(self, group: str, block: int, payload: npt.NDArray[np.uint8]) -> None:
        """Overwrites a block, which no step in flight may write to."""
        size = self._size(group)
        check(not self._is_written(group, block), "a block is written while a step in flight writes to it")
        cells = payload.view(np.uint64).reshape(2, size)
        self._cells[group][:, block * size : (block + 1) * size] = cells
        self._bad[group][block * size : (block + 1) * size] = cells[1] == _NAN
        self._poisoned |= bool((cells[1] == _NAN).any())

    # A step

    def _size(self, group: str) -> int:
        return len(self._bad[group]) // self.blocks[group]

    def _is_written(self, group: str, block: int) -> bool:
        size = next(g.block_size for g in self.cache_groups if g.name == group)
        return any(bool((one.step.slots[group] // size == block).any()) for one in self._flying if not one.ran)

    def _run_several(self, pending: Submitted) -> StepOutput:
        """Runs a step as often as it says, or fewer times; tokens that end requests end it at times."""
        step, chance = pending.step, mix(pending.number * 53 + 7)

        def once(run: StepInput) -> StepOutput:
            one = Submitted(self, run, pending.number)
            self._check(one)
            return self._run(one)

        check(step.runs <= self.caps.most_runs and bool((pending.counts == 1).all()), "runs of other steps")
        most = 8 if chance % 4 else 1 + chance // 4 % 8
        output = run_several(step, self.cache_groups, once, most=most, heedless=chance // 32 % 2 == 0)
        assert output.tokens is not None
        self.runs_again += len(output.tokens) - 1
        return output

    def _run(self, pending: Submitted) -> StepOutput:
        step, number, owner = self._placed(pending.step), pending.number, pending.owner
        decodes = pending.counts.tolist().count(1)
        self.clock.now += self._seconds(decodes, len(step.ids) - decodes, sum(step.kv_len.tolist()))
        if self.dead or number in self._faults:
            self._drawn = np.zeros(len(step.rows), np.int32)
            self._fail(step, number, self.fault_of(number))
        self._move_blocks(step)
        sums = [
            self._go_on(g, i, step) if g.kind == STATE else self._write(g, i, step, owner)
            for i, g in enumerate(self.cache_groups)
        ]
        bad = self._spread(step, owner) if self._poisoned or POISON in step.ids else None
        values = [self.model.value(one) for one in zip(*(each.tolist() for each in sums), strict=True)]  # of the rows
        output = self._sampled(step, values, bad)
        self._drawn = np.zeros(0, np.int32) if output.tokens is None else output.tokens
        return output

    def _placed(self, step: StepInput) -> StepInput:
        """Gives the step with the tokens that the step before has drawn in the place of the host's."""
        if step.sources is None:
            return step
        follows = step.sources >= 0
        self.placed += int(follows.sum())
        ids = step.ids.copy()
        ids[follows] = self._drawn[step.sources[follows]].clip(0)
        arrays = step.arrays | {IDS: ids}
        return StepInput(arrays, sampling=step.sampling, outputs=step.outputs, clears=step.clears, copies=step.copies)

    def fault_of(self, number: int) -> str:
        """The fault of a step that fails."""
        return self._faults.get(number, "dies")

    def _fail(self, step: StepInput, number: int, fault: str) -> None:
        """Raises the step's fault. What it would have written is then anything."""
        for group in self.cache_groups:
            slots = step.slots[group.name]
            if group.kind == STATE:
                slots = np.concatenate((step.block_tables[group.name][:, 0], slots[slots >= 0] // group.block_size))
            self._cells[group.name][:, slots] = mix_cells(slots.astype(np.uint64) + np.uint64(number))
        if fault == "dies":
            self.dead = True
            raise RankDiedError("rank 1 has died", hint="Open the bundle again.")
        if fault == "error":
            raise RuntimeError("the step failed")
        lost: dict[str, list[int]] = {}
        if fault == "lost":
            for group in self.cache_groups:
                held = [b for b in np.unique(step.block_tables[group.name]).tolist() if b >= 0]
                lost[group.name] = [b for b in held if mix(b * 31 + number) % 3 == 0]
                for block in lost[group.name]:
                    at = block * group.block_size
                    self._cells[group.name][:, at : at + group.block_size] += np.uint64(number + 1)
        for name, pairs in step.copies.items():  # nothing counts as copied
            lost.setdefault(name, []).extend(pairs[:, 1].tolist())
        raise OffloadError("offload_folder: a block", lost, full=fault == "full")

    def _move_blocks(self, step: StepInput) -> None:
        """Clears blocks, then copies others."""
        for name, blocks in step.clears.items():
            size = self._size(name)
            self._cells[name].reshape(2, -1, size)[:, blocks] = 0
            self._bad[name].reshape(-1, size)[blocks] = False
        for name, pairs in step.copies.items():
            size = self._size(name)
            cells, bad = self._cells[name].reshape(2, -1, size), self._bad[name].reshape(-1, size)
            for source, to in pairs.tolist():
                cells[:, to], bad[to] = cells[:, source], bad[source]

    def _write(self, group: CacheGroup, index: int, step: StepInput, owner: npt.NDArray[np.intp]) -> Any:
        """Writes the cells of the step's tokens; gives the sums of second cells that its rows see.  [R]"""
        name, window, size = group.name, group.window, group.block_size
        first, second = self._cells[name]
        slots, positions, table = step.slots[name], step.positions, step.block_tables[name]
        first[slots] = first_cells(step.ids, positions, index)
        blocks = min(table.shape[1], -(-int(step.kv_len.max()) // size))
        length = blocks * size  # S
        where = (table[:, :blocks, None] * size + _places(size)).reshape(len(table), length)  # [B, S]
        # What lies behind a row's place, or before its window in a hole of the table, is subtracted, or isn't added.
        weights = WEIGHT_ARRAY[:length]
        rows = step.rows
        second[slots] = mix_cells(_sums(first, where, weights, owner, positions, window))
        return _sums(second, where, weights, owner[rows], positions[rows], window)

    def _go_on(self, group: CacheGroup, index: int, step: StepInput) -> npt.NDArray[np.uint64]:
        """Has the states of the step's requests go on with its tokens; gives those that its rows see.  [R]"""
        cells = self._cells[group.name]
        states = np.zeros(len(step.ids), np.uint64)  # after each token
        ids, positions, begins = step.ids.tolist(), step.positions.tolist(), step.q_start.tolist()
        snapshots = (step.slots[group.name] // group.block_size).tolist()
        for b, block in enumerate(step.block_tables[group.name][:, 0].tolist()):
            begin, end = begins[b], begins[b + 1]
            start, state = positions[begin], 0
            if start:
                state, tokens = cells[:, block].tolist()
                # A state that isn't finite has lost its count where it came back from a disk: see ``read_block``.
                known = tokens == start or bool(self._bad[group.name][block])
                check(known, f"a state of {tokens} tokens goes on at token {start}")
                self.states_that_go_on += 1
            for t in range(begin, end):
                states[t] = state = next_state(state, ids[t], positions[t], index)
                if snapshots[t] >= 0:
                    cells[:, snapshots[t]] = state, positions[t] + 1
                    self.snapshots += 1
            cells[:, block] = state, positions[end - 1] + 1
        return states[step.rows]

    def _spread(self, step: StepInput, owner: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Marks cells that are NaN. Returns which rows are: those that see one, or whose blocks have one anywhere."""
        rows = np.zeros(len(step.rows), np.bool_)
        self._poisoned = True
        for group in self.cache_groups:
            size, bad, table = group.block_size, self._bad[group.name], step.block_tables[group.name]
            if group.kind == STATE:
                rows |= self._spread_states(step, bad, table[:, 0], step.slots[group.name] // group.block_size)
                continue
            bad[step.slots[group.name]] = step.ids == POISON
            for t, (b, position) in enumerate(zip(owner.tolist(), step.positions.tolist(), strict=True)):
                seen = np.arange(max(position - group.window + 1, 0) if group.window else 0, position + 1)
                if bad[table[b, seen // size] * size + seen % size].any():
                    bad[step.slots[group.name][t]] = True
            for r, t in enumerate(step.rows.tolist()):
                b, position = int(owner[t]), int(step.positions[t])
                begin = max(position - group.window + 1, 0) // size if group.window else 0
                blocks = table[b, begin : -(-int(step.kv_len[b]) // size)]
                flags = bad.reshape(-1, size)[blocks].reshape(-1)
                later = position + 1 - begin * size  # of the step's own tokens, those behind the row are masked
                flags[later : int(step.kv_len[b]) - begin * size] = False
                if not self.caps.shared_blocks:  # these executors look at no place that is masked
                    flags[later:] = False
                rows[r] |= flags.any()
        return rows

    @staticmethod
    def _spread_states(
        step: StepInput, bad: npt.NDArray[np.bool_], blocks: npt.NDArray[np.int32], snapshots: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Marks states that are NaN. Returns which rows are: those at NaN and after it.  [R]"""
        tokens = step.ids == POISON
        for b, block in enumerate(blocks.tolist()):
            of_request = slice(int(step.q_start[b]), int(step.q_start[b + 1]))
            if step.positions[of_request.start] and bad[block]:
                tokens[of_request] = True
            np.logical_or.accumulate(tokens[of_request], out=tokens[of_request])
            bad[block] = tokens[of_request.stop - 1]
        stored = snapshots >= 0
        bad[snapshots[stored]] = tokens[stored]
        return tokens[step.rows]

    # Its rows

    def _sampled(self, step: StepInput, values: Sequence[int], bad: npt.NDArray[np.bool_] | None) -> StepOutput:
        output = StepOutput(tokens=None)
        if step.wants_logits:
            logits = output.outputs["logits"] = np.zeros((len(values), VOCAB), np.float32)
            logits[:, 0] = [value >> 40 for value in values]
            if bad is not None:
                logits[bad] = np.nan
        for layer in layers_of("hidden", step.outputs):
            rows = [[value >> 40, layer] for value in values]
            output.outputs[f"hidden:{layer}"] = np.array(rows, np.float32).reshape(len(values), 2)
        if (sampling := step.sampling) is None:
            return output
        draws = _draws(step, sampling)
        orders = [self.model.distribution(value, draw) for value, draw in zip(values, draws, strict=True)]
        allowed = _allowed(sampling, len(values))
        tokens = [order.best(limit) for order, limit in zip(orders, allowed, strict=True)]
        if bad is not None:
            tokens = [NO_TOKEN if nan else token for token, nan in zip(tokens, bad.tolist(), strict=True)]
        output.tokens = np.array(tokens, np.int32)
        if sampling.logprobs is not None:
            self._logprobs(output, sampling, orders, allowed)
        return output

    @staticmethod
    def _logprobs(
        output: StepOutput,
        sampling: SamplingBatch,
        orders: Sequence[Distribution],
        allowed: Sequence[Collection[int] | None],
    ) -> None:
        assert output.tokens is not None and sampling.logprobs is not None
        tokens = output.tokens.tolist()
        scored = tokens if sampling.scored is None else sampling.scored.tolist()
        named = [
            token if token_of_row == NO_TOKEN else token_of_row
            for token, token_of_row in zip(tokens, scored, strict=True)
        ]
        output.token_logprobs = np.array(
            [order.logprob(token) for order, token in zip(orders, named, strict=True)], np.float32
        )
        limited = [False] * len(tokens) if sampling.top_allowed is None else sampling.top_allowed.tolist()
        top = [
            order.top(sampling.logprobs, tokens if limit else None)
            for order, tokens, limit in zip(orders, allowed, limited, strict=True)
        ]
        shape = len(tokens), sampling.logprobs
        output.top_ids = np.array([[token for token, _ in row] for row in top], np.int32).reshape(shape)
        output.top_logprobs = np.array([[value for _, value in row] for row in top], np.float32).reshape(shape)

    # What must hold of a step

    def _check(self, pending: Submitted) -> None:
        step, counts, owner = pending.step, pending.counts, pending.owner
        check(step.q_start[0] == 0 and int(step.q_start[-1]) == len(step.ids) == len(step.positions), "q_start")
        check(0 < len(step.ids) <= self.caps.max_tokens and len(counts) <= self.caps.max_requests + 1, "a step's size")
        expected = np.arange(len(step.ids)) + (step.kv_len - step.q_start[1:])[owner]
        check((step.positions == expected).all(), "positions")
        check(len(step.rows) == 0 or 0 <= int(step.rows.min()) <= int(step.rows.max()) < len(step.ids), "rows")
        for group in self.cache_groups:
            table, size, slots = step.block_tables[group.name], group.block_size, step.slots[group.name]
            check(int(table.max()) < self.blocks[group.name], "a block that there is not")
            written = table[owner, step.positions // size]  # [T]
            check(int(written.min()) >= 0, "a token has no block")
            if group.kind == STATE:
                self._check_snapshots(step, group)
            else:
                check((slots == written * size + step.positions % size).all(), "slots")
            if group.name in self._padding:
                written = written[written < self._padding[group.name]]
            # A block that is written is in the table of the request that writes it, and nowhere else.
            check(np.count_nonzero(written[:, None, None] == table) == len(written), "a block is written and shared")
            if group.name in step.copies:
                for source, to in step.copies[group.name].tolist():
                    check((source - to) % self.caps.owners == 0, "a copy for another owner")
                    check(np.count_nonzero(table == to) <= 1, "a copy to a block that is shared")

    def _check_snapshots(self, step: StepInput, group: CacheGroup) -> None:
        """A snapshot has a block to itself, in which no request of the step has its state."""
        slots, table = step.slots[group.name], step.block_tables[group.name]
        places = slots[slots >= 0]
        blocks = places // group.block_size
        check(bool((places % group.block_size == step.positions[slots >= 0]).all()), "the slot of a snapshot")
        check(len(np.unique(blocks)) == len(blocks) and blocks.max(initial=-1) < self.blocks[group.name], "snapshots")
        check(not np.isin(blocks, table[:, 0]).any(), "a snapshot is stored over a state")

    def _check_beside(self, pending: Submitted) -> None:
        """Steps in flight write to blocks that no other request has in another one."""
        for other in self._flying:
            check(not _share(pending, other) or self.caps.chains, "a request is in two steps in flight")
            for group in self.cache_groups:
                for one, two in ((pending, other), (other, pending)):
                    holders: dict[int, set[int]] = {}
                    for request, blocks in zip(two.requests, _seen_blocks(two, group), strict=True):
                        for block in blocks:
                            holders.setdefault(block, set()).add(id(request))
                    for request, block in _written_blocks(one, group):
                        check(holders.get(block, set()) <= {id(request)}, "two steps in flight share a block")

    def _check_sources(self, pending: Submitted) -> None:
        """Tokens of the step before, which is in flight, come from rows of the same requests."""
        step = pending.step
        if step.sources is None:
            return
        check(self.caps.chains and len(self._flying) > 0, "tokens of a step that is not in flight")
        before, follows = self._flying[-1], np.flatnonzero(step.sources >= 0)
        check(before.step.sampling is not None, "tokens of a step that draws none")
        check(bool((step.sources < len(before.step.rows)).all()), "tokens of a row that there is not")
        for token, row in zip(follows.tolist(), step.sources[follows].tolist(), strict=True):
            source = int(before.step.rows[row])
            drawn_for, taken_by = before.requests[before.owner[source]], pending.requests[pending.owner[token]]
            check(drawn_for is taken_by, "a token of another request")
            check(step.positions[token] == before.step.positions[source] + 1, "a token of another position")


def _share(one: Submitted, other: Submitted) -> bool:
    """Says whether a request is in both steps."""
    return not {*map(id, one.requests)}.isdisjoint(map(id, other.requests))


def _seen_blocks(pending: Submitted, group: CacheGroup) -> list[list[int]]:
    """Gives the blocks of each of the step's requests, without those before its window."""
    table = pending.step.block_tables[group.name]
    first = np.maximum(pending.step.kv_len - pending.counts - group.window + 1, 0) // group.block_size
    first = first if group.window else np.zeros_like(first)
    return [row[begin:] for row, begin in zip(table.tolist(), first.tolist(), strict=True)]


def _written_blocks(pending: Submitted, group: CacheGroup) -> set[tuple[object, int]]:
    """Gives the blocks that a step writes, each with its request."""
    step, requests = pending.step, pending.requests
    blocks = step.slots[group.name] // group.block_size
    written = {(requests[b], block) for b, block in zip(pending.owner.tolist(), blocks.tolist(), strict=True)}
    if group.kind == STATE:
        written |= set(zip(requests, step.block_tables[group.name][:, 0].tolist(), strict=True))
    return {(request, block) for request, block in written if block >= 0}


def _digest(step: StepInput) -> int:
    digest = 0
    for array in (*step.arrays.values(), *step.copies.values(), *step.clears.values()):
        digest = zlib.crc32(np.ascontiguousarray(array), digest)
    if step.sampling is not None:
        digest = zlib.crc32(step.sampling.seed, zlib.crc32(step.sampling.counter, digest))
    return digest


def _draws(step: StepInput, sampling: SamplingBatch) -> list[Draw]:
    last = step.ids[step.rows].tolist()
    settings = zip(last, sampling.temperature.tolist(), sampling.seed.tolist(), sampling.counter.tolist(), strict=True)
    if sampling.seen is None and sampling.counted is None:
        return [Draw(*one) for one in settings]
    seen: list[list[int]] = [[] for _ in last]
    counted: list[list[tuple[int, int]]] = [[] for _ in last]
    if sampling.seen_start is not None and sampling.seen is not None and sampling.repetition_penalty is not None:
        for r, factor in enumerate(sampling.repetition_penalty.tolist()):
            if factor != 1:
                seen[r] = sorted(set(sampling.seen[sampling.seen_start[r] : sampling.seen_start[r + 1]].tolist()))
    if sampling.counted_start is not None and sampling.counted is not None and sampling.counts is not None:
        for r in range(len(last)):
            at = slice(int(sampling.counted_start[r]), int(sampling.counted_start[r + 1]))
            frequency = 0 if sampling.frequency_penalty is None else sampling.frequency_penalty[r]
            presence = 0 if sampling.presence_penalty is None else sampling.presence_penalty[r]
            if frequency or presence:
                counted[r] = sorted(zip(sampling.counted[at].tolist(), sampling.counts[at].tolist(), strict=True))
    return [Draw(*one, tuple(of), tuple(counts)) for one, of, counts in zip(settings, seen, counted, strict=True)]


def _allowed(sampling: SamplingBatch, rows: int) -> list[Collection[int] | None]:
    """Gives the tokens that may come in each row; None for all."""
    allowed: list[Collection[int] | None] = [None] * rows
    if sampling.masks is not None:
        sampling.masks.wait()
        masks = sampling.masks.bits
        allowed = [None if at < 0 else tokens_of(masks[at].tobytes()) for at in sampling.masks.rows.tolist()]
    if sampling.allowed_start is not None and sampling.allowed is not None:
        starts, tokens = sampling.allowed_start.tolist(), sampling.allowed.tolist()
        for r in range(rows):
            if row_tokens := set(tokens[starts[r] : starts[r + 1]]):
                before = allowed[r]
                allowed[r] = row_tokens if before is None else row_tokens.intersection(before)
    if sampling.biased_start is not None and sampling.biased is not None and sampling.bias is not None:
        starts, tokens, bias = (one.tolist() for one in (sampling.biased_start, sampling.biased, sampling.bias))
        for r in range(rows):
            if banned := {tokens[i] for i in range(starts[r], starts[r + 1]) if bias[i] == -np.inf}:
                before = allowed[r]
                allowed[r] = (ALL if before is None else frozenset(before)) - banned
    return allowed


@cache
def _places(size: int) -> Int32Array:
    return np.arange(size, dtype=np.int32)


def _sums(
    cells: Cells, where: npt.NDArray[Any], weights: Cells, owner: Any, ends: Int32Array, window: int
) -> npt.NDArray[np.uint64]:
    """Sums over the cells that some tokens see: of requests ``owner``, up to positions ``ends``."""
    total = (cells[where] * weights).cumsum(1)
    seen: npt.NDArray[np.uint64] = total[owner, ends]
    if window:
        before = ends - window
        seen = seen - np.where(before >= 0, total[owner, np.maximum(before, 0)], np.uint64(0))
    return seen
