"""Layout sparse32: what goes in comes out, at the places that the page says, and nothing else goes in."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from enginewright.runtime.bundle.sparse_panels import block_bytes, is_sparse, pack_sparse, unpack_sparse
from enginewright.runtime.bundle.weights import Blob, TensorEntry, WeightsIndex, stored_bytes
from enginewright.runtime.shared.errors import BundleError

TYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "i4": np.int8}


def sparse_weight(rows: int, columns: int, dtype: str, seed: int = 0) -> npt.NDArray[Any]:
    """Random values of a type, two of every four of them zero, and here and there a third and a fourth."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 8, (rows, columns)).astype(TYPES[dtype])
    mask = (rng.random((rows, columns // 4, 4)).argsort(-1) < 2).reshape(rows, columns)
    return np.where(mask, values, values.dtype.type(0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (33, 36), (64, 96)])
def test_unpacked_is_what_was_packed(dtype: str, rows: int, columns: int) -> None:
    weight = sparse_weight(rows, columns, dtype)
    stored = pack_sparse(weight, dtype)
    assert stored.nbytes == stored_bytes(weight.shape, "sparse32", dtype)  # type: ignore[arg-type]
    np.testing.assert_array_equal(unpack_sparse(stored, weight.shape, dtype), weight)


@pytest.mark.parametrize(("dtype", "share"), [("f32", 17 / 32), ("bf16", 9 / 16), ("i8", 5 / 8), ("i4", 3 / 4)])
def test_a_block_is_half_the_values_and_half_a_byte_for_four(dtype: str, share: float) -> None:
    bits = {"f32": 32, "bf16": 16, "i8": 8, "i4": 4}[dtype]
    assert block_bytes(dtype) == share * 32 * 32 * bits / 8


def test_places_and_values_are_where_the_page_says() -> None:
    weight = np.zeros((2, 8), np.float32)
    weight[1, [1, 3]] = [5, 6]  # quad 0 of n = 1
    weight[1, 6] = 7  # quad 1: one value, and the zero at the first place that is free
    stored = pack_sparse(weight, "f32")[0, 0]
    words, values = stored[:128].view(np.uint32), stored[128:].view(np.float32).reshape(8, 2, 32)
    assert words[1] & 0xFF == (1 | 3 << 2) | (0 | 2 << 2) << 4
    assert values[0, :, 1].tolist() == [5, 6]
    assert values[1, :, 1].tolist() == [0, 7]
    assert not values[2:].any()
    assert not values[:, :, 2:].any()


def test_what_has_three_of_four_is_refused() -> None:
    dense = np.array([[1, 2, 3, 0]], np.float32)
    assert not is_sparse(dense)
    with pytest.raises(ValueError, match="more than two of four"):
        pack_sparse(dense, "f32")
    with pytest.raises(ValueError, match="multiple of 4"):
        pack_sparse(np.zeros((1, 6), np.float32), "f32")


def index_of(shape: tuple[int, ...], dtype: str, layout: str = "sparse32") -> WeightsIndex:
    size = stored_bytes(shape, layout, dtype)  # type: ignore[arg-type]
    entry = TensorEntry(blob=0, offset=0, bytes=size, dtype=dtype, shape=shape, layout=layout)  # type: ignore[arg-type]
    return WeightsIndex.from_tensors((Blob(file="weights/w.bin", bytes=size),), {"w": entry})


def test_an_index_says_version_2_where_a_weight_is_sparse() -> None:
    sparse, dense = index_of((33, 36), "i8"), index_of((33, 36), "i8", "panel32x4")
    assert (sparse.format_version, dense.format_version) == (2, 1)
    assert WeightsIndex.from_json(sparse.to_json()) == sparse


@pytest.mark.parametrize(
    ("shape", "problem"), [((8, 30), "the second a multiple of 4"), ((2, 8, 32), "needs two dimensions, the second")]
)
def test_shapes_that_cannot_be_sparse_are_refused(shape: tuple[int, ...], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        WeightsIndex.from_json(index_of(shape, "f32").to_json())
