"""Floats of fewer bits, by the bits of those of 32."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from .kernel import Expr, f32, vector


def floats(lanes: int) -> str:
    return "float32" if lanes == 1 else f"float32x{lanes}"


def half_to_float(bits: Expr, lanes: int) -> Expr:
    """f16 given as its bits."""
    return T.cast(T.reinterpret("float16" if lanes == 1 else f"float16x{lanes}", bits), floats(lanes))


def first_of_pair(words: Expr, lanes: int) -> Expr:
    """Of words with two bf16 the one in the low half."""
    return T.reinterpret(floats(lanes), words << vector(T.int32(16), lanes))


def second_of_pair(words: Expr, lanes: int) -> Expr:
    """The other one."""
    return T.reinterpret(floats(lanes), T.bitwise_and(words, vector(T.int32(-65536), lanes)))


def fp8_to_float(codes: Expr, lanes: int) -> Expr:
    """e4m3 given as bytes, of finite values: its bits where a float has them, and the exponent's bias by a product."""
    bits = T.Bind(T.cast(codes, "int32" if lanes == 1 else f"int32x{lanes}"))
    magnitude = T.bitwise_and(bits, vector(T.int32(0x7F), lanes)) << vector(T.int32(20), lanes)
    sign = T.bitwise_and(bits, vector(T.int32(0x80), lanes)) << vector(T.int32(24), lanes)
    return T.reinterpret(floats(lanes), T.bitwise_or(magnitude, sign)) * vector(f32(2.0**120), lanes)
