"""Writes a program's steps as one function of Relax, TVM's graphs: calls of kernels on one arena, in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from enginewright.plugins.steps.x86_levels import Level
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.hidden_taps import with_tap_outputs
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_schema import port_of

from ..section import RUN_STEP, STEP, STEP_WITH_TAPS, StepArguments, arguments_of, stored_type
from . import ops_attention, ops_elementwise, ops_linear, ops_narrow, ops_routing, ops_rows
from .kernel import Argument, Handler, Kernel
from .schedules import NONE, Schedules

HANDLERS: dict[str, Handler] = {
    **ops_rows.HANDLERS,
    **ops_elementwise.HANDLERS,
    **ops_linear.HANDLERS,
    **ops_attention.HANDLERS,
    **ops_routing.HANDLERS,
    **ops_narrow.HANDLERS,
}
"""Ops of lowered programs -> the functions that write their kernels."""


@dataclass(frozen=True)
class Call:
    """A call of the kernel of step ``index``, with its arguments. ``kernel`` is None if the cpu target's kernel runs
    the step.
    """

    index: int
    kernel: str | None
    arguments: tuple[Argument, ...] = ()


@dataclass
class Kernels:
    """The kernels of a program, each written once, and their calls in order.

    Attributes:
        functions: the kernels by name.
        calls: the calls.
        names: the signature of a kernel -> its name.
    """

    functions: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, index: int, kernel: Kernel, write: Handler) -> None:
        name = self.names.get(kernel.signature)
        if name is None:
            name = f"{kernel.step.op}_{len(self.names)}"
            with kernel.written(name) as functions:
                write(kernel)
            self.functions[name] = functions[0]
            self.names[kernel.signature] = name
        self.calls.append(Call(index, name, tuple(kernel.arguments)))


def kernels_of(
    program: LoweredProgram,
    level: Level,
    ours: Collection[str] = (),
    schedules: Schedules = NONE,
    handlers: Mapping[str, Handler] = HANDLERS,
) -> Kernels:
    """Writes the kernels of all steps of a program.

    Args:
        program: the program.
        level: the level for which they are compiled.
        ours: the ops that the cpu target's kernels run instead.
        schedules: the records of products.
        handlers: the functions that write kernels, by op.

    Raises:
        UnsupportedModelError: a step has no kernel; names the first one.
    """
    kernels = Kernels()
    for index, step in enumerate(program.steps):
        write = handlers.get(step.op)
        if write is None:
            raise UnsupportedModelError(
                f"step {index} ({step.op} at {step.where}): {level.owner} has no such op", hint=level.without
            )
        if step.op in ours:
            kernels.calls.append(Call(index, None))
            continue
        kernels.add(index, Kernel(step, program, level, schedules), write)
    return kernels


def step_module(
    program: LoweredProgram,
    level: Level,
    ours: Collection[str] = (),
    schedules: Schedules = NONE,
    handlers: Mapping[str, Handler] = HANDLERS,
) -> tvm.IRModule:
    """Returns a module with the kernels and the function ``step``, which calls them; for a program with taps also
    ``step_with_taps``.

    Arguments and errors are those of ``kernels_of``.
    """
    whole, of_taps = with_tap_outputs(program)
    kernels = kernels_of(whole, level, ours, schedules, handlers)
    builder = relax.BlockBuilder()
    names = {name: builder.add_func(function, name) for name, function in kernels.functions.items()}
    _write_step(builder, STEP, whole, [call for call in kernels.calls if call.index not in of_taps], names)
    if of_taps:
        _write_step(builder, STEP_WITH_TAPS, whole, kernels.calls, names)
    return builder.get()


def _write_step(
    builder: relax.BlockBuilder,
    name: str,
    program: LoweredProgram,
    calls: Sequence[Call],
    kernels: Mapping[str, relax.GlobalVar],
) -> None:
    """Adds a function ``name`` that makes these calls, in order."""
    arguments_of_step = arguments_of(program)
    uses = {use.name: use for use in program.weights}
    parameters = _Parameters(arguments_of_step, [stored_type(uses[weight]) for weight in arguments_of_step.weights])
    with builder.function(name, parameters.all, attrs={"relax.force_pure": False}, pure=False):
        expressions: dict[Argument, relax.Expr] = {}
        for call in calls:
            if call.kernel is None:
                number = relax.prim_value(tirx.IntImm("int64", call.index))
                builder.emit(relax.Call(relax.ExternFunc(RUN_STEP), [number], ty_args=[relax.TupleType([])]))
                continue
            arguments = []
            for argument in call.arguments:
                if argument not in expressions:
                    expressions[argument] = parameters.take(builder, argument)
                arguments.append(expressions[argument])
            builder.emit(relax.Call(kernels[call.kernel], arguments, ty_args=[]))
        builder.emit_func_output(relax.Tuple([]))


def _vector(name: str, dtype: str, dims: int = 1) -> relax.Var:
    return relax.Var(name, relax.TensorType(dtype=dtype, ndim=dims))


@dataclass
class _Parameters:
    """The parameters of ``step``: the step inputs, the arena in each type, and as tuples the weights and the caches."""

    given: StepArguments
    weight_types: Sequence[str]

    def __post_init__(self) -> None:
        self._inputs = {
            name: _vector(f"input{i}", DTYPES[port.dtype].tvm, len(port.shape))
            for i, (name, port) in enumerate((name, port_of(name)) for name in self.given.inputs)
        }
        self._arena = {dtype: _vector(f"arena_{dtype}", dtype) for dtype in self.given.arena}
        kinds = [relax.TensorType(dtype=dtype, ndim=1) for dtype in self.weight_types]
        self._weights = relax.Var("weights", relax.TupleType(kinds))
        caches = [relax.TensorType(dtype="float32", ndim=1) for _ in range(2 * len(self.given.caches))]
        self._caches = relax.Var("caches", relax.TupleType(caches))
        self.all = [*self._inputs.values(), *self._arena.values(), self._weights, self._caches]

    def take(self, builder: relax.BlockBuilder, argument: Argument) -> relax.Expr:
        if argument.kind == "number":
            return relax.prim_value(tirx.IntImm("int64", argument.value))
        if argument.kind == "input":
            return self._inputs[argument.name]
        if argument.kind == "arena":
            return self._arena[argument.name]
        if argument.kind == "weight":
            return builder.emit(relax.TupleGetItem(self._weights, self.given.weights.index(argument.name)))
        place = 2 * self.given.caches.index(argument.name) + (argument.kind == "values")
        return builder.emit(relax.TupleGetItem(self._caches, place))
