"""The index lies within its blobs, and panels are what the kernels expect."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.bundle.weights import (
    Blob,
    SourceRows,
    TensorEntry,
    WeightsIndex,
    expand,
    pack,
    pack_blocks,
    stored_bytes,
    stored_dtype,
    stored_shape,
    unpack,
)
from enginewright.runtime.shared.dtypes import DTYPES, Dtype
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.panel_layouts import Layout
from enginewright.runtime.shared.weight_formats import FORMAT_OF, FORMATS


def index(**fields: Any) -> str:
    entry = {"blob": 0, "offset": 64, "bytes": 64 * 3 * 4, "dtype": "f32", "shape": [40, 3], "layout": "panel32"}
    data = {"format_version": 1, "blobs": [{"file": "weights/w.bin", "bytes": 832}], "tensors": {"w": entry | fields}}
    return json.dumps(data)


@pytest.mark.parametrize("shape", [(1, 1), (32, 5), (40, 3), (65, 8), (3, 33, 6), (2, 1, 7), (64, 12), (2, 32, 4)])
@pytest.mark.parametrize(
    ("layout", "dtype", "side"),
    [
        ("panel32", "f32", 1),
        ("panel32", "f16", 1),
        ("panel32", "bf16", 1),
        ("panel32x2", "bf16", 2),
        ("panel32x4", "i8", 4),
    ],
)
def test_panels(shape: tuple[int, ...], layout: Layout, dtype: Dtype, side: int) -> None:
    weight = (np.random.default_rng(shape[-1]).standard_normal(shape) * 50).astype(DTYPES[dtype].numpy)
    packed = pack(weight, layout)
    assert packed.nbytes == stored_bytes(shape, layout, dtype)
    assert packed.shape == stored_shape(shape, layout)
    assert packed.dtype == stored_dtype(dtype, layout)
    zero = 128 if layout == "panel32x4" else 0
    *lead, rows, columns = shape
    groups = -(-columns // side)
    flat = packed.reshape(math.prod(lead), -1)
    for e, one in enumerate(weight.reshape(-1, rows, columns)):
        for n in range(-(-rows // 32) * 32):
            for k in range(groups * side):
                value = one[n, k] if n < rows and k < columns else 0
                place = (((n // 32) * groups + k // side) * 32 + n % 32) * side + k % side
                assert flat[e, place] == int(value) + zero if zero else flat[e, place] == value
    np.testing.assert_array_equal(unpack(packed, shape, layout), weight)
    turned = np.ascontiguousarray(weight.swapaxes(-1, -2)).swapaxes(-1, -2)  # the same, column by column in memory
    np.testing.assert_array_equal(pack(turned, layout), packed)


@pytest.mark.parametrize("shape", [(1, 1), (40, 5), (65, 8), (3, 33, 16), (2, 7, 13)])
@pytest.mark.parametrize(("dtype", "least"), [("i4", -8), ("u4", 0)])
def test_panels_of_four_bits(shape: tuple[int, ...], dtype: Dtype, least: int) -> None:
    weight = np.random.default_rng(shape[-1]).integers(least, least + 16, shape).astype(np.int8)
    packed = pack(weight, "panel32x8", dtype)
    assert packed.nbytes == stored_bytes(shape, "panel32x8", dtype)
    assert packed.shape == stored_shape(shape, "panel32x8")
    *lead, rows, columns = shape
    octets = -(-columns // 8)
    flat = packed.reshape(math.prod(lead), -1)
    for e, one in enumerate(weight.reshape(-1, rows, columns)):
        for n in range(-(-rows // 32) * 32):
            for k in range(octets * 8):
                value = int(one[n, k]) if n < rows and k < columns else 0
                byte = flat[e, ((n // 32 * octets + k // 8) * 32 + n % 32) * 4 + k % 4]
                assert (byte >> 4 if k % 8 >= 4 else byte & 15) == value - least
    np.testing.assert_array_equal(unpack(packed, shape, "panel32x8", dtype), weight)


@pytest.mark.parametrize("shape", [(1, 16), (40, 32), (65, 96), (3, 33, 48)])
@pytest.mark.parametrize(("dtype", "bits", "least"), [("i5", 5, -16), ("u5", 5, 0), ("i6", 6, -32)])
def test_planes_of_5_and_6_bits(shape: tuple[int, ...], dtype: Dtype, bits: int, least: int) -> None:
    """Each value is where docs/inside/stored-weights.md says."""
    rng = np.random.default_rng(5)
    weight = rng.integers(least, least + (1 << bits), shape).astype(np.int8)
    stored = pack(weight, "planes32", dtype)
    panels = math.prod(shape[:-2]) * -(-shape[-2] // 32)
    assert stored.nbytes == stored_bytes(shape, "planes32", dtype) == panels * 4 * bits * shape[-1]
    np.testing.assert_array_equal(unpack(stored, shape, "planes32", dtype), weight)
    deep = 16 if bits == 5 else 8
    pieces = stored.reshape(-1, shape[-1] // deep, deep * 4 * bits)
    panels = -(-shape[-2] // 32)
    for place in rng.integers(0, shape, (300, len(shape))):
        n, k = place[-2:]
        matrix = int(np.ravel_multi_index(tuple(place[:-2]), shape[:-2])) if len(shape) > 2 else 0
        piece = pieces[matrix * panels + n // 32, k // deep]
        byte = piece[(k % deep // 8 * 32 + n % 32) * 4 + k % 4]
        low = byte & 15 if k % 8 < 4 else byte >> 4
        vector = k % deep // 4 * 2 + n % 32 // 16
        high = piece[deep * 16 + n % 16 * 4 + k % 4] >> vector * (bits - 4) & (1 << bits - 4) - 1
        assert int(low) + 16 * int(high) + (0 if dtype == "u5" else -(1 << bits - 1)) == weight[tuple(place)]


@pytest.mark.parametrize("shape", [(1, 16), (40, 32), (65, 96), (3, 33, 48)])
@pytest.mark.parametrize(("dtype", "bits", "least"), [("i3", 3, -4), ("u3", 3, 0), ("i2", 2, -2), ("u2", 2, 0)])
def test_planes_of_2_and_3_bits(shape: tuple[int, ...], dtype: Dtype, bits: int, least: int) -> None:
    """Each value is where docs/inside/stored-weights.md says."""
    rng = np.random.default_rng(6)
    weight = rng.integers(least, least + (1 << bits), shape).astype(np.int8)
    stored = pack(weight, "planes32", dtype)
    panels = -(-shape[-2] // 32)
    assert stored.nbytes == stored_bytes(shape, "planes32", dtype)
    assert stored.nbytes == math.prod(shape[:-2]) * panels * 4 * bits * shape[-1]
    np.testing.assert_array_equal(unpack(stored, shape, "planes32", dtype), weight)
    deep = 16 if bits == 3 else 8
    pieces = stored.reshape(-1, shape[-1] // deep, deep * 4 * bits)
    for place in rng.integers(0, shape, (300, len(shape))):
        n, k = (int(at) for at in place[-2:])
        matrix = int(np.ravel_multi_index(tuple(place[:-2]), shape[:-2])) if len(shape) > 2 else 0
        piece = pieces[matrix * panels + n // 32, k // deep]
        column = n % 16 * 4 + k % 4
        vector = k % deep // 4 * 2 + n % 32 // 16
        value = int(piece[vector // 4 * 64 + column]) >> vector % 4 * 2 & 3
        if bits == 3:
            value += 4 * (int(piece[128 + column]) >> vector & 1)
        assert value + least == weight[tuple(place)]


@pytest.mark.parametrize("dtype", ["iq4", "fp4"])
def test_places_among_some_integers(dtype: Dtype) -> None:
    levels = np.array(FORMATS[FORMAT_OF[dtype]].levels, np.int8)
    weight = levels[np.random.default_rng(7).integers(0, len(levels), (3, 40, 24))]
    stored = pack(weight, "panel32x8", dtype)
    np.testing.assert_array_equal(unpack(stored, weight.shape, "panel32x8", dtype), weight)
    byte = stored[1, 1, 2, 5, 3]  # row 37, columns 16 + 3 and 16 + 7
    assert (levels[byte & 15], levels[byte >> 4]) == (weight[1, 37, 19], weight[1, 37, 23])


@pytest.mark.parametrize("shape", [(1, 1), (40, 3), (3, 33, 2)])
@pytest.mark.parametrize(("layout", "depth"), [("blocks8", 10), ("blocks16", 18)])
def test_scales_in_blocks(shape: tuple[int, ...], layout: Layout, depth: int) -> None:
    *lead, rows, blocks = shape
    scales = np.random.default_rng(6).integers(-128, 128, (*lead, rows, blocks * depth)).astype(np.int8)
    stored = pack(scales, layout, "i8")
    assert (
        stored.nbytes
        == stored_bytes(scales.shape, layout, "i8")
        == math.prod(lead) * -(-rows // 32) * blocks * depth * 32
    )
    np.testing.assert_array_equal(unpack(stored, scales.shape, layout, "i8"), scales)
    last = stored.reshape(-1, blocks, depth * 32)[-1, blocks - 1]
    n = rows - 1
    factors = scales.reshape(-1, rows, blocks * depth)[-1, n, -depth:]
    np.testing.assert_array_equal(last[n % 32 * 2 : n % 32 * 2 + 2].view(np.int8), factors[:2])  # the float16
    np.testing.assert_array_equal(last[64:].reshape(depth - 2, 32)[:, n % 32].view(np.int8), factors[2:])


def test_rows_stay_as_they_are() -> None:
    weight = np.arange(12, dtype=np.int32).reshape(4, 3)
    assert pack(weight.T, "rows").flags.c_contiguous
    np.testing.assert_array_equal(unpack(pack(weight.T, "rows"), (3, 4), "rows"), weight.T)


@pytest.mark.parametrize(("dtype", "least"), [("i4", -8), ("u4", 0)])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 4, 6)])
def test_nibbles_are_as_onnx_has_them(shape: tuple[int, ...], dtype: Dtype, least: int) -> None:
    values = np.random.default_rng(0).integers(least, least + 16, shape).astype(np.int8)
    packed = pack(values, "nibbles", dtype)
    assert packed.shape == stored_shape(shape, "nibbles", dtype) and packed.nbytes == stored_bytes(
        shape, "nibbles", dtype
    )
    low, high = (int(v) & 15 for v in values.reshape(-1)[:2])
    assert packed[0] == low + 16 * high
    np.testing.assert_array_equal(unpack(packed, shape, "nibbles", dtype), values)


def test_an_index_says_the_least_version_that_has_its_layouts() -> None:
    def version(layout: Layout, dtype: Dtype) -> int:
        size = stored_bytes((32, 32), layout, dtype)
        entry = TensorEntry(blob=0, offset=0, bytes=size, dtype=dtype, shape=(32, 32), layout=layout)
        return WeightsIndex.from_tensors((Blob(file="weights/w.bin", bytes=size),), {"w": entry}).format_version

    assert (version("rows", "f32"), version("sparse32", "i8"), version("nibbles", "i4")) == (1, 2, 3)


def test_blocks_of_a_format_that_no_kernel_reads_are_loaded_in_their_layout() -> None:
    rng = np.random.default_rng(4)
    values, scales = rng.integers(0, 16, (40, 100)).astype(np.int8), rng.random((40, 2)).astype(np.float16)
    blocks = pack_blocks(values, scales, "nf4")
    assert blocks.nbytes == stored_bytes((40, 100), "panel32", "f32", "nf4") == 40 * 2 * 34
    entry = TensorEntry(
        blob=0, offset=0, bytes=blocks.nbytes, dtype="f32", shape=(40, 100), layout="panel32", stored_as="nf4"
    )
    blob = Blob(file="weights/w.bin", bytes=blocks.nbytes)
    weights_index = WeightsIndex.from_tensors((blob,), {"w": entry})
    assert weights_index.format_version == 5 and WeightsIndex.from_json(weights_index.to_json()) == weights_index
    loaded = np.empty(entry.stored_shape, np.float32)
    expand(blocks.reshape(-1), entry, loaded.reshape(-1).view(np.uint8))
    want = np.float32(FORMATS["nf4"].codes)[values] * scales.astype(np.float32).repeat(64, 1)[:, :100]
    np.testing.assert_array_equal(unpack(loaded, (40, 100), "panel32", "f32"), want)
    for wrong, message in (("int8", "f32 is not stored as int8"), ("f64", "stored_as")):
        text = weights_index.to_json().replace('"nf4"', f'"{wrong}"')
        with pytest.raises(BundleError, match=message):
            WeightsIndex.from_json(text)


def test_round_trip() -> None:
    entry = TensorEntry(
        blob=0, offset=0, bytes=8, dtype="i32", shape=(2,), parts=(SourceRows(source="s", rows=(0, 2)),)
    )
    weights_index = WeightsIndex(blobs=(Blob(file="weights/w.bin", bytes=8),), tensors={"w": entry})
    assert WeightsIndex.from_json(weights_index.to_json()) == weights_index
    assert WeightsIndex.from_json(index()).tensors["w"].stored_shape == (2, 3, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes": 480}, r"tensors\.w: bytes is 480, but f32 \[40, 3\] in panel32 has 768"),
        ({"layout": "rows"}, r"tensors\.w: bytes is 768, but f32 \[40, 3\] in rows has 480"),
        ({"shape": [40]}, r"tensors\.w: layout panel32 needs two dimensions or three, shape is \[40\]"),
        ({"shape": [1, 1, 40, 3]}, r"tensors\.w: layout panel32 needs two dimensions or three"),
        ({"layout": "panel32x2"}, r"tensors\.w: layout panel32x2 is not for f32"),
        ({"layout": "panel32x4", "dtype": "bf16"}, r"tensors\.w: layout panel32x4 is not for bf16"),
        ({"dtype": "i8"}, r"tensors\.w: layout panel32 is not for i8"),
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


def test_an_index_of_8_bit_floats_says_so() -> None:
    """Versions that don't know them refuse it by its number."""
    entry = TensorEntry(blob=0, offset=0, bytes=6, dtype="fp8", shape=(2, 3))
    blob = Blob(file="weights/w.bin", bytes=6)
    weights_index = WeightsIndex.from_tensors((blob,), {"w": entry})
    assert weights_index.format_version == 4
    assert WeightsIndex.from_json(weights_index.to_json()) == weights_index
    assert entry.stored_dtype == DTYPES["fp8"].numpy
    panels = entry.model_copy(update={"layout": "panel32", "bytes": 96})
    wide = WeightsIndex.from_tensors((blob.model_copy(update={"bytes": 96}),), {"w": panels})
    assert WeightsIndex.from_json(wide.to_json()) == wide
    panels = panels.model_copy(update={"layout": "panel32x4"})
    with pytest.raises(BundleError, match=r"tensors\.w: layout panel32x4 is not for fp8"):
        WeightsIndex.from_json(WeightsIndex.from_tensors((blob,), {"w": panels}).to_json())
