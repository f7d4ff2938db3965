"""Finds the hidden states of a lowered program, and makes them its taps. All later values depend on a hidden state."""

from __future__ import annotations

from .errors import BundleError
from .lowered_program import Affine, Buffer, LoweredProgram, Operand, Step
from .step_schema import HIDDEN, ROWS, layer_output

Place = tuple[int, int]
"""A value of a program: (index of the step that computes it, index of the output of that step)."""

TAPS_SINCE = 7
"""The first version of programs that name their taps."""

_FLOATS = ("f32", "bf16", "f16")

_ATTENTIONS = ("paged_attention", "ring_attention", "attention")

_LINE = 64
"""Alignment of buffers in bytes, as ``arena.ALIGNMENT``."""


def hidden_taps(program: LoweredProgram) -> dict[str, Place]:
    """Returns output name -> the step and slot that computes it; empty for a program without an output.

    ``hidden:0`` is the first layer's input, ``hidden:1`` the second's, and the last is the final norm's output.

    1. Some steps are on all paths from the token ids to the result: between two layers there is one, whose output is
    the sum
       of everything before. The input of a layer is the output of the last such step before its attention.
    2. A step that adds and normalizes has the sum as its last output and the normalized value as its first. The hidden
       state is the last output that a later step reads: the normalized value where norms follow their layers.
    3. If ranks compute some columns each, the gathered value is the whole.
    4. A hidden state that isn't a value of the program is left out, such as that of a norm which rounds at once.

    Raises BundleError for a program that never writes its result.
    """
    if not program.outputs:
        return {}
    common = _on_every_way(program)
    attention = [i for i, step in enumerate(program.steps) if step.op in _ATTENTIONS]
    places: dict[int, Place] = {}
    for layer, at in enumerate(attention):
        before = [i for i in common if i < at]
        if before and _is_hidden(program.steps[before[-1]].outputs[slot := _last_read(program, before[-1])]):
            places[layer] = before[-1], slot
    last = max((i for i, step in enumerate(program.steps) if "norm" in step.op), default=-1)
    if attention and last in common and last > attention[-1] and _is_hidden(program.steps[last].outputs[0]):
        places[len(attention)] = last, 0
    return {layer_output(HIDDEN, layer): _gathered(program, place) for layer, place in places.items()}


def add_taps(program: LoweredProgram) -> LoweredProgram:
    """Returns the program with the result of ``hidden_taps`` as its taps, whatever its version.

    Raises the same errors.
    """
    return program.model_copy(update={"taps": hidden_taps(program)})


def with_taps(program: LoweredProgram) -> LoweredProgram:
    """Returns a program that has taps: one of a version before 7 gets its hidden states, others are unchanged.

    Raises BundleError for a program that never writes its result.
    """
    if program.format_version >= TAPS_SINCE:
        return program
    return add_taps(program)


def with_tap_outputs(program: LoweredProgram) -> tuple[LoweredProgram, frozenset[int]]:
    """Makes the float32 taps of a program additional outputs. Returns the program and the indices of the added steps.

    Each added step copies the rows of a tap, as soon as the tap is computed, to memory after the program's arena. All
    other buffers keep their offsets, and an executor may skip the added steps without changing any other result.
    """
    shape = (Affine(r=1),)
    rows = Operand(kind="input", name=ROWS, dtype="i32", shape=shape, strides=(Affine(1),))
    steps: list[Step] = []
    buffers, outputs, arena, added = list(program.buffers), dict(program.outputs), program.arena_bytes, set[int]()
    taps = sorted((place, name) for name, place in program.taps.items())
    for index, step in enumerate(program.steps):
        steps.append(step)
        for (_, slot), name in (tap for tap in taps if tap[0][0] == index):
            tap = step.outputs[slot]
            if tap.dtype != "f32":
                continue
            width = tap.shape[1].constant
            size = Affine(r=-(-4 * width // _LINE) * _LINE)
            outputs[name] = Operand(
                kind="buffer", name=name, dtype="f32", shape=(*shape, tap.shape[1]), strides=(Affine(width), Affine(1))
            )
            buffers.append(Buffer(name=name, size=size, offset=arena))
            arena += size
            added.add(len(steps))
            op, inputs = ("copy", (tap,)) if tap.shape[0] == shape[0] else ("take_rows", (tap, rows))
            steps.append(Step(op=op, inputs=inputs, outputs=(outputs[name],), where=name))
    changed = {"steps": tuple(steps), "buffers": tuple(buffers), "outputs": outputs, "arena_bytes": arena, "taps": {}}
    return program.model_copy(update=changed), frozenset(added)


def _last_read(program: LoweredProgram, step: int) -> int:
    """Returns the index of the last output of step ``step`` that a later step reads; of its last output if none is
    read.
    """
    outputs = program.steps[step].outputs
    read = {operand.name for later in program.steps[step + 1 :] for operand in later.inputs}
    return max((slot for slot, operand in enumerate(outputs) if operand.name in read), default=len(outputs) - 1)


def _gathered(program: LoweredProgram, place: Place) -> Place:
    """Returns where the whole of a value is: in the later step that gathers it from all ranks, or else in its own."""
    step, slot = place
    name = program.steps[step].outputs[slot].name
    for i, later in enumerate(program.steps[step + 1 :], step + 1):
        names = [operand.name for operand in later.outputs]
        if later.op == "all_gather" and name in names:
            return i, names.index(name)
    return place


def _is_hidden(operand: Operand) -> bool:
    return operand.dtype in _FLOATS and len(operand.shape) == 2 and operand.shape[0] in (Affine(t=1), Affine(r=1))


def _on_every_way(program: LoweredProgram) -> list[int]:
    """Returns the steps on all paths from the token ids to the result. Raises BundleError if nothing writes it.

    Caches aren't followed: attention's keys and values have the same origin as its queries.
    """
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
    output, operand = next(iter(program.outputs.items()))
    if operand.name not in writers:
        raise BundleError(f"program: no step writes {operand.name!r}, its {output}", hint="Export the bundle again.")
    needed = set(writers[operand.name])
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
