"""Elementary functions on vectors of floats, made of add, multiply and fma without the C library, and conversions of
formats.

The polynomials are those of plugins/cpu/kernels/vector_math.h, which has their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm.tirx.script.builder import ir as T

from .kernel import Expr, f32, vector

Lanes = int


def floats(lanes: Lanes) -> str:
    return "float32" if lanes == 1 else f"float32x{lanes}"


def polynomial(x: Expr, coefficients: Sequence[float], lanes: Lanes) -> Expr:
    """Evaluates a polynomial by Horner's scheme; ``coefficients`` begin with the highest power."""
    value = vector(f32(coefficients[0]), lanes)
    for c in coefficients[1:]:
        value = T.fma(value, x, vector(f32(c), lanes))
    return value


def _power_of_2(n: Expr, lanes: Lanes) -> Expr:
    """Computes 2^n for whole n from -126 to 127, by the bits of a float."""
    integer = "int32" if lanes == 1 else f"int32x{lanes}"
    bits = (T.cast(n, integer) + vector(T.int32(127), lanes)) << vector(T.int32(23), lanes)
    return T.reinterpret(floats(lanes), bits)


def exp(x: Expr, lanes: Lanes) -> Expr:
    """Computes e^x within 2 ulp: exactly 1 at 0, and exactly 0 below -110 and at -inf."""
    low, high = vector(f32(-110.0), lanes), vector(f32(89.0), lanes)
    x = T.Bind(T.Select(x < low, low, T.Select(x > high, high, x)))  # a NaN stays
    n = T.Bind(T.call_llvm_pure_intrin(floats(lanes), "llvm.nearbyint", x * vector(f32(1.44269504), lanes)))
    r = T.fma(n, vector(f32(-0.693359375), lanes), x)
    r = T.Bind(T.fma(n, vector(f32(2.12194440e-4), lanes), r))
    p = polynomial(r, (0.0013950601, 0.00836895313, 0.041666206, 0.166665182, 0.5), lanes)
    p = T.Bind(T.fma(p * r, r, r) + vector(f32(1.0), lanes))
    half = T.Bind(T.call_llvm_pure_intrin(floats(lanes), "llvm.nearbyint", n * vector(f32(0.5), lanes)))
    return T.Bind(p * _power_of_2(half, lanes) * _power_of_2(n - half, lanes))


def _copysign(magnitude: Expr, sign: Expr, lanes: Lanes) -> Expr:
    return T.Select(sign < vector(f32(0.0), lanes), vector(f32(0.0), lanes) - magnitude, magnitude)


def absolute(x: Expr, lanes: Lanes) -> Expr:
    zero = vector(f32(0.0), lanes)
    return T.Select(x < zero, zero - x, x)


def tanh(x: Expr, lanes: Lanes) -> Expr:
    x = T.Bind(x)
    a, s = T.Bind(absolute(x, lanes)), T.Bind(x * x)
    p = polynomial(s, (-0.00571704516, 0.020650588, -0.0537434965, 0.133314908, -0.333332837), lanes)
    near = T.fma(p * s, x, x)
    one = vector(f32(1.0), lanes)
    far = one - vector(f32(2.0), lanes) / (exp(a + a, lanes) + one)
    return T.Bind(T.Select(a < vector(f32(0.625), lanes), near, _copysign(far, x, lanes)))


def erf(x: Expr, lanes: Lanes) -> Expr:
    """Computes erf(x) with an error of at most 1.5e-7."""
    x = T.Bind(x)
    four, one = vector(f32(4.0), lanes), vector(f32(1.0), lanes)
    a = absolute(x, lanes)
    a = T.Bind(T.Select(a > four, four, a))
    p = polynomial(
        T.Bind(x * x),
        (7.88912294e-05, -0.000802084222, 0.00518953567, -0.0268544443, 0.112836003, -0.37612626, 1.12837911),
        lanes,
    )
    q = polynomial(
        a,
        (
            0.000187971629,
            -0.00296400557,
            0.0219064746,
            -0.103256203,
            -0.637965024,
            -1.12720227,
            -0.000312469754,
        ),
        lanes,
    )
    return T.Bind(T.Select(a < one, p * x, _copysign(one - exp(q, lanes), x, lanes)))


def sigmoid(x: Expr, lanes: Lanes) -> Expr:
    one = vector(f32(1.0), lanes)
    return one / (one + exp(_negative(x, lanes), lanes))


def silu(x: Expr, lanes: Lanes) -> Expr:
    x, one = T.Bind(x), vector(f32(1.0), lanes)
    return x / (one + exp(_negative(x, lanes), lanes))


def _negative(x: Expr, lanes: Lanes) -> Expr:
    return vector(f32(0.0), lanes) - x


def relu(x: Expr, lanes: Lanes) -> Expr:
    zero = vector(f32(0.0), lanes)
    return T.Select(x < zero, zero, x)


def gelu(x: Expr, lanes: Lanes) -> Expr:
    x = T.Bind(x)
    inner = vector(f32(1.0), lanes) + erf(x * vector(f32(0.707106781), lanes), lanes)
    return vector(f32(0.5), lanes) * x * inner


def gelu_tanh(x: Expr, lanes: Lanes) -> Expr:
    x = T.Bind(x)
    cubic = T.fma(x * x * x, vector(f32(0.044715), lanes), x)
    inner = vector(f32(1.0), lanes) + tanh(cubic * vector(f32(0.797884561), lanes), lanes)
    return vector(f32(0.5), lanes) * x * inner


def relu2(x: Expr, lanes: Lanes) -> Expr:
    positive = T.Bind(relu(x, lanes))
    return positive * positive


ACTIVATIONS: Mapping[str, Callable[[Expr, Lanes], Expr]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
    "sigmoid": sigmoid,
    "tanh": tanh,
}


# ---- floats of fewer bits, by the bits of those of 32


def half_to_float(bits: Expr, lanes: Lanes) -> Expr:
    """Converts f16 bits to floats."""
    return T.cast(T.reinterpret("float16" if lanes == 1 else f"float16x{lanes}", bits), floats(lanes))


def first_of_pair(words: Expr, lanes: Lanes) -> Expr:
    """Returns the first (low) bf16 of each word as a float."""
    return T.reinterpret(floats(lanes), words << vector(T.int32(16), lanes))


def second_of_pair(words: Expr, lanes: Lanes) -> Expr:
    """Returns the second (high) bf16 of each word as a float."""
    return T.reinterpret(floats(lanes), T.bitwise_and(words, vector(T.int32(-65536), lanes)))


def fp8_to_float(codes: Expr, lanes: Lanes) -> Expr:
    """Converts finite e4m3 bytes to floats. Their bits are moved into a float's, and a product corrects the bias of the
    exponent.
    """
    bits = T.Bind(T.cast(codes, "int32" if lanes == 1 else f"int32x{lanes}"))
    magnitude = T.bitwise_and(bits, vector(T.int32(0x7F), lanes)) << vector(T.int32(20), lanes)
    sign = T.bitwise_and(bits, vector(T.int32(0x80), lanes)) << vector(T.int32(24), lanes)
    return T.reinterpret(floats(lanes), T.bitwise_or(magnitude, sign)) * vector(f32(2.0**120), lanes)
