from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from enginewright.plugins.cpu.extension import cpu_extension
from enginewright.plugins.errors import MissingDependencyError


def test_an_extension_that_is_not_built_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "enginewright.plugins.cpu._cpu", None)
    monkeypatch.delattr("enginewright.plugins.cpu._cpu")
    monkeypatch.delitem(sys.modules, "enginewright.plugins.cpu.extension")
    with pytest.raises(MissingDependencyError, match="cmake --build build"):
        importlib.import_module("enginewright.plugins.cpu.extension")


def test_isas_end_with_portable() -> None:
    assert cpu_extension.isas()[-1] == "portable"
    known = {"avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable"}
    assert set(cpu_extension.isas()) <= known


@pytest.mark.parametrize("shape", [(1, 1), (32, 7), (33, 16), (100, 70)])
@pytest.mark.parametrize("threads", [1, 2])
def test_panels(shape: tuple[int, int], threads: int) -> None:
    n, k = shape
    rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    panels = cpu_extension.pack_panel32(rows, threads)
    padded = np.zeros((-(-n // 32) * 32, k), np.float32)
    padded[:n] = rows
    np.testing.assert_array_equal(panels, padded.reshape(-1, 32, k).transpose(0, 2, 1))
    np.testing.assert_array_equal(cpu_extension.unpack_panel32(panels, n), rows)
    wide = np.zeros((n, k + 5), np.float32)
    wide[:, :k] = rows
    np.testing.assert_array_equal(cpu_extension.pack_panel32(wide[:, :k]), panels)


@pytest.mark.parametrize("shape", [(1, 1), (32, 8), (33, 17), (100, 70)])
@pytest.mark.parametrize("threads", [1, 2])
def test_panels_of_pairs_and_quads(shape: tuple[int, int], threads: int) -> None:
    n, k = shape
    rng = np.random.default_rng(0)
    bits, whole = rng.integers(0, 1 << 16, shape).astype(np.uint16), rng.integers(-128, 128, shape).astype(np.int8)
    pairs, quads = cpu_extension.pack_panel32x2(bits, threads), cpu_extension.pack_panel32x4(whole, threads)
    for panels, rows, step in ((pairs, bits.astype(np.int64), 2), (quads, whole.astype(np.int64) + 128, 4)):
        padded = np.full((-(-n // 32) * 32, -(-k // step) * step), 128 if step == 4 else 0, np.int64)
        padded[:n, :k] = rows
        np.testing.assert_array_equal(panels, padded.reshape(-1, 32, padded.shape[1] // step, step).swapaxes(1, 2))
    np.testing.assert_array_equal(cpu_extension.unpack_panel32x2(pairs, n, k), bits)
    np.testing.assert_array_equal(cpu_extension.unpack_panel32x4(quads, n, k), whole)
    half = cpu_extension.pack_panel32(bits, threads)
    np.testing.assert_array_equal(cpu_extension.unpack_panel32(half, n), bits)
    np.testing.assert_array_equal(half, cpu_extension.pack_panel32(bits.astype(np.float32)))


def test_panels_of_experts() -> None:
    """A stack is packed matrix by matrix, also when it is a slice of a larger array."""
    rows = np.random.default_rng(0).standard_normal((3, 40, 9)).astype(np.float32)[:, :35, :6]
    panels = cpu_extension.pack_panel32(rows, 2)
    assert panels.shape == (3, 2, 6, 32)
    for matrix, expected in zip(panels, rows, strict=True):
        np.testing.assert_array_equal(matrix, cpu_extension.pack_panel32(np.ascontiguousarray(expected)))
    whole = (rows * 40).astype(np.int8)
    assert cpu_extension.pack_panel32x4(whole).shape == (3, 2, 2, 32, 4)
    np.testing.assert_array_equal(cpu_extension.pack_panel32x4(whole)[1], cpu_extension.pack_panel32x4(whole[1]))
    bits = whole.astype(np.uint16)
    np.testing.assert_array_equal(cpu_extension.pack_panel32x2(bits)[2], cpu_extension.pack_panel32x2(bits[2]))


def test_panels_of_other_kinds_are_refused() -> None:
    with pytest.raises(TypeError):
        cpu_extension.pack_panel32(np.ones((3, 4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit inner stride"):
        cpu_extension.pack_panel32(np.ones((3, 8), np.float32)[:, ::2])
    with pytest.raises(ValueError, match=r"rows of shape \[N, K\] or \[E, N, K\]"):
        cpu_extension.pack_panel32x4(np.ones(4, np.int8))
    with pytest.raises(ValueError, match="not those of a matrix"):
        cpu_extension.unpack_panel32(np.ones((1, 4, 32), np.float32), 33)
    with pytest.raises(ValueError, match="not those of a matrix"):
        cpu_extension.unpack_panel32x4(np.ones((1, 4, 32, 4), np.uint8), 32, 17)
    with pytest.raises(ValueError, match="not those of a matrix"):
        cpu_extension.unpack_panel32x2(np.ones((1, 4, 32, 2), np.uint16), -32, 8)


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_is_plausible(threads: int) -> None:
    assert 0.1 < cpu_extension.measure_bandwidth(8 << 20, threads) < 10_000
