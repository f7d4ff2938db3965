"""benchmarks/notes/segments-families.md has what building segments of a tiny model of every family gives.

``pytest -m matrix tests/plugins/tensorrt_rtx/compile/test_segments_table.py --update-golden`` writes its table anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines.gpus import DEFAULT
from enginewright.plugins.engines.segments import SegmentStep
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.graphs.weights import ExternalWeights
from enginewright.plugins.tensorrt_rtx.compile.build_engine import EngineRequest, build_engine
from enginewright.plugins.tensorrt_rtx.compile.emit_segments import profiles_of
from enginewright.plugins.tensorrt_rtx.compile.segment_graphs import SegmentGraph, segment_model
from enginewright.runtime.shared.errors import TargetError, UnsupportedModelError
from enginewright.runtime.shared.progress import silent
from tests.plugins.graphs.linear_session import lowered_family
from tests.plugins.tensorrt_rtx.compile.family_table import FamilyTable, families

_TABLE = FamilyTable(
    "segments-families.md", "| family | engines | for segments | why not |\n| --- | --- | --- | --- |\n"
)

_BUILT: dict[bytes, int] = {}
"""Bytes of the engines that were built in this process: families often have the same graphs."""


def _build(graph: SegmentGraph, folder: Path) -> int:
    if graph.model not in _BUILT:
        (folder / "segment.onnx").write_bytes(graph.model)
        sizes = tuple({"T": p.T, "R": p.R} for p in profiles_of(EnginesSection()))
        request = EngineRequest(folder / "segment.onnx", folder / "segment.plan", DEFAULT, sizes, name=graph.name)
        _BUILT[graph.model] = build_engine(request).bytes
    return _BUILT[graph.model]


def _row(family: str, folder: Path) -> str:
    program = lowered_family(family)
    try:
        with BundleWriter(folder / "b") as writer:
            model = segment_model(program, ExternalWeights(writer, silent, len(program.weights), "segments"), "f16")
        assert all(_build(graph, folder) > 0 for graph in model.graphs)
    except (TargetError, UnsupportedModelError) as e:
        return f"| {family} | | | {' '.join(e.message.split()).replace('|', '')[:300]} |"
    runs = sum(isinstance(step, SegmentStep) for step in model.steps)
    return f"| {family} | {len(model.graphs)} | {runs} | |"


@pytest.mark.matrix
@pytest.mark.parametrize("family", families())
def test_row(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("tensorrt_rtx", reason="install it with: pip install 'enginewright[tensorrt-rtx]'")
    row = _row(family, tmp_path)
    _TABLE.hold(family, row, request.config)


def test_the_table_has_every_family_and_no_other() -> None:
    assert list(_TABLE.rows()) == sorted(families())
