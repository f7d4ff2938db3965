"""Routers' ops and experts through the interpreter, against torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from enginewright.passes.ops import experts, quantization, routing
from enginewright.plugins.native.executable import isas
from enginewright.runtime.shared.lowered_program import Operand
from tests.plugins.native.lowered_builder import LoweredBuilder, T, step_input, view
from tests.plugins.native.test_executable_quantized import quantized

Array = npt.NDArray[np.generic]
Float = npt.NDArray[np.float32]
EPS32 = float(np.finfo(np.float32).eps)

pytestmark = pytest.mark.parametrize("isa", isas())


def values(rng: np.random.Generator, *shape: int) -> Float:
    return rng.standard_normal(shape).astype(np.float32)


def integers(b: LoweredBuilder, array: npt.NDArray[np.int32]) -> Operand:
    """A buffer i32 [T, C] with row ids[t] of ``array`` for token t: an embedding of integers, column by column."""
    rows, width = array.shape
    ids, out = b.buffer(T, 1, dtype="i32"), b.buffer(T, width, dtype="i32")
    b.step("copy", [b.input("ids")], [view(ids, (T,))])
    for column in range(width):
        table = b.weight(np.ascontiguousarray(array[:, column]))
        b.step("gather", [view(table, (T, rows), (0, 1)), ids], [view(out, (T, 1), (width, 1), column)])
    return out


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(("shape", "k"), [((1, 4), 1), ((9, 64), 8), ((5, 3, 16), 2), ((7, 12), 12)])
def test_top_k(isa: str, shape: tuple[int, ...], k: int, rng: np.random.Generator) -> None:
    x = values(rng, *shape)
    b = LoweredBuilder()
    outputs = [b.buffer(T, *shape[1:-1], k), b.buffer(T, *shape[1:-1], k, dtype="i32")]
    step = b.step("top_k", [b.values(x)], outputs, k=k)
    top, indices = b.run(step, shape[0], isa=isa)
    expected, where = torch.topk(torch.from_numpy(x), k)
    np.testing.assert_array_equal(top, expected.numpy())
    np.testing.assert_array_equal(indices, where.numpy())


def test_top_k_of_equal_values_and_nan(isa: str) -> None:
    x = np.array([[1, 3, 3, 1, 3], [0, -0.0, 0, -1, -np.inf], [2, np.nan, np.inf, np.nan, 5]], np.float32)
    b = LoweredBuilder()
    step = b.step("top_k", [b.values(x)], [b.buffer(T, 4), b.buffer(T, 4, dtype="i32")], k=4)
    top, indices = b.run(step, 3, isa=isa)
    np.testing.assert_array_equal(indices, [[1, 2, 4, 0], [0, 1, 2, 3], [1, 3, 2, 4]])
    np.testing.assert_array_equal(top, np.take_along_axis(x, indices.astype(np.int64), 1))


@pytest.mark.parametrize(("tokens", "columns", "k"), [(1, 3, 1), (8, 32, 5)])
def test_gather_and_scatter(isa: str, tokens: int, columns: int, k: int, rng: np.random.Generator) -> None:
    x = values(rng, tokens, columns)
    indices = np.argsort(values(rng, tokens, columns))[:, :k].astype(np.int32)
    b = LoweredBuilder()
    operand, places = b.values(x), integers(b, indices)
    gathered = b.step("gather", [operand, places], [b.buffer(T, k)])
    scattered = b.step("scatter", [operand, places], [b.buffer(T, columns)], value=-2.5)
    expected = torch.from_numpy(x)
    where = torch.from_numpy(indices).long()
    np.testing.assert_array_equal(b.run(gathered, tokens, isa=isa)[0], expected.gather(1, where).numpy())
    np.testing.assert_array_equal(b.run(scattered, tokens, isa=isa)[0], expected.scatter(1, where, -2.5).numpy())


@pytest.mark.parametrize(("tokens", "choices", "count"), [(1, 1, 1), (6, 2, 4), (40, 8, 64)])
def test_route_experts(isa: str, tokens: int, choices: int, count: int, rng: np.random.Generator) -> None:
    ids = rng.integers(0, count, (tokens, choices)).astype(np.int32)
    b = LoweredBuilder()
    outputs = [b.buffer(T * choices, dtype="i32") for _ in range(2)] + [b.buffer(count + 1, dtype="i32")]
    step = b.step("route_experts", [integers(b, ids)], outputs, experts=count)
    expected = routing.route_experts(torch.from_numpy(ids), count)
    for out, reference in zip(b.run(step, tokens, isa=isa), expected, strict=True):
        np.testing.assert_array_equal(out, reference.numpy())


class Experts:
    """x [tokens, H] through experts [E, N, H] in f32, bf16 or int8, and back: out[t] = sum of weights * products."""

    def __init__(self, rng: np.random.Generator, kind: str, count: int, hidden: int, width: int, bias: bool) -> None:
        self.kind, self.count, self.choices, self.hidden, self.width = kind, count, 3, hidden, width
        self.tokens = 21
        self.x = values(rng, self.tokens, hidden)
        self.weight: Array = values(rng, count, width, hidden)
        self.bias = values(rng, count, width) if bias else None
        scores = values(rng, self.tokens, count)
        scores[:, 1] = -9  # one expert gets nothing
        self.ids = np.argsort(-scores)[:, : self.choices].astype(np.int32)
        self.factors = values(rng, self.tokens, self.choices)
        if kind == "bf16":
            self.weight = self.weight.astype(ml_dtypes.bfloat16)

    def steps(self, b: LoweredBuilder, first: int = 0, past: int | None = None) -> tuple[int, int]:
        """The steps of the product, by experts first .. past - 1 alone, and of the sum."""
        places, x, ids = T * self.choices, b.values(self.x), integers(b, self.ids)
        order, rows = (b.buffer(places, dtype="i32") for _ in range(2))
        starts = b.buffer(self.count + 1, dtype="i32")
        b.step("route_experts", [ids], [order, rows, starts], experts=self.count)
        gathered, out = b.buffer(places, self.hidden), b.buffer(places, self.width)
        b.step("take_rows", [x, rows], [gathered])
        bias = [b.weight(self.bias[first:past])] if self.bias is not None else []
        some = self.weight[first:past]
        starts = view(starts, (len(some) + 1,), offset=first)
        if self.kind == "int8":
            weight, scales = quantized(some.astype(np.float32), 32)
            operands = [
                *b.quantized(gathered, 32),
                starts,
                b.weight(weight, "panel32x4"),
                b.weight(scales, "panel32"),
                *bias,
            ]
            product = b.step("quantized_grouped_linear", operands, [out], weight_group=32, activation_group=32)
        elif self.kind == "bf16":
            narrow = b.buffer(places, self.hidden, dtype="bf16", padding=2)
            b.step("cast_bf16", [gathered], [narrow])
            product = b.step("grouped_linear", [narrow, starts, b.weight(some, "panel32x2"), *bias], [out])
        else:
            product = b.step("grouped_linear", [gathered, starts, b.weight(some, "panel32"), *bias], [out])
        combined = b.buffer(T, self.width)
        return product, b.step("combine_experts", [out, order, b.values(self.factors)], [combined])

    def expected(self) -> tuple[Float, Float]:
        ids = torch.from_numpy(self.ids)
        order, rows, starts = routing.route_experts(ids, self.count)
        gathered = torch.from_numpy(self.x)[rows.long()]
        bias = None if self.bias is None else torch.from_numpy(self.bias)
        if self.kind == "int8":
            weight, scales = (torch.from_numpy(a) for a in quantized(self.weight.astype(np.float32), 32))
            activations = quantization.quantize_activation(gathered, 32)
            y = quantization.quantized_grouped_linear(*activations, starts, weight, scales, None, bias, 8, 32, 32)
        else:
            dtype = torch.bfloat16 if self.kind == "bf16" else torch.float32
            weight = torch.from_numpy(self.weight.astype(np.float32)).to(dtype)
            y = experts.grouped_linear(gathered.to(dtype), starts, weight, bias)
        return y.numpy(), routing.combine_experts(y, order, torch.from_numpy(self.factors)).numpy()


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(("count", "hidden", "width", "bias"), [(4, 13, 5, True), (9, 96, 70, False)])
def test_experts(
    isa: str, kind: str, count: int, hidden: int, width: int, bias: bool, rng: np.random.Generator
) -> None:
    model = Experts(rng, kind, count, hidden, width, bias)
    b = LoweredBuilder()
    product, combined = model.steps(b)
    expected, total = model.expected()
    # Sums of K products of size 1, then three of size sqrt(K).
    tolerance = 8 * EPS32 * hidden
    np.testing.assert_allclose(b.run(product, model.tokens, isa=isa)[0], expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(b.run(combined, model.tokens, isa=isa)[0], total, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
def test_tokens_alone_and_together(isa: str, kind: str, rng: np.random.Generator) -> None:
    """The other tokens of an expert change no bit of a token."""
    model = Experts(rng, kind, 6, 40, 33, True)
    b = LoweredBuilder()
    _, step = model.steps(b)
    program = b.build(isa=isa, threads=2)
    together = program.trace(step_input([list(range(model.tokens))]), step)[0]
    for some in ([0], [20, 3, 4], list(range(7, 19))):
        np.testing.assert_array_equal(program.trace(step_input([some]), step)[0], together[some])


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(("first", "past"), [(0, 2), (2, 5), (5, 6), (1, 2)])
def test_some_of_the_experts(isa: str, kind: str, first: int, past: int, rng: np.random.Generator) -> None:
    """They write their own rows, with the bits that all experts give, and no other row."""
    model = Experts(rng, kind, 6, 40, 33, True)
    outs = []
    for experts_of in ((), (first, past)):
        b = LoweredBuilder()
        outs.append(b.run(model.steps(b, *experts_of)[0], model.tokens, isa=isa)[0])
    counts = np.bincount(model.ids.reshape(-1), minlength=6)
    expert_of = np.repeat(np.arange(6), counts)
    expert_of = (expert_of >= first) & (expert_of < past)
    np.testing.assert_array_equal(outs[1][expert_of], outs[0][expert_of])
    assert not outs[1][~expert_of].any()  # zeros, as the arena begins


@pytest.mark.parametrize("fn", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons(isa: str, fn: str, rng: np.random.Generator) -> None:
    x, y = (rng.integers(-2, 3, (6, 21)).astype(np.float32) for _ in range(2))
    x[0, 0] = y[1, 1] = np.nan
    b = LoweredBuilder()
    step = b.step("elementwise", [b.values(x), b.values(y)], [b.buffer(T, 21)], fn=fn)
    (out,) = b.run(step, 6, isa=isa)
    expected = getattr(torch, fn)(torch.from_numpy(x), torch.from_numpy(y))
    np.testing.assert_array_equal(out, expected.float().numpy())
    whole = b.step("elementwise", [b.input("positions")], [b.buffer(T)], fn=fn, scalar=2)
    np.testing.assert_array_equal(b.run(whole, 6, isa=isa)[0], getattr(torch, fn)(torch.arange(6), 2).float().numpy())


@pytest.mark.parametrize("fn", ["logical_and", "logical_or", "logical_not", "floor", "round"])
def test_logic_and_rounding(isa: str, fn: str, rng: np.random.Generator) -> None:
    x, y = ((rng.integers(-4, 5, (6, 21)) / 2).astype(np.float32) for _ in range(2))
    b = LoweredBuilder()
    two = fn in ("logical_and", "logical_or")
    step = b.step("elementwise", [b.values(x), *([b.values(y)] if two else [])], [b.buffer(T, 21)], fn=fn)
    (out,) = b.run(step, 6, isa=isa)
    arguments = [torch.from_numpy(a) for a in ((x, y) if two else (x,))]
    np.testing.assert_array_equal(out, getattr(torch, fn)(*arguments).float().numpy())
