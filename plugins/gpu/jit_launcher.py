"""Launches calls with Triton's JIT, on a CUDA device, or on the CPU in Triton's interpreter.

The interpreter is used if TRITON_INTERPRET=1 was set before Triton was imported. Five of its functions are replaced:
three to correct bfloat16 and two to make it faster; see ``prepare_interpreter``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from .call import Call
from .choose_tiles import choose_tile
from .specs import AttentionShape, kernel_function, taken_constants
from .tiles import Tile, attention_tiles, gpu_of


class JitLauncher:
    """Launches calls with Triton, on the device of their tensors, or in the interpreter if the environment says so.

    Args:
        capability: the compute capability for which tiles are chosen.
        interpreted: True if kernels are interpreted, without a GPU.
    """

    def __init__(self, capability: int = 80, *, interpreted: bool = True) -> None:
        self._capability, self._interpreted = capability, interpreted

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        """Returns the tile for an attention layer. ``decode``: True for decode steps."""
        return tile_of(shape, self._capability, decode=decode, interpreted=self._interpreted)

    def resident(self, call: Call) -> int:
        """Returns 4, an estimate of the number of programs that a multiprocessor runs at a time."""
        return 4

    def bind(self, call: Call) -> Callable[[], object]:
        """Returns a function that launches the call."""
        prepare_interpreter()
        function: Any = kernel_function(call.kernel)[call.grid]
        constants = taken_constants(call.kernel, call.constants)
        arguments = {**call.arguments, **constants, "num_warps": call.warps, "num_stages": call.stages}
        return lambda: function(**arguments)


@cache
def tile_of(shape: AttentionShape, capability: int, *, decode: bool, interpreted: bool) -> Tile:
    """Returns the tile for an attention layer. For the interpreter it is the first of the candidates, without
    compiling.
    """
    if interpreted:
        return next(attention_tiles(shape.tile_case(decode=decode), gpu_of(capability)))
    return choose_tile(shape, capability, decode=decode)


@cache
def prepare_interpreter() -> None:
    """Corrects bfloat16 in Triton's interpreter, and makes the interpreter faster. No other result changes."""
    _interpret_bfloat16()
    _make_interpreter_faster()


def _make_interpreter_faster() -> None:
    """Removes repeated work from Triton's interpreter, a quarter of its time.

    At each launch and each call of a device function it searches Triton's modules for the functions that it replaces;
    their names are kept here. For each array it builds a table of numpy's types; each type is kept. For each sum or
    product of integers it computes whether the result overflows, for an assertion that exists in debug mode alone; the
    check is switched off.
    """
    from triton import language
    from triton.runtime import interpreter

    type_of = interpreter._get_np_dtype

    @cache
    def names_in(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names_in(package):
            if language.core.is_builtin(member := getattr(package, name)):  # else it is replaced already
                interpreter._patch_attr(package, name, member, builder, scope)

    @cache
    def type_of_scalar(scalar: Any) -> Any:
        return type_of(scalar)

    def get_np_dtype(of: Any) -> Any:
        return np.dtype(np.uint64) if of.scalar.is_ptr() else type_of_scalar(of.scalar)

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, get_np_dtype
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _interpret_bfloat16() -> None:
    """Corrects bfloat16 in Triton's interpreter, which stores its bits in arrays of uint16.

    Without the correction it multiplies the bits as integers, treats integers as bits when it converts them, and may
    lose a factor of 2 when rounding to bfloat16 carries into the exponent.
    """
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widened(x: Any) -> Any:
        if x.dtype.scalar != bfloat16:
            return x
        return interpreter.TensorHandle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def convert_float(x: Any, of: Any, to: Any, rounding: Any) -> Any:
        if (of, to) == (float32, bfloat16):
            return x.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(x, of, to, rounding)

    def create_si_to_fp(self: Any, x: Any, to: Any) -> Any:
        if to.scalar == bfloat16:
            return self.cast_impl(self.cast_impl(x, float32), to)
        return self.cast_impl(x, to)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_si_to_fp = create_si_to_fp
    interpreter._convert_float = convert_float


@contextmanager
def products_in_order() -> Iterator[None]:
    """A context in which Triton's interpreter adds the terms of every element of a product in the same order.

    Otherwise it calls numpy's library, in which the order of an element's sum depends on its position in the tile. An
    instruction of tensor cores treats all elements alike.
    """
    from triton.runtime import interpreter

    prepare_interpreter()
    builder = interpreter.InterpreterBuilder
    library = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = (x.data.view(ml_dtypes.bfloat16) if x.data.dtype == np.uint16 else x.data for x in (a, b))
        terms = left.astype(np.float32)[:, :, None] * right.astype(np.float32)
        return interpreter.TensorHandle(d.data + terms.sum(axis=1), d.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = library
