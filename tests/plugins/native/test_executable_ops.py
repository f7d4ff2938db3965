"""Each op of the lowered program through the interpreter, against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from enginewright.plugins.native.executable import isas
from enginewright.runtime.shared.op_schema import OPS
from tests.plugins.native.lowered_builder import LoweredBuilder, R, T, step_input, view

Float = npt.NDArray[np.float32]
EPS32 = float(np.finfo(np.float32).eps)

pytestmark = pytest.mark.parametrize("isa", isas())
sizes = pytest.mark.parametrize(("tokens", "width"), [(1, 5), (7, 64), (33, 96)])


def values(rng: np.random.Generator, *shape: int) -> Float:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@sizes
@pytest.mark.parametrize("layout", ["rows", "panel32"])
def test_embedding(isa: str, tokens: int, width: int, layout: str, rng: np.random.Generator) -> None:
    b = LoweredBuilder()
    table = values(rng, 70, width)
    step = b.step("embedding", [b.input("ids"), b.weight(table, layout)], [b.buffer(T, width)])
    ids = rng.integers(0, 70, tokens).tolist()
    (out,) = b.build(isa=isa).trace(step_input([ids]), step)
    np.testing.assert_array_equal(out, table[ids])


@sizes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_linear(isa: str, tokens: int, width: int, bias: bool, threads: int, rng: np.random.Generator) -> None:
    n = 2 * width + 3
    x, weight, added = values(rng, tokens, width), values(rng, n, width), values(rng, n)
    b = LoweredBuilder()
    operands = [b.values(x), b.weight(weight, "panel32"), *([b.weight(added)] if bias else [])]
    step = b.step("linear", operands, [b.buffer(T, n)])
    (out,) = b.run(step, tokens, isa=isa, threads=threads)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + (added if bias else 0)
    # The error of a sum of K products grows with sqrt(K); each product is of size 1.
    np.testing.assert_allclose(out, expected, rtol=0, atol=8 * EPS32 * math.sqrt(width) * math.sqrt(width))


@sizes
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_norms(
    isa: str, tokens: int, width: int, layer: bool, add: bool, affine: bool, rng: np.random.Generator
) -> None:
    x, residual = values(rng, tokens, width), values(rng, tokens, width)
    scale, shift = values(rng, width), values(rng, width)
    b = LoweredBuilder()
    inputs = [b.values(x), *([b.values(residual)] if add else [])]
    attrs: dict[str, float | bool] = {"eps": 1e-5, "has_weight": affine}
    if affine:
        inputs.append(b.weight(scale))
    if layer:
        attrs["has_bias"] = affine
        inputs += [b.weight(shift)] if affine else []
    outputs = [b.buffer(T, width) for _ in range(2 if add else 1)]
    step = b.step(("add_" if add else "") + ("layer_norm" if layer else "rms_norm"), inputs, outputs, **attrs)
    normed, *total = b.run(step, tokens, isa=isa)
    wide = x.astype(np.float64) + (residual if add else 0)
    centred = wide - wide.mean(-1, keepdims=True) if layer else wide
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = expected * (scale if affine else 1) + (shift if layer and affine else 0)
    np.testing.assert_allclose(normed, expected, rtol=64 * EPS32, atol=64 * EPS32)
    if add:
        np.testing.assert_array_equal(total[0], x + residual)


@sizes
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_its_table(isa: str, tokens: int, width: int, interleaved: bool, rng: np.random.Generator) -> None:
    heads, size, freqs = 3, width + 3, width // 2
    inv_freq = (10000.0 ** -np.linspace(0, 1, freqs)).astype(np.float32)
    x = values(rng, tokens, heads, size)
    b = LoweredBuilder()
    table = b.buffer(T, 2 * freqs)
    rope_table = b.step("rope_table", [b.input("positions"), b.weight(inv_freq)], [table], scale=0.5)
    step = b.step("rope", [b.values(x), table], [b.buffer(T, heads, size)], interleaved=interleaved)
    (out,) = b.run(step, tokens, isa=isa)
    (trig,) = b.run(rope_table, tokens, isa=isa)
    # The angle itself is a float32 product, as in transformers.
    angle = (np.arange(tokens, dtype=np.float32)[:, None] * inv_freq[None]).astype(np.float64)
    np.testing.assert_allclose(trig, 0.5 * np.concatenate([np.cos(angle), np.sin(angle)], 1), atol=8 * EPS32)
    cos, sin = (part[:, None].astype(np.float64) for part in np.split(trig, 2, axis=1))
    expected = x.astype(np.float64)
    i = np.arange(freqs)
    first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + freqs)
    expected[..., first] = x[..., first] * cos - x[..., second] * sin
    expected[..., second] = x[..., second] * cos + x[..., first] * sin
    np.testing.assert_allclose(out, expected, atol=16 * EPS32)


def activate(kind: str, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    assert kind == "gelu_tanh"
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@sizes
@pytest.mark.parametrize("kind", OPS["gated_activation"].values("kind"))
def test_gated_activation(isa: str, tokens: int, width: int, kind: str, rng: np.random.Generator) -> None:
    x = values(rng, tokens, 2 * width)
    b = LoweredBuilder()
    step = b.step("gated_activation", [b.values(x)], [b.buffer(T, width)], kind=kind)
    (out,) = b.run(step, tokens, isa=isa)
    gate, up = (half.astype(np.float64) for half in np.split(x, 2, axis=1))
    np.testing.assert_allclose(out, activate(kind, gate) * up, rtol=16 * EPS32, atol=16 * EPS32)


@sizes
def test_gated_activation_of_some_channels(isa: str, tokens: int, width: int, rng: np.random.Generator) -> None:
    """Channels low .. width - 1, read where they lie in a wider buffer: the bits of the whole step."""
    b = LoweredBuilder()
    x = b.values(values(rng, tokens, 2 * width))
    whole = b.step("gated_activation", [x], [b.buffer(T, width)], kind="silu")
    low = width // 3
    halves = [view(x, (T, width - low), (2 * width, 1), at) for at in (low, width + low)]
    part = b.step("gated_activation", halves, [b.buffer(T, width - low)], kind="silu")
    program = b.build(isa=isa)
    ids = step_input([list(range(tokens))])
    (whole_output,), (got,) = program.trace(ids, whole), program.trace(ids, part)
    np.testing.assert_array_equal(got, whole_output[:, low:])


@pytest.mark.parametrize("shape", [(5,), (3, 4)])
def test_take_rows(isa: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = values(rng, 9, *shape)
    b = LoweredBuilder()
    step = b.step("take_rows", [b.values(x), b.input("rows")], [b.buffer(R, *shape)])
    rows = [8, 0, 3, 3]
    (out,) = b.build(isa=isa).trace(step_input([list(range(9))], rows=rows), step)
    np.testing.assert_array_equal(out, x[rows])


UNARY = {
    "neg": np.negative, "abs": np.abs, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "erf": np.vectorize(math.erf),
    **{kind: (lambda x, kind=kind: activate(kind, x)) for kind in ("sigmoid", "silu", "gelu", "gelu_tanh", "relu")},
}  # fmt: skip
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip


@pytest.mark.parametrize("fn", sorted(UNARY))
@pytest.mark.parametrize("tokens", [1, 9])
def test_elementwise_of_one(isa: str, fn: str, tokens: int, rng: np.random.Generator) -> None:
    x = values(rng, tokens, 37)
    x = np.abs(x) + np.float32(0.01) if fn in ("log", "sqrt", "rsqrt") else x
    b = LoweredBuilder()
    step = b.step("elementwise", [b.values(x)], [b.buffer(T, 37)], fn=fn)
    (out,) = b.run(step, tokens, isa=isa)
    np.testing.assert_allclose(out, UNARY[fn](x.astype(np.float64)), rtol=16 * EPS32, atol=4 * EPS32)


@pytest.mark.parametrize("fn", sorted(BINARY))
@pytest.mark.parametrize("operand", ["same", "row", "scalar", "scalar first"])
def test_elementwise_of_two(isa: str, fn: str, operand: str, rng: np.random.Generator) -> None:
    tokens, width = 6, 21
    x, y = values(rng, tokens, width), values(rng, tokens, width)
    x, y = (np.abs(x) + np.float32(0.1), y) if fn == "pow" else (x, y + np.float32(3))
    b = LoweredBuilder()
    attrs: dict[str, float | str | bool] = {"fn": fn}
    left = b.values(x)
    expected = BINARY[fn](x.astype(np.float64), y)
    inputs = [left]
    if operand == "same":
        inputs.append(b.values(y))
    elif operand == "row":  # broadcast over tokens
        inputs.append(view(b.weight(y[0]), (T, width), (0, 1)))
        expected = BINARY[fn](x.astype(np.float64), y[0])
    else:
        attrs |= {"scalar": 1.5, "scalar_first": operand == "scalar first"}
        pair = (np.float64(1.5), x.astype(np.float64))
        expected = BINARY[fn](*(pair if operand == "scalar first" else reversed(pair)))
    step = b.step("elementwise", inputs, [b.buffer(T, width)], **attrs)
    (out,) = b.run(step, tokens, isa=isa)
    # pow is exp(y log x), whose relative error grows with |y log x|, below 16 here.
    np.testing.assert_allclose(out, expected, rtol=(64 if fn == "pow" else 2) * EPS32, atol=EPS32)


def test_where_takes_a_float_condition(isa: str, rng: np.random.Generator) -> None:
    condition = np.array([[0.0, 1.0, 2.0, 0.0, -0.0]] * 3, np.float32)
    x, y = values(rng, 3, 5), values(rng, 3, 5)
    b = LoweredBuilder()
    step = b.step("elementwise", [b.values(condition), b.values(x), b.values(y)], [b.buffer(T, 5)], fn="where")
    (out,) = b.run(step, 3, isa=isa)
    np.testing.assert_array_equal(out, np.where(condition != 0, x, y))


@pytest.mark.parametrize("tokens", [1, 19])
def test_integers_and_cast(isa: str, tokens: int) -> None:
    b = LoweredBuilder()
    shifted, floats = b.buffer(T, dtype="i32"), b.buffer(T)
    first = b.step("elementwise", [b.input("positions")], [shifted], fn="add", scalar=2)
    second = b.step("elementwise", [shifted], [floats], fn="cast")
    (integers,), (cast,) = b.run(first, tokens, isa=isa), b.run(second, tokens, isa=isa)
    assert integers.dtype == np.int32 and cast.dtype == np.float32
    np.testing.assert_array_equal(integers, np.arange(tokens) + 2)
    np.testing.assert_array_equal(cast, np.arange(tokens, dtype=np.float32) + 2)


@pytest.mark.parametrize("tokens", [1, 11])
def test_copies_concatenate_and_transpose(isa: str, tokens: int, rng: np.random.Generator) -> None:
    x, y = values(rng, tokens, 4, 6), values(rng, tokens, 4, 3)
    b = LoweredBuilder()
    joined = b.buffer(T, 4, 9)
    left, right = (b.values(a) for a in (x, y))
    b.step("copy", [left], [view(joined, (T, 4, 6), (36, 9, 1))])
    b.step("copy", [right], [view(joined, (T, 4, 3), (36, 9, 1), offset=6)])
    step = b.step("copy", [view(joined, (4, T, 9), (9, 36, 1))], [b.buffer(4, T, 9)])
    (out,) = b.run(step, tokens, isa=isa)
    np.testing.assert_array_equal(out, np.concatenate([x, y], 2).transpose(1, 0, 2))


@sizes
@pytest.mark.parametrize("kind", OPS["reduce"].values("kind"))
def test_reduce(isa: str, tokens: int, width: int, kind: str, rng: np.random.Generator) -> None:
    x = values(rng, tokens, 3, width)
    b = LoweredBuilder()
    step = b.step("reduce", [b.values(x)], [b.buffer(T, 3, 1)], kind=kind)
    (out,) = b.run(step, tokens, isa=isa)
    expected = getattr(np, kind)(x.astype(np.float64), axis=-1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=0, atol=8 * EPS32 * width)
