"""Hidden states of the cpu target: values of a lowered program that all later ones depend on, taken as they are made.

A bundle needs nothing for it: the interpreter shows each step's values (``CpuProgram.watch``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import FloatArray, StepInput, StepOutput
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand

from ..executable import CpuProgram

Place = tuple[int, int]
"""A step of the program, and which of its outputs."""

_FLOATS = ("f32", "bf16", "f16")


def hidden_places(program: LoweredProgram) -> dict[int, Place]:
    """Hidden state -> where it is made: 0 goes into the first layer, 1 into the second, the last out of the final norm.

    1. On every way from the token ids to the logits lie some steps that all ways have: between two layers there is one,
       whose output is the sum of all before. What goes into a layer is the last of these before its attention.
    2. A step that adds and normalizes gives the sum last, and what is normalized first.
    3. Of several ranks each makes some of its columns, and what they gather is the whole.
    4. A hidden state that isn't a value of the program is left out: that of a norm which rounds at once, for one.

    Raises BundleError for a program that never writes its logits.
    """
    common = _on_every_way(program)
    attention = [i for i, step in enumerate(program.steps) if step.op in ("paged_attention", "ring_attention")]
    found: dict[int, Place] = {}
    for layer, at in enumerate(attention):
        before = [i for i in common if i < at]
        if before and _is_hidden(program.steps[before[-1]].outputs[-1]):
            found[layer] = before[-1], len(program.steps[before[-1]].outputs) - 1
    last = max((i for i, step in enumerate(program.steps) if "norm" in step.op), default=-1)
    if attention and last in common and last > attention[-1] and _is_hidden(program.steps[last].outputs[0]):
        found[len(attention)] = last, 0
    return {layer: _gathered(program, place) for layer, place in found.items()}


def _gathered(program: LoweredProgram, place: Place) -> Place:
    """Where a value is whole: it itself, or the step behind it in which ranks gather it."""
    step, slot = place
    name = program.steps[step].outputs[slot].name
    for i, later in enumerate(program.steps[step + 1 :], step + 1):
        names = [operand.name for operand in later.outputs]
        if later.op == "all_gather" and name in names:
            return i, names.index(name)
    return place


def run_with_hidden(program: CpuProgram, places: Mapping[int, Place], step: StepInput) -> StepOutput:
    """Runs as ``CpuProgram.run`` does, and returns the hidden states of ``step.hidden`` at the step's rows."""
    found: dict[Place, FloatArray] = {}
    wanted = {places[layer] for layer in step.hidden}

    def keep(index: int, before: bool, arrays: list[npt.NDArray[Any] | None]) -> None:
        for at, slot in wanted:
            if at == index and not before:
                value, operand = arrays[slot], program.lowered.steps[at].outputs[slot]
                assert value is not None
                rows = step.rows if operand.shape[0] == Affine(t=1) else slice(None)
                found[at, slot] = np.array(value[rows], np.float32)

    output = program.watch(step, keep)
    output.hidden = np.stack([found[places[layer]] for layer in step.hidden], axis=1)
    return output


def _is_hidden(operand: Operand) -> bool:
    return operand.dtype in _FLOATS and len(operand.shape) == 2 and operand.shape[0] in (Affine(t=1), Affine(r=1))


def _on_every_way(program: LoweredProgram) -> list[int]:
    """Steps that are on every way from the token ids to the logits. Caches aren't followed: attention's keys and values
    come from where its queries come from. Raises BundleError if nothing writes the logits."""
    writers: dict[str, list[int]] = {}
    after: dict[int, set[int]] = {-1: set()}  # -1: the ids
    for i, step in enumerate(program.steps):
        for operand in step.inputs:
            sources = [-1] if (operand.kind, operand.name) == ("input", "ids") else []
            sources += writers.get(operand.name, []) if operand.kind == "buffer" else []
            for source in sources:
                after.setdefault(source, set()).add(i)
        for operand in step.outputs:
            writers.setdefault(operand.name, []).append(i)
    logits = program.outputs["logits"].name
    if logits not in writers:
        raise BundleError(f"program: no step writes {logits!r}, its logits", hint="Export the bundle again.")
    needed = set(writers[logits])
    for i in sorted(after, reverse=True):
        if after[i] & needed:
            needed.add(i)
    reached, common, furthest = {-1}, [], -1
    for i in [-1, *range(len(program.steps))]:
        if i not in reached or i not in needed:
            continue
        if furthest <= i and i >= 0:
            common.append(i)
        following = after.get(i, set()) & needed
        reached |= following
        furthest = max([furthest, *following])
    return common
