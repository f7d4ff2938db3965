"""Chooses the optimization profile of a run over slots, and pads the run to it. A run that is too large is split.

An engine has optimization profiles, each with a range of sizes. A run uses the smallest that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginewright.runtime.shared.errors import BundleError

from ..steps.packed_steps import bucketed
from ..steps.slots import SlotRun
from .section import EngineSection, ProfileSection


@dataclass(frozen=True)
class Choice:
    """An engine and one of its optimization profiles."""

    engine: int
    profile: int
    sizes: ProfileSection


def choose(choices: Sequence[Choice], batch: int, length: int) -> Choice | None:
    """Returns the smallest profile that holds [B, S] = [batch, length] tokens; None if none does.

    If S is 1, profiles for decode steps are preferred.
    """
    fitting = [c for c in choices if c.sizes.holds(batch, length, c.sizes.R[0])]
    return min(fitting, key=lambda c: _preference(c, length), default=None)


def _preference(choice: Choice, length: int) -> tuple[bool, int]:
    sizes = choice.sizes
    return (sizes.phase == "decode") != (length == 1), sizes.B[2] * sizes.S[2]


def cut(run: SlotRun, choices: Sequence[Choice]) -> Iterator[tuple[Choice, SlotRun]]:
    """Yields the parts of a run, each with a profile that holds it: the whole run, or rows and chunks of it in order.

    A part's ``order`` has the indices of its rows of logits among those of the whole run.
    """
    batch, length = run.ids.shape
    if (choice := choose(choices, batch, length)) is not None:
        yield choice, replace(run, order=np.arange(len(run.wanted)))
        return
    if length == 1:
        rows, chunk = max(c.sizes.B[2] for c in choices if c.sizes.S[0] == 1), 1
    else:
        longest = max(choices, key=lambda c: (min(c.sizes.S[2], length), c.sizes.B[2]))
        rows, chunk = longest.sizes.B[2], longest.sizes.S[2]
    for top in range(0, batch, rows):
        for left in range(0, length, chunk):
            part = _part(run, slice(top, top + rows), slice(left, left + chunk))
            if (choice := choose(choices, *part.ids.shape)) is not None:
                yield choice, part
                continue
            for row in range(top, min(top + rows, batch)):
                single = _part(run, slice(row, row + 1), slice(left, left + chunk))
                choice = choose(choices, *single.ids.shape)
                assert choice is not None, single.ids.shape  # ``check_profiles`` has seen to it
                yield choice, single


def _part(run: SlotRun, rows: slice, columns: slice) -> SlotRun:
    length = run.ids.shape[1]
    row, column = np.divmod(run.wanted, length)
    inside = (row >= rows.start) & (row < rows.stop) & (column >= columns.start) & (column < columns.stop)
    ids, places = run.ids[rows, columns], run.places[rows, columns]
    places_in_part = (row[inside] - rows.start) * ids.shape[1] + column[inside] - columns.start
    return SlotRun(run.first + rows.start, ids, places, places_in_part, np.flatnonzero(inside))


def widen(run: SlotRun, slots: int, most: int, capacity: int) -> SlotRun:
    """Pads a decode run to a range of slots whose size is a power of two, so that a few graphs serve all batches.

    Added rows write only to the last position of their slots. A run that then exceeds ``most`` rows is returned
    unchanged.

    Args:
        run: the run.
        slots: the number of slots.
        most: the most rows of the profile.
        capacity: the number of positions in a slot.
    """
    first, batch = run.first, len(run.ids)
    size = 1 << (batch - 1).bit_length()
    while (start := first // max(size // 2, 1) * max(size // 2, 1)) + size < first + batch:
        size *= 2
    start = min(start, max(slots - size, 0))
    size = min(size, slots - start)
    if size > most:
        return run
    ids = np.zeros((size, 1), run.ids.dtype)
    places = np.full_like(ids, capacity - 1)
    run_rows = slice(first - start, first - start + batch)
    ids[run_rows], places[run_rows] = run.ids, run.places
    return replace(run, first=start, ids=ids, places=places, wanted=run.wanted + (first - start))


def lengthen(run: SlotRun, sizes: Sequence[int], capacity: int) -> SlotRun:
    """Pads a run of prompts to one of a few lengths, if that is within the slots' capacity.

    Padding writes after the prompts, at positions that are written again before they are read. ``sizes`` is the range
    of lengths in the profile, ``capacity`` the number of positions in a slot.
    """
    batch, length = run.ids.shape
    padded = bucketed(length, sizes)
    if int(run.places[:, 0].max()) + padded > capacity:
        return run
    ids = np.zeros((batch, padded), run.ids.dtype)
    ids[:, :length] = run.ids
    row, column = np.divmod(run.wanted, length)
    places = run.places[:, :1] + np.arange(padded)
    return replace(run, ids=ids, places=places, wanted=row * padded + column)


def check_profiles(choices: Sequence[Choice], where: str) -> int:
    """Returns the number of positions in a slot, which all profiles must agree on.

    Raises BundleError naming ``where`` if they don't, or if some size below the largest isn't within any profile.
    """
    capacities = sorted({choice.sizes.C for choice in choices})
    if len(capacities) != 1:
        _refuse(where, f"their slots are of {' and '.join(map(str, capacities))} places")
    for batch in range(1, max(c.sizes.B[2] for c in choices if c.sizes.S[0] == 1 or c.sizes.phase == "decode") + 1):
        if choose(choices, batch, 1) is None:
            _refuse(where, f"none holds {batch} requests of one token")
    for length in range(2, max(c.sizes.S[2] for c in choices) + 1):
        if choose(choices, 1, length) is None:
            _refuse(where, f"none holds a prompt of {length} tokens")
    return capacities[0]


def _refuse(where: str, what: str) -> None:
    raise BundleError(f"{where}: profiles: {what}", hint="Export the bundle again.")


def choices_of(engines: Sequence[EngineSection]) -> tuple[Choice, ...]:
    """Returns all profiles of all engines."""
    return tuple(Choice(e, p, sizes) for e, engine in enumerate(engines) for p, sizes in enumerate(engine.profiles))
