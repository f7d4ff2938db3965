"""Steps of weights in sparse32: the numbers of the same weights in dense panels, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from enginewright.plugins.native.executable import isas
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Operand
from tests.plugins.native.lowered_builder import LoweredBuilder, T
from tests.runtime.bundle.test_sparse_panels import sparse_weight

Array = npt.NDArray[Any]

DENSE = {"f32": "panel32", "bf16": "panel32x2", "i8": "panel32x4", "i4": "panel32x8"}
EPS32 = float(np.finfo(np.float32).eps)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def product(weight: Array, dtype: str, layout: str, x: Array, isa: str, group: int = 32) -> Array:
    """x times a weight in some layout, with a bias, by a step of the program."""
    b, (tokens, width) = LoweredBuilder(), x.shape
    bias = b.weight(np.linspace(-1, 1, len(weight), dtype=np.float32))
    operands: list[Operand] = [b.values(x)]
    op, attributes = "linear", {"has_bias": True}
    if dtype == "bf16":
        operands = [b.buffer(T, width, dtype="bf16", padding=2)]
        b.step("cast_bf16", [b.values(x)], operands)
    elif dtype != "f32":
        operands = b.quantized(b.values(x), group)
        op, attributes = "quantized_linear", attributes | {"weight_group": group, "activation_group": group}
    operands.append(b.weight(weight, layout, dtype))
    if op == "quantized_linear":
        scales = np.linspace(0.01, 0.2, len(weight) * (width // group)).astype(np.float16)
        operands.append(b.weight(scales.reshape(len(weight), -1), "panel32"))
    step = b.step(op, [*operands, bias], [b.buffer(T, len(weight))], **attributes)
    (out,) = b.run(step, tokens, isa=isa, threads=2)
    return out


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize(
    ("tokens", "rows", "width", "group"),
    [(1, 5, 32, 32), (9, 70, 96, 32), (33, 45, 160, 32), (21, 33, 256, 128), (17, 40, 104, 104)],
)
def test_a_sparse_linear_has_the_numbers_of_a_dense_one(
    isa: str, dtype: str, tokens: int, rows: int, width: int, group: int, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    weight = sparse_weight(rows, width, dtype, seed=tokens)
    sparse, dense = (product(weight, dtype, layout, x, isa, group) for layout in ("sparse32", DENSE[dtype]))
    if isa in ("avx512_amx", "avx512_bf16") and dtype == "bf16":  # VDPBF16 adds up by pairs, and these are others
        np.testing.assert_allclose(sparse, dense, rtol=0, atol=8 * EPS32 * width * np.abs(weight.astype(float)).max())
    else:
        np.testing.assert_array_equal(sparse, dense)


@pytest.mark.parametrize("isa", isas())
def test_a_row_alone_is_a_row_in_a_batch(isa: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((21, 64)).astype(np.float32)
    for dtype in DENSE:
        weight = sparse_weight(40, 64, dtype)
        whole = product(weight, dtype, "sparse32", x, isa)
        for row in (0, 7, 20):
            alone = product(weight, dtype, "sparse32", x[row : row + 1], isa)
            np.testing.assert_array_equal(alone[0], whole[row])


def test_tables_and_experts_are_never_sparse() -> None:
    def run(op: str, weight: Array, dtype: str, **attributes: int) -> None:
        b = LoweredBuilder()
        table = b.weight(weight, "sparse32", dtype)
        scales = [b.weight(np.ones((len(weight), 1), np.float16), "panel32")] if dtype == "i8" else []
        step = b.step(op, [b.input("ids"), table, *scales], [b.buffer(T, weight.shape[1])], **attributes)
        b.run(step, 1)

    with pytest.raises(BundleError, match="is sparse, which a table can't be"):
        run("embedding", sparse_weight(8, 32, "f32"), "f32")
    with pytest.raises(BundleError, match="is sparse, which a table can't be"):
        run("quantized_embedding", sparse_weight(8, 32, "i8"), "i8", group_size=0)
