"""Assigns buffers to the values of a schedule, so that values of one type and shape share as few buffers as
possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...engines.segments import AttentionStep, SegmentStep, SegmentTensor, Step

_IN_TURNS = ("q", "k", "v", "out")


def share_buffers(
    steps: Sequence[Step], values: Mapping[str, SegmentTensor], kept: str
) -> tuple[tuple[Step, ...], dict[str, SegmentTensor]]:
    """Returns the steps with values replaced by buffers, and these buffers.

    A step's results never share a buffer with its inputs, so no engine works in place. Unused results get a buffer too.

    Args:
        steps: the steps in order; each value is written once, before any step reads it.
        values: the values to replace; other names stay.
        kept: a value that gets a buffer of its own, of the same name.
    """
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        last.update(dict.fromkeys((*_written(step), *_read(step)), i))
    buffers: dict[str, SegmentTensor] = {}
    place: dict[str, str] = {}
    free: dict[SegmentTensor, list[str]] = {}
    for i, step in enumerate(steps):
        for value in _written(step):
            if value == kept:
                place[value] = kept
            else:
                unused = free.get(values[value])
                place[value] = unused.pop() if unused else f"buffer_{len(buffers)}"
            buffers[place[value]] = values[value]
        for value in dict.fromkeys((*_written(step), *_read(step))):
            if value in values and value != kept and last[value] == i:
                free.setdefault(values[value], []).append(place[value])
    return tuple(_renamed(step, place) for step in steps), buffers


def _written(step: Step) -> Iterator[str]:
    return iter(step.outputs.values() if isinstance(step, SegmentStep) else (step.out,))


def _read(step: Step) -> Iterator[str]:
    return iter(step.inputs.values() if isinstance(step, SegmentStep) else (step.q, step.k, step.v))


def _renamed(step: Step, place: Mapping[str, str]) -> Step:
    if isinstance(step, AttentionStep):
        return step.model_copy(update={name: place[getattr(step, name)] for name in _IN_TURNS})
    renamed = {
        field: {argument: place.get(value, value) for argument, value in getattr(step, field).items()}
        for field in ("inputs", "outputs")
    }
    return step.model_copy(update=renamed)
