"""Fixes the sizes of a lowered program: one program for each bucket of T tokens, B requests and R sampled rows.

Sizes, places and strides become numbers, and memory is planned in bytes: buffers of any two sizes can be compared now,
so they share one arena, where the program of any size has one for each kind of size (see ``plan_arena``). The shapes of
views stay T, B and R: a step input has as many entries as the step, which is what an interpreter proves shapes by.
The program then runs steps of just these sizes; a larger one is refused, as its buffers end before it does.
"""

from __future__ import annotations

from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand, Step

from .plan_arena import plan_arena


def specialize_program(program: LoweredProgram, tokens: int, requests: int, rows: int) -> LoweredProgram:
    """``program`` for steps of T = ``tokens``, B = ``requests`` and R = ``rows``.

    Args:
        program: lowered, for any sizes; whether memory is planned doesn't matter.
        tokens, requests, rows: at least 1 each.

    Returns:
        the same steps, with sizes, strides, offsets and the arena as numbers.
    """
    if min(tokens, requests, rows) < 1:
        raise ValueError(f"T = {tokens}, B = {requests}, R = {rows}: each is at least 1")

    def fixed(value: Affine) -> Affine:
        return Affine(value.evaluate(tokens, requests, rows))

    def view(operand: Operand) -> Operand:
        strides = tuple(fixed(s) for s in operand.strides)
        return operand.model_copy(update={"strides": strides, "offset": fixed(operand.offset)})

    def step(one: Step) -> Step:
        return one.model_copy(update={"inputs": tuple(map(view, one.inputs)), "outputs": tuple(map(view, one.outputs))})

    sized = tuple(b.model_copy(update={"size": fixed(b.size), "offset": None}) for b in program.buffers)
    return plan_arena(
        program.model_copy(
            update={
                "buffers": sized,
                "steps": tuple(map(step, program.steps)),
                "outputs": {name: view(operand) for name, operand in program.outputs.items()},
            }
        )
    )
