"""The index lies within its blobs, and panels are what the kernels expect."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from enginewright.plugins.errors import BundleError
from enginewright.runtime.bundle.weights import (
    Blob,
    SourceRows,
    TensorEntry,
    WeightsIndex,
    pack_panel32,
    stored_bytes,
    unpack_panel32,
)


def index(**fields: Any) -> str:
    entry = {"blob": 0, "offset": 64, "bytes": 64 * 3 * 4, "dtype": "f32", "shape": [40, 3], "layout": "panel32"}
    data = {"format_version": 1, "blobs": [{"file": "weights/w.bin", "bytes": 832}], "tensors": {"w": entry | fields}}
    return json.dumps(data)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (32, 5), (40, 3), (65, 2)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_panels(rows: int, columns: int, dtype: Any) -> None:
    weight = np.random.default_rng(rows).standard_normal((rows, columns)).astype(dtype)
    packed = pack_panel32(weight)
    assert packed.nbytes == stored_bytes((rows, columns), "panel32", "f32" if dtype is np.float32 else "bf16")
    flat = packed.reshape(-1)
    for n in range(packed.shape[0] * 32):
        for k in range(columns):
            assert flat[((n // 32) * columns + k) * 32 + n % 32] == (weight[n, k] if n < rows else 0)
    np.testing.assert_array_equal(unpack_panel32(packed, rows), weight)


def test_round_trip() -> None:
    entry = TensorEntry(
        blob=0, offset=0, bytes=8, dtype="i32", shape=(2,), parts=(SourceRows(source="s", rows=(0, 2)),)
    )
    made = WeightsIndex(blobs=(Blob(file="weights/w.bin", bytes=8),), tensors={"w": entry})
    assert WeightsIndex.from_json(made.to_json()) == made
    assert WeightsIndex.from_json(index()).tensors["w"].stored_shape == (2, 3, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes": 480}, r"tensors\.w: bytes is 480, but f32 \[40, 3\] in panel32 has 768"),
        ({"layout": "rows"}, r"tensors\.w: bytes is 768, but f32 \[40, 3\] in rows has 480"),
        ({"shape": [40]}, r"tensors\.w: layout panel32 needs two dimensions"),
        ({"shape": [-40, 3]}, r"tensors\.w: shape is \[-40, 3\]"),
        ({"offset": 128}, r"tensors\.w: ends at byte 896 of weights/w\.bin, which has 832"),
        ({"offset": 32}, r"tensors\.w\.offset: "),
        ({"offset": -64}, r"tensors\.w\.offset: "),
        ({"blob": 1}, r"tensors\.w: blob is 1, but there are 1"),
        ({"blob": -1}, r"tensors\.w\.blob: "),
        ({"dtype": "f64"}, r"tensors\.w\.dtype: "),
        ({"layout": "panel64"}, r"tensors\.w\.layout: "),
    ],
)
def test_wrong_entries_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        WeightsIndex.from_json(index(**fields))


def test_a_newer_index() -> None:
    with pytest.raises(BundleError, match=r"weights/index\.json: format_version is 9"):
        WeightsIndex.from_json(index().replace('"format_version": 1', '"format_version": 9'))


def test_a_damaged_index() -> None:
    with pytest.raises(BundleError, match=r"weights/index\.json: not JSON"):
        WeightsIndex.from_json(index()[:-1])
