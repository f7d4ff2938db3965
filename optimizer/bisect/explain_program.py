"""Whether a bundle's program is the one that its recipe makes, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from enginewright.plugins.shared.lowered_program import LoweredProgram, Step

from .taps import Call

_MOST = 0.1
"""A larger part of other steps is another version's lowering, and no fault."""


def program_reasons(lowered: LoweredProgram, stored: LoweredProgram, calls: Sequence[Call]) -> list[str]:
    """What the steps ``calls`` of a stored program are other than in the one that the export makes; maybe nothing."""
    ours, theirs = ([repr(step) for step in program.steps] for program in (stored, lowered))
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    if sum(max(b - a, d - c) for _, a, b, c, d in changes) > _MOST * len(ours) + 1:
        return []
    concerned = {call.key for call in calls}
    reasons = []
    for _, start, stop, first, last in changes:
        if not concerned.intersection(range(first, max(last, first + 1))):
            continue
        if stop - start == last - first:
            pairs = zip(range(first, last), lowered.steps[start:stop], stored.steps[first:last], strict=True)
            reasons += [_changed(index, right, wrong) for index, right, wrong in pairs if index in concerned]
        else:
            reasons.append(
                f"B's program has {_steps(stored.steps[first:last])} at step {first}, where the recipe makes "
                f"{_steps(lowered.steps[start:stop])}"
            )
    return reasons


def _changed(index: int, right: Step, wrong: Step) -> str:
    if right.op != wrong.op:
        return f"step {index} of B is {wrong.op}, where the recipe makes {right.op}"
    for key in sorted({*right.attrs, *wrong.attrs}):
        if (a := right.attrs.get(key)) != (b := wrong.attrs.get(key)):
            return f"step {index} of B has {key} {b}, where the recipe makes {a}"
    names = [[o.name for o in step.inputs] for step in (right, wrong)]
    if names[0] != names[1]:
        return f"step {index} of B reads {', '.join(names[1])}, where the recipe makes {', '.join(names[0])}"
    return f"step {index} of B reads or writes other places than the recipe makes"


def _steps(steps: Sequence[Step]) -> str:
    return " and ".join(step.op for step in steps) or "nothing"
