"""Plans the runs of a step in the linear form: which slots run together, and with which arrays. It needs no library.

A slot is one block of a cache group, with C contiguous positions, or fewer while all requests are short. Rows of a run
without a request write to the slot's last position, which no request uses. So a run may include slots without active
requests. ``plugins/steps/linear_io.py`` describes the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import CacheGroup, Int32Array, StepInput
from enginewright.runtime.shared.errors import CapacityError, RequestError

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MOST_HOLES = 3
"""The most unused slots between two decodes that still run together: up to three idle rows cost less than another
run.
"""

PADDED_SHARE = 0.25
"""Prompts run together if that adds at most this share of padding to their tokens. Each token costs about the same, but
a run reads the weights once.
"""


@dataclass(frozen=True)
class SlotRun:
    """One run of the model over the slots first .. first+B-1, with S tokens each.

    Attributes:
        first: the first slot.
        ids: [B, S], 0 for padding.
        places: [B, S], the position in its slot of a token's key and value. The token attends to this position and
            earlier ones.
        wanted: [R], indices into the B*S tokens whose logits are needed.
        order: [R], the row of each in the step's logits; ascending.
    """

    first: int
    ids: Int64Array
    places: Int64Array
    wanted: Int64Array
    order: Int64Array


def slots_of(step: StepInput, groups: Sequence[CacheGroup], slots: int) -> Int32Array:
    """Returns each request's slot, [B], which is the same in every cache group.

    Args:
        step: the step, as submitted.
        groups: the executor's cache groups, whose blocks are slots of C tokens.
        slots: the number of slots.

    Raises:
        RequestError: a slot doesn't exist, differs between groups, or belongs to two requests.
        CapacityError: a request is longer than a slot.
    """
    longest = max(step.kv_len.tolist(), default=0)
    if longest >= groups[0].block_size:
        raise CapacityError(
            f"context: a request has {longest} tokens, and a slot holds {groups[0].block_size - 1}",
            hint="Open the model with a larger context.",
        )
    tables = step.block_tables
    first: Int32Array = tables[groups[0].name][:, 0]
    for group in groups[1:]:
        if not np.array_equal(tables[group.name][:, 0], first):
            raise RequestError(
                f"step: a request's slots in {groups[0].name} and {group.name} differ",
                hint="Give each request the same slot in every cache group.",
            )
    listed = first.tolist()  # sets and lists of Python: NumPy sets out at several times what they take
    if listed and not 0 <= min(listed) <= max(listed) < slots:
        raise RequestError(f"step: slots are 0 to {slots - 1}, and it names {listed}")
    if len(set(listed)) != len(listed):
        raise RequestError(f"step: two requests have the same slot: {listed}")
    return first


def plan_runs(
    step: StepInput,
    slot_of: Int32Array,
    capacity: int,
    *,
    chunks_together: bool = True,
    prompts_alone: bool = False,
) -> list[SlotRun]:
    """Returns the runs of a step: decodes over ranges of slots, and prompts of similar lengths together.

    Args:
        step: the step, as submitted.
        slot_of: each request's slot, [B].
        capacity: the number of positions that slots have now, more than any request of the step has tokens.
        chunks_together: True if later parts of prompts may run together, too.
        prompts_alone: True if no prompts run together.
    """
    if (decodes_alone := _decodes(step, slot_of, capacity)) is not None:
        return [decodes_alone]
    counts = step.counts
    rows_of: list[list[int]] = [[] for _ in counts]  # request -> which of step.rows are its own
    for index, owner in enumerate(step.requests_at(step.rows).tolist()):
        rows_of[owner].append(index)
    requests = [b for b in np.argsort(slot_of, kind="stable").tolist() if counts[b]]
    decodes = _ranges([b for b in requests if counts[b] == 1], slot_of)
    alone = np.full(len(counts), prompts_alone) if chunks_together else step.kv_len > counts
    prefills = _padded([b for b in requests if counts[b] > 1], slot_of, counts, step.kv_len, capacity, alone)
    starts = np.cumsum(counts) - counts  # [B], the first token of each request
    return [_run(step, members, slot_of, starts, rows_of, capacity) for members in decodes + prefills]


def _decodes(step: StepInput, slot_of: Int32Array, capacity: int) -> SlotRun | None:
    """Returns the only run of a step of decodes that all need logits, which is the usual case.

    None for any other step, or if there are more than ``MOST_HOLES`` unused slots between two requests.
    """
    count = len(slot_of)
    if not count or step.counts.tolist() != [1] * count or step.rows.tolist() != list(range(count)):
        return None
    by_slot = sorted(slot_of.tolist())
    if any(after - before > MOST_HOLES + 1 for before, after in pairwise(by_slot)):
        return None
    first = by_slot[0]
    row_of = slot_of.astype(np.int64) - first  # [B]
    ids = np.zeros((by_slot[-1] - first + 1, 1), np.int64)
    places = np.full_like(ids, capacity - 1)
    ids[row_of, 0] = step.ids
    places[row_of, 0] = step.kv_len - 1
    return SlotRun(first, ids, places, row_of, np.arange(count))


def mask(places: Int64Array, capacity: int, window: int, out: BoolArray | None = None) -> BoolArray:
    """Returns which positions of its slot each token attends to: ``places`` [B, S] -> bool [B, 1, S, C].

    These are its own position and earlier ones, at most ``window`` of them; 0 means all. ``capacity`` is C; ``out`` is
    an array to write to.
    """
    keys = np.arange(capacity)
    seen: BoolArray = np.less_equal(keys, places[:, None, :, None], out=out)
    if window:
        seen &= keys > places[:, None, :, None] - window
    return seen


def _ranges(requests: Sequence[int], slot_of: Int32Array) -> list[list[int]]:
    """Groups requests, in the order of their slots, so that at most ``MOST_HOLES`` unused slots are between two of a
    group.
    """
    ranges: list[list[int]] = []
    for b in requests:
        if ranges and slot_of[b] - slot_of[ranges[-1][-1]] <= MOST_HOLES + 1:
            ranges[-1].append(b)
        else:
            ranges.append([b])
    return ranges


def _padded(
    requests: Sequence[int],
    slot_of: Int32Array,
    counts: Int32Array,
    kv_len: Int32Array,
    capacity: int,
    alone: BoolArray,
) -> list[list[int]]:
    """Groups requests whose prompts run together: in adjacent slots, with little padding that fits into the slots.

    Slots must be adjacent, because a prompt's padding doesn't fit into the last position of an unused slot.

    Args:
        requests: indices of requests, in the order of their slots.
        slot_of, counts, kv_len: each request's slot, tokens in the step, and tokens in total, [B].
        capacity: the positions of a slot.
        alone: [B], True for requests that must run by themselves.
    """
    runs: list[list[int]] = []
    for b in requests:
        if runs and slot_of[b] == slot_of[runs[-1][-1]] + 1 and not alone[[*runs[-1], b]].any():
            members = [*runs[-1], b]
            longest, tokens = int(counts[members].max()), int(counts[members].sum())
            fits = int((kv_len[members] - counts[members]).max()) + longest <= capacity
            if fits and longest * len(members) - tokens <= PADDED_SHARE * tokens:
                runs[-1].append(b)
                continue
        runs.append([b])
    return runs


def _run(
    step: StepInput,
    members: Sequence[int],
    slot_of: Int32Array,
    starts: Int64Array,
    rows_of: Sequence[Sequence[int]],
    capacity: int,
) -> SlotRun:
    first, last = int(slot_of[members[0]]), int(slot_of[members[-1]])
    counts = step.counts
    longest = max(int(counts[b]) for b in members)
    ids = np.zeros((last - first + 1, longest), np.int64)
    places = np.full_like(ids, capacity - 1)
    token_of_row: dict[int, int] = {}  # row of the step's logits -> index into the run's tokens
    for b in members:
        row, start, end = int(slot_of[b]) - first, int(starts[b]), int(starts[b] + counts[b])
        ids[row, : end - start] = step.ids[start:end]
        places[row] = np.arange(longest) + (int(step.kv_len[b]) - (end - start))
        token_of_row |= {r: row * longest + int(step.rows[r]) - start for r in rows_of[b]}
    order = sorted(token_of_row)
    return SlotRun(first, ids, places, np.array([token_of_row[r] for r in order], np.int64), np.array(order, np.int64))
