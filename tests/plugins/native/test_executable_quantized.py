"""bf16 and int8 ops of the lowered program through the interpreter, against the ew ops' references in torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from enginewright.passes.ops import quantization
from enginewright.plugins.native.executable import isas
from tests.plugins.native.lowered_builder import BFLOAT16, LoweredBuilder, T, step_input

Float = npt.NDArray[np.float32]
EPS32 = float(np.finfo(np.float32).eps)

pytestmark = pytest.mark.parametrize("isa", isas())
sizes = pytest.mark.parametrize(("tokens", "width"), [(1, 5), (7, 64), (33, 98)])
groups = pytest.mark.parametrize(("weight_group", "activation_group"), [(0, 0), (32, 32), (64, 64), (32, 0), (0, 32)])


def values(rng: np.random.Generator, *shape: int) -> Float:
    return rng.standard_normal(shape).astype(np.float32)


def quantized(weight: Float, group: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """int8 [.., K] with float16 scales [.., groups], each group's largest value being 127."""
    integers, scales, _ = quantization.quantize_activation(torch.from_numpy(weight), group)
    return integers.numpy(), scales.numpy().astype(np.float16)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@sizes
def test_cast_bf16(isa: str, tokens: int, width: int, rng: np.random.Generator) -> None:
    x = values(rng, tokens, width)
    x[0, :4] = [np.inf, np.nan, 1.00390625, 1.01171875]  # the last two lie half way: to the even one
    b = LoweredBuilder()
    step = b.step("cast_bf16", [b.values(x)], [b.buffer(T, width, dtype="bf16", padding=2)])
    (out,) = b.run(step, tokens, isa=isa)
    assert out.dtype == BFLOAT16
    np.testing.assert_array_equal(out.astype(np.float32), x.astype(ml_dtypes.bfloat16).astype(np.float32))


@sizes
@pytest.mark.parametrize("layout", ["rows", "panel32x2"])
def test_embedding_of_bf16(isa: str, tokens: int, width: int, layout: str, rng: np.random.Generator) -> None:
    table = values(rng, 70, width).astype(ml_dtypes.bfloat16)
    b = LoweredBuilder()
    step = b.step("embedding", [b.input("ids"), b.weight(table, layout)], [b.buffer(T, width)])
    ids = rng.integers(0, 70, tokens).tolist()
    (out,) = b.build(isa=isa).trace(step_input([ids]), step)
    np.testing.assert_array_equal(out, table[ids].astype(np.float32))


@sizes
@pytest.mark.parametrize("bias", [False, True])
def test_linear_of_bf16(isa: str, tokens: int, width: int, bias: bool, rng: np.random.Generator) -> None:
    n = 2 * width + 3
    x, weight, added = values(rng, tokens, width), values(rng, n, width).astype(ml_dtypes.bfloat16), values(rng, n)
    b = LoweredBuilder()
    narrow = b.buffer(T, width, dtype="bf16", padding=2)
    b.step("cast_bf16", [b.values(x)], [narrow])
    operands = [narrow, b.weight(weight, "panel32x2"), *([b.weight(added)] if bias else [])]
    step = b.step("linear", operands, [b.buffer(T, n)], has_bias=bias)
    (out,) = b.run(step, tokens, isa=isa, threads=2)
    wide = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = wide @ weight.astype(np.float64).T + (added if bias else 0)
    # Products of bf16 are exact in float32, so the error is that of a sum of K of them.
    np.testing.assert_allclose(out, expected, rtol=0, atol=8 * EPS32 * width)


@sizes
@pytest.mark.parametrize("group", [0, 32, 64])
def test_quantize_activation(isa: str, tokens: int, width: int, group: int, rng: np.random.Generator) -> None:
    x = values(rng, tokens, width) * np.float32(10.0) ** rng.integers(-6, 6, (tokens, 1)).astype(np.float32)
    if tokens > 2:
        x[1], x[2, 0], x[3, -1] = 0, np.nan, -np.inf
    b = LoweredBuilder()
    b.quantized(b.values(x), group)
    expected = quantization.quantize_activation(torch.from_numpy(x), group)
    for out, reference in zip(b.run(len(b.steps) - 1, tokens, isa=isa), expected, strict=True):
        np.testing.assert_array_equal(out, reference.numpy())


