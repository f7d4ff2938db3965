"""Chooses the activations of a lowered program that are stored in 16 bits. Steps still compute in 32 bits."""

from __future__ import annotations

from collections.abc import Iterable

from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.lowered_program import Affine, Buffer, LoweredProgram, Operand

_PRODUCTS = frozenset({"linear", "grouped_linear"})
_MAKE_NARROW = _PRODUCTS | {
    *("embedding", "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated_activation", "combine_experts"),
    *("rope", "rope_kv_write", "paged_attention", "stored_convolution", "stored_scan", "stored_delta_rule"),
}
"""Steps whose float results are stored in 16 bits."""
_TAKE_NARROW = _PRODUCTS | {
    *("kv_write", "rope_kv_write", "paged_attention", "gated_activation", "rope", "combine_experts")
}
"""Steps whose kernels need their first float operands in 16 bits."""
_OTHERS = {"rope": 1, "rope_kv_write": 3, "combine_experts": 1}
"""The number of such operands, for steps where it isn't 1. Later operands, such as tables and weights, stay as they
are.
"""
_ALIKE = frozenset({"copy", "take_rows"})
"""Steps whose result has the type of their input, unless another step decides it."""


def narrow_floats(program: LoweredProgram, floats: Dtype) -> LoweredProgram:
    """Returns a program with its activations in ``floats``: the arguments and results of products, norms and attention.

    All other floats stay f32: tables of rotations, softmax and the choice of experts, and elementwise steps whose
    results no product reads. Strides count elements, so only types and sizes of buffers change.

    Args:
        program: a program with activations in f32, whose memory isn't planned yet.
        floats: bf16 or f16.
    """
    if floats == "f32":
        return program
    wide = {o.name for step in program.steps for o in (*step.inputs, *step.outputs) if _is_float(o)}
    narrow = wide & set(_asked(program))
    alike = [(s.inputs[0].name, s.outputs[0].name) for s in program.steps if s.op in _ALIKE and _is_float(s.outputs[0])]
    written: dict[str, int] = {}
    for step in program.steps:
        for operand in step.outputs:
            written[operand.name] = written.get(operand.name, 0) + 1
    for source, result in alike:  # in order: a copy of a copy follows
        if source in narrow and written[result] == 1:
            narrow.add(result)

    def typed(operand: Operand) -> Operand:
        if operand.kind == "buffer" and operand.name in narrow:
            return operand.model_copy(update={"dtype": floats})
        return operand

    def halved(buffer: Buffer) -> Buffer:
        if buffer.name not in narrow:
            return buffer
        constant, t, b, r = (size // 2 for size in buffer.size.coefficients())
        return buffer.model_copy(update={"size": Affine(constant, t, b, r)})

    steps = tuple(
        step.model_copy(update={"inputs": tuple(map(typed, step.inputs)), "outputs": tuple(map(typed, step.outputs))})
        for step in program.steps
    )
    outputs = {name: typed(operand) for name, operand in program.outputs.items()}
    buffers = tuple(map(halved, program.buffers))
    return program.model_copy(update={"steps": steps, "outputs": outputs, "buffers": buffers})


def _is_float(operand: Operand) -> bool:
    return operand.kind == "buffer" and operand.dtype == "f32"


def _asked(program: LoweredProgram) -> Iterable[str]:
    """Yields the names of buffers that some step must write, or read, in 16 bits."""
    for step in program.steps:
        if step.op in _MAKE_NARROW:
            yield from (operand.name for operand in step.outputs)
        if step.op in _TAKE_NARROW:
            count = _OTHERS.get(step.op, 3 if step.op == "kv_write" else 1)
            yield from (operand.name for operand in step.inputs[:count])
