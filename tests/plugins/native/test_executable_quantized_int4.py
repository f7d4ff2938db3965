"""Steps of weights of 4, 5 and 6 bits through the interpreter, against the ew ops' references in torch."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from enginewright.passes.ops import quantization
from enginewright.plugins.native.executable import isas
from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.lowered_program import Operand
from enginewright.runtime.shared.panel_layouts import Layout
from enginewright.runtime.shared.weight_formats import FORMATS, Storage
from tests.plugins.native.lowered_builder import LoweredBuilder, R, T, sound_program, step_input

Integers = npt.NDArray[np.int8]
Factors = npt.NDArray[np.float16] | npt.NDArray[np.int8]
Float = npt.NDArray[np.float32]
EPS32 = float(np.finfo(np.float32).eps)

pytestmark = pytest.mark.parametrize("isa", isas())
forms = pytest.mark.parametrize("offsets", [False, True])
shapes = pytest.mark.parametrize(
    ("tokens", "rows", "width", "group"),
    [
        (1, 5, 32, 32),
        (7, 70, 192, 64),
        (33, 45, 96, 32),
        (1, 37, 256, 128),
        (19, 33, 384, 128),
        (1, 33, 200, 200),
        (21, 70, 1544, 1544),
    ],
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def codes(
    rng: np.random.Generator, *shape: int, group: int, offsets: bool, bits: int = 4, block: int = 0
) -> tuple[Integers, Factors, Factors | None]:
    """Random integers of 4 bits, or more, scales and offsets, which may be in blocks."""
    groups = (*shape[:-1], shape[-1] // group)
    least = 0 if offsets else -(1 << (bits - 1))
    values = rng.integers(least, least + (1 << bits), shape).astype(np.int8)

    def factors(floats: Float) -> Factors:
        if block == 0:
            return floats.astype(np.float16)
        return quantization.scales_in_blocks(torch.from_numpy(floats), block).numpy()

    scales = factors(rng.uniform(0.01, 0.2, groups).astype(np.float32))
    return values, scales, factors(rng.standard_normal(groups).astype(np.float32)) if offsets else None


def stored(
    b: LoweredBuilder, values: Integers, scales: Factors, offsets: Factors | None, *, bits: int = 4, block: int = 0
) -> list[Operand]:
    dtype = cast("Dtype", f"{'i' if offsets is None else 'u'}{bits}")
    layout: Layout = "panel32x4" if bits == 8 else "panel32x8" if bits == 4 else "planes32"
    of_factors: Layout = "blocks16" if block == 16 else "blocks8" if block else "panel32"
    return [b.weight(values, layout, dtype), *(b.weight(f, of_factors) for f in (scales, offsets) if f is not None)]


def tensor(array: npt.NDArray[np.generic] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(np.asarray(array))


def check(out: npt.NDArray[np.generic], expected: torch.Tensor, isa: str, terms: int) -> None:
    if isa == "portable":  # has no fma, so its products round too; weights are at most some 4, activations too
        np.testing.assert_allclose(out, expected.numpy(), rtol=0, atol=32 * EPS32 * terms)
    else:
        np.testing.assert_array_equal(out, expected.numpy())


@shapes
@forms
@pytest.mark.parametrize("bias", [False, True])
def test_linear(
    isa: str, tokens: int, rows: int, width: int, group: int, offsets: bool, bias: bool, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    added = rng.standard_normal(rows).astype(np.float32)
    weight = codes(rng, rows, width, group=group, offsets=offsets)
    b = LoweredBuilder()
    operands = [*b.quantized(b.values(x), group), *stored(b, *weight), *([b.weight(added)] if bias else [])]
    attributes = {"weight_group": group, "activation_group": group, "has_bias": bias, "has_offsets": offsets}
    step = b.step("quantized_linear", operands, [b.buffer(T, rows)], **attributes)
    (out,) = b.run(step, tokens, isa=isa, threads=2)
    activations = quantization.quantize_activation(torch.from_numpy(x), group)
    expected = quantization.quantized_linear(
        *activations, *(tensor(w) for w in weight), tensor(added) if bias else None, 4, group, group
    )
    check(out, expected, isa, width)


@forms
def test_a_weight_is_value_times_scale_plus_offset(isa: str, offsets: bool, rng: np.random.Generator) -> None:
    """The product of what both sides stand for, in float64."""
    tokens, rows, width, group = 9, 40, 128, 64
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    weight = codes(rng, rows, width, group=group, offsets=offsets)
    b = LoweredBuilder()
    operands = [*b.quantized(b.values(x), group), *stored(b, *weight)]
    step = b.step(
        "quantized_linear", operands, [b.buffer(T, rows)],
        weight_group=group, activation_group=group, has_offsets=offsets,
    )  # fmt: skip
    (out,) = b.run(step, tokens, isa=isa)
    integers, scales, _ = quantization.quantize_activation(torch.from_numpy(x), group)
    exact = integers.double() * scales.double().repeat_interleave(group, dim=-1)

    def spread(factors: Factors | None) -> Float | float:
        return 0.0 if factors is None else np.repeat(factors.astype(np.float64), group, axis=-1)

    meant = weight[0] * spread(weight[1]) + spread(weight[2])
    # Few sums of integers, each rounded to 24 bits, of numbers up to some hundred.
    np.testing.assert_allclose(out, exact.numpy() @ meant.T, rtol=0, atol=64 * EPS32 * width)


@forms
def test_experts(isa: str, offsets: bool, rng: np.random.Generator) -> None:
    tokens, experts, rows, width, group = 13, 3, 37, 96, 32
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    bias = rng.standard_normal((experts, rows)).astype(np.float32)
    weight = codes(rng, experts, rows, width, group=group, offsets=offsets)
    starts = np.array([0, 4, 4, tokens], np.int32)
    b = LoweredBuilder()
    operands = [*b.quantized(b.values(x), group), b.weight(starts), *stored(b, *weight), b.weight(bias)]
    step = b.step(
        "quantized_grouped_linear", operands, [b.buffer(T, rows)],
        weight_group=group, activation_group=group, has_bias=True, has_offsets=offsets,
    )  # fmt: skip
    (out,) = b.run(step, tokens, isa=isa, threads=2)
    activations = quantization.quantize_activation(torch.from_numpy(x), group)
    expected = quantization.quantized_grouped_linear(
        *activations, tensor(starts), *(tensor(w) for w in weight), tensor(bias), 4, group, group
    )
    check(out, expected, isa, width)


@shapes
@forms
def test_embedding(
    isa: str, tokens: int, rows: int, width: int, group: int, offsets: bool, rng: np.random.Generator
) -> None:
    table = codes(rng, rows, width, group=group, offsets=offsets)
    b = LoweredBuilder()
    operands = [b.input("ids"), *stored(b, *table)]
    step = b.step("quantized_embedding", operands, [b.buffer(T, width)], group_size=group, has_offsets=offsets)
    ids = rng.integers(0, rows, tokens)
    (out,) = b.build(isa=isa).trace(step_input([ids.tolist()]), step)
    expected = quantization.quantized_embedding(torch.from_numpy(ids), *(tensor(t) for t in table), 4, group)
    np.testing.assert_array_equal(out, expected.numpy())


@pytest.mark.parametrize(
    ("bits", "group", "block", "offsets"),
    [
        *((5, 32, 0, False), (5, 32, 0, True), (4, 32, 8, True), (5, 32, 8, True), (6, 16, 16, False)),
        *((4, 16, 16, False), (4, 16, 16, True), (8, 32, 8, False), (8, 16, 0, False), (6, 64, 8, False)),
    ],
)
@pytest.mark.parametrize("tokens", [1, 23])
def test_as_files_of_gguf_have_them(
    isa: str, bits: int, group: int, block: int, offsets: bool, tokens: int, rng: np.random.Generator
) -> None:
    """Products, those of experts and tables, of every format that a type of blocks is kept in."""
    experts, rows, width = 3, 37, 512
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    weight = codes(rng, experts, rows, width, group=group, offsets=offsets, bits=bits, block=block)
    first = [None if w is None else np.ascontiguousarray(w[0]) for w in weight]
    starts = np.array([0, tokens // 3, tokens // 3, tokens], np.int32)
    ids = np.arange(tokens)
    b = LoweredBuilder()
    quantized = b.quantized(b.values(x), group)
    table = stored(b, *first, bits=bits, block=block)
    kind = {"weight_group": group, "activation_group": group, "has_offsets": offsets}
    product = b.step("quantized_linear", [*quantized, *table], [b.buffer(T, rows)], **kind)
    operands = [*quantized, b.weight(starts), *stored(b, *weight, bits=bits, block=block)]
    of_experts = b.step("quantized_grouped_linear", operands, [b.buffer(T, rows)], **kind)
    looked_up = b.step(
        "quantized_embedding", [b.input("ids"), *table], [b.buffer(T, width)], group_size=group, has_offsets=offsets
    )
    program = b.build(isa=isa, threads=2)
    activations = quantization.quantize_activation(torch.from_numpy(x), group)
    expected = quantization.quantized_linear(*activations, *(tensor(w) for w in first), None, bits, group, group)
    step = step_input([ids.tolist()])
    check(program.trace(step, product)[0], expected, isa, 16 * width)
    grouped = quantization.quantized_grouped_linear(
        *activations, tensor(starts), *(tensor(w) for w in weight), None, bits, group, group
    )
    check(program.trace(step, of_experts)[0], grouped, isa, 16 * width)
    floats = quantization.quantized_embedding(torch.from_numpy(ids), *(tensor(w) for w in first), bits, group)
    np.testing.assert_array_equal(program.trace(step, looked_up)[0], floats.numpy())


@pytest.mark.parametrize("storage", ["iq4", "fp4"])
@pytest.mark.parametrize(("group", "block"), [(32, 0), (16, 0), (32, 8)])
@pytest.mark.parametrize("tokens", [1, 23])
def test_places_among_some_integers(
    isa: str, storage: Storage, group: int, block: int, tokens: int, rng: np.random.Generator
) -> None:
    """4 bits that a table makes integers of 8 bits of: products and tables."""
    rows, width, levels = 37, 512, np.array(FORMATS[storage].levels, np.int8)
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    values = levels[rng.integers(0, len(levels), (rows, width))]
    _, scales, _ = codes(rng, rows, width, group=group, offsets=False, block=block)
    ids = np.arange(tokens)
    b = LoweredBuilder()
    quantized = b.quantized(b.values(x), group)
    weight = [
        b.weight(values, "panel32x8", FORMATS[storage].dtype),
        b.weight(scales, "blocks8" if block else "panel32"),
    ]
    product = b.step(
        "quantized_linear", [*quantized, *weight], [b.buffer(T, rows)], weight_group=group, activation_group=group
    )
    looked_up = b.step("quantized_embedding", [b.input("ids"), *weight], [b.buffer(T, width)], group_size=group)
    program, step = b.build(isa=isa, threads=2), step_input([ids.tolist()])
    activations = quantization.quantize_activation(torch.from_numpy(x), group)
    of_weight = (torch.from_numpy(values), tensor(scales), None)
    expected = quantization.quantized_linear(*activations, *of_weight, None, 8, group, group)
    check(program.trace(step, product)[0], expected, isa, 64 * width)
    floats = quantization.quantized_embedding(torch.from_numpy(ids), *of_weight, 8, group)
    np.testing.assert_array_equal(program.trace(step, looked_up)[0], floats.numpy())


@forms
def test_rows_alone_and_together(isa: str, offsets: bool, rng: np.random.Generator) -> None:
    """A token's bits are the same alone and among others, whatever the block that its row falls into."""
    tokens, rows, width = 29, 45, 128
    b = LoweredBuilder()
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    operands = [*b.quantized(b.values(x), 32), *stored(b, *codes(rng, rows, width, group=32, offsets=offsets))]
    step = b.step(
        "quantized_linear", operands, [b.buffer(T, rows)], weight_group=32, activation_group=32, has_offsets=offsets
    )
    program = b.build(isa=isa, threads=2)
    together = program.trace(step_input([list(range(tokens))]), step)[0]
    for some in ([3], [28, 0], list(range(5, 18))):
        np.testing.assert_array_equal(program.trace(step_input([some]), step)[0], together[some])