@sizes
@groups
@pytest.mark.parametrize("bias", [False, True])
def test_quantized_linear(
    isa: str,
    tokens: int,
    width: int,
    weight_group: int,
    activation_group: int,
    bias: bool,
    rng: np.random.Generator,
) -> None:
    n = width + 29
    x, added = values(rng, tokens, width), values(rng, n)
    weight, scales = quantized(values(rng, n, width), weight_group)
    b = LoweredBuilder()
    operands = b.quantized(b.values(x), activation_group)
    operands += [b.weight(weight, "panel32x4"), b.weight(scales, "panel32"), *([b.weight(added)] if bias else [])]
    step = b.step(
        "quantized_linear",
        operands,
        [b.buffer(T, n)],
        weight_group=weight_group,
        activation_group=activation_group,
        has_bias=bias,
    )
    (out,) = b.run(step, tokens, isa=isa, threads=2)
    expected = quantization.quantized_linear(
        *quantization.quantize_activation(torch.from_numpy(x), activation_group),
        torch.from_numpy(weight),
        torch.from_numpy(scales),
        None,
        torch.from_numpy(added) if bias else None,
        8,
        weight_group,
        activation_group,
    ).numpy()
    if isa == "portable":  # has no fma, so its products round too
        np.testing.assert_allclose(out, expected, rtol=0, atol=8 * EPS32 * width)
    else:
        np.testing.assert_array_equal(out, expected)


@sizes
@pytest.mark.parametrize("group", [0, 32])
def test_quantized_embedding(isa: str, tokens: int, width: int, group: int, rng: np.random.Generator) -> None:
    table, scales = quantized(values(rng, 70, width), group)
    b = LoweredBuilder()
    operands = [b.input("ids"), b.weight(table, "panel32x4"), b.weight(scales, "panel32")]
    step = b.step("quantized_embedding", operands, [b.buffer(T, width)], group_size=group)
    ids = rng.integers(0, 70, tokens)
    (out,) = b.build(isa=isa).trace(step_input([ids.tolist()]), step)
    expected = quantization.quantized_embedding(
        torch.from_numpy(ids), torch.from_numpy(table), torch.from_numpy(scales), None, 8, group
    )
    np.testing.assert_array_equal(out, expected.numpy())


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("width", [37, 128])
def test_rows_alone_and_together(isa: str, kind: str, width: int, rng: np.random.Generator) -> None:
    """A token's bits are the same alone and among others, whatever the block that its row falls into."""
    tokens, n = 29, 45
    x = values(rng, tokens, width)
    b = LoweredBuilder()
    if kind == "bf16":
        narrow = b.buffer(T, width, dtype="bf16", padding=2)
        b.step("cast_bf16", [b.values(x)], [narrow])
        weight = values(rng, n, width).astype(ml_dtypes.bfloat16)
        step = b.step("linear", [narrow, b.weight(weight, "panel32x2")], [b.buffer(T, n)])
    else:
        integers, scales = quantized(values(rng, n, width), 32)
        operands = [*b.quantized(b.values(x), 32), b.weight(integers, "panel32x4"), b.weight(scales, "panel32")]
        step = b.step("quantized_linear", operands, [b.buffer(T, n)], weight_group=32, activation_group=32)
    program = b.build(isa=isa, threads=2)
    together = program.trace(step_input([list(range(tokens))]), step)[0]
    for some in ([3], [28, 0], list(range(5, 18))):
        np.testing.assert_array_equal(program.trace(step_input([some]), step)[0], together[some])


def test_int8_gives_the_same_integers_everywhere(isa: str, rng: np.random.Generator) -> None:
    """With whole numbers as scales nothing rounds, so every instruction set gives the exact product."""
    width, n, tokens = 70, 33, 6
    weight = rng.integers(-128, 128, (n, width)).astype(np.int8)
    x = rng.integers(-127, 128, (tokens, width)).astype(np.float32)
    x[:, ::32] = 127  # so that a group's scale is 1
    b = LoweredBuilder()
    operands = [
        *b.quantized(b.values(x), 32),
        b.weight(weight, "panel32x4"),
        b.weight(np.ones((n, 3), np.float16), "panel32"),
    ]
    step = b.step("quantized_linear", operands, [b.buffer(T, n)], weight_group=32, activation_group=32)
    np.testing.assert_array_equal(b.run(step, tokens, isa=isa)[0], x @ weight.astype(np.float32).T)
