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
    assert set(cpu_extension.isas()) <= {"avx512", "avx2", "portable"}


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


def test_panels_of_other_kinds_are_refused() -> None:
    with pytest.raises(TypeError):
        cpu_extension.pack_panel32(np.ones((3, 4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit inner stride"):
        cpu_extension.pack_panel32(np.ones((3, 8), np.float32)[:, ::2])
    with pytest.raises(ValueError, match="panels of shape"):
        cpu_extension.unpack_panel32(np.ones((1, 4, 32), np.float32), 33)


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_is_plausible(threads: int) -> None:
    assert 0.1 < cpu_extension.measure_bandwidth(8 << 20, threads) < 10_000
