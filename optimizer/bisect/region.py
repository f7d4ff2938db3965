"""The calls between the points that agree and the one that doesn't: where the fault is."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from .points import Point
from .taps import Call, Tap


def region(calls: Sequence[Call], taps: Sequence[Tap], point: Point, known: Collection[Point]) -> list[Call]:
    """The calls that the value at ``point`` was computed by from values at the points ``known``, in their order."""
    made = {}
    for call in calls:
        for slot, value in call.writes:
            made[value] = (call, slot)
    tap = next(tap for tap in taps if tap.point == point)
    # A product without its residual is a part of the value that is there, and doesn't stand for it.
    given = {
        (tap.key, tap.before, tap.slot)
        for tap in taps
        if tap.point in known and tap.point != point and not tap.residual
    }
    at = {call.key: call for call in calls}
    first = at[tap.key]
    waiting: list[Hashable] = [value for slot, value in first.reads if tap.before and slot == tap.slot]
    found: dict[Hashable, Call] = {}

    def enter(call: Call) -> None:
        if call.key not in found:
            found[call.key] = call
            waiting.extend(value for slot, value in call.reads if (call.key, True, slot) not in given)

    if not tap.before:
        enter(first)
    while waiting:
        value = waiting.pop()
        if value in made:
            call, slot = made[value]
            if (call.key, False, slot) not in given:
                enter(call)
    return [call for call in calls if call.key in found]
