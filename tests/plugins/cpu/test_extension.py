from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from enginewright.plugins.cpu.extension import cpu_extension
from enginewright.runtime.shared import panel_layouts
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.op_schema import OPS


def test_an_extension_that_is_not_built_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "enginewright.plugins.cpu._cpu", None)
    monkeypatch.delattr("enginewright.plugins.cpu._cpu")
    monkeypatch.delitem(sys.modules, "enginewright.plugins.cpu.extension")
    with pytest.raises(MissingDependencyError, match="cmake --build build"):
        importlib.import_module("enginewright.plugins.cpu.extension")


def test_isas_end_with_portable() -> None:
    assert cpu_extension.isas()[-1] == "portable"
    known = {"avx512_amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable"}
    assert set(cpu_extension.isas()) <= known


def test_a_build_for_this_processor_alone_has_its_best_kernels(tmp_path: Path) -> None:
    root, tools = Path(__file__).parents[3], Path(sys.executable).parent
    options = ["-DEW_NATIVE=ON", "-DEW_BUILD_EXTENSION=OFF", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    subprocess.run([tools / "cmake", "-S", root, "-B", tmp_path, *options], check=True, capture_output=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text(encoding="utf-8"))
    files = {Path(c["file"]).name: c["command"] for c in commands}
    best = cpu_extension.isas()[0]
    assert ("avx512_amx.cpp" in files) is (best == "avx512_amx")
    assert not {"portable.cpp", "avx2.cpp", "avx2_vnni.cpp", "avx512.cpp", "avx512_vnni.cpp"} & set(files)
    (name,) = re.findall(r'EW_NATIVE=\\?"(\w+)', files["native.cpp"])
    assert name == ("avx512_bf16" if best == "avx512_amx" else best)


def test_the_ops_are_those_that_are_counted_and_documented() -> None:
    ops = cpu_extension.ops()
    assert len(ops) == len(set(ops)) > 30
    assert set(ops) == set(OPS)
    (page,) = (Path(__file__).parents[3] / "docs").rglob("lowered-ops.md")
    text = page.read_text(encoding="utf-8")
    assert [op for op in ops if f"`{op}`" not in text] == []


def test_layouts_are_those_that_weights_are_packed_in() -> None:
    assert cpu_extension.PANEL == panel_layouts.PANEL
    assert cpu_extension.layout_depths() == {"rows": 1, **panel_layouts.DEPTHS}


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_is_plausible(threads: int) -> None:
    assert 0.1 < cpu_extension.measure_bandwidth(8 << 20, threads) < 10_000


@pytest.mark.parametrize("isa", cpu_extension.isas())
def test_peaks_are_plausible(isa: str) -> None:
    peaks = {dtype: cpu_extension.measure_peak(dtype, 1, isa) for dtype in ("f32", "bf16", "i8")}
    assert all(0.01 < peak < 100_000 for peak in peaks.values()), peaks


def test_a_peak_is_of_known_names_alone() -> None:
    with pytest.raises(ValueError, match="dtype f16 is not one of f32, bf16, i8"):
        cpu_extension.measure_peak("f16", 1, "portable")
    with pytest.raises(ValueError, match="isa sse is not one that this processor runs"):
        cpu_extension.measure_peak("i8", 1, "sse")