def test_activation_and_residual(isa: str, rng: np.random.Generator) -> None:
    """They end with an activation and then add a residual, like other linears."""
    tokens, rows, width = 5, 40, 64
    x, residual = (rng.standard_normal((tokens, n)).astype(np.float32) for n in (width, rows))
    weight = codes(rng, rows, width, group=32, offsets=True)
    b = LoweredBuilder()
    operands = [*b.quantized(b.values(x), 32), *stored(b, *weight)]
    attributes = {"weight_group": 32, "activation_group": 32, "has_offsets": True}
    plain = b.step("quantized_linear", operands, [b.buffer(T, rows)], **attributes)
    ended = b.step(
        "quantized_linear", [*operands, b.values(residual)], [b.buffer(T, rows)],
        **attributes, has_residual=True, activation="relu",
    )  # fmt: skip
    (before,) = b.run(plain, tokens, isa=isa)
    (out,) = b.run(ended, tokens, isa=isa)
    np.testing.assert_array_equal(out, np.maximum(before, 0) + residual)


def test_rows_of_samples(isa: str) -> None:
    """A head of 4 bits behind take_rows: what a program ends with."""
    b = sound_program()
    assert b.logits is not None
    sampled = b.logits
    weight = np.eye(8, dtype=np.int8)
    operands = [*b.quantized(sampled, 8), *stored(b, weight, np.ones((8, 1), np.float16), None)]
    b.logits = b.buffer(R, 8)
    b.step("quantized_linear", operands, [b.logits], weight_group=8, activation_group=8)
    step = step_input([[0, 1, 2]], groups=["full"], return_logits=True)
    out = b.build(isa=isa).run(step).logits
    exact = sound_program().build(isa=isa).run(step).logits
    assert out is not None and exact is not None
    np.testing.assert_allclose(out, exact, rtol=0, atol=np.abs(exact).max() / 127)  # steps of 8 bits
