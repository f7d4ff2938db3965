"""benchmarks/notes/tensorrt-rtx-families.md has what building an engine of a tiny model of every family gives.

``pytest -m matrix tests/plugins/tensorrt_rtx/compile/test_whole_table.py --update-golden`` writes its table anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.emit.engine_report import EngineReport
from enginewright.plugins.engines.gpus import DEFAULT
from enginewright.plugins.tensorrt_rtx.compile.build_engine import BuiltEngine, EngineRequest, build_engine
from enginewright.runtime.shared.errors import TargetError, UnsupportedModelError
from enginewright.runtime.shared.progress import silent
from tests.plugins.graphs.linear_session import lowered_family
from tests.plugins.tensorrt_rtx.compile.family_table import FamilyTable, families

_TABLE = FamilyTable("tensorrt-rtx-families.md", "| family | builds | attention |\n| --- | --- | --- |\n")
_CONTEXT = 64

_BUILT: dict[tuple[bytes, str], tuple[BuiltEngine, bytes]] = {}
"""Engines that were built in this process, and their plans: families often have the same graphs."""


def _build_once(request: EngineRequest, progress: Callable[[int, int, str], None]) -> BuiltEngine:
    key = (request.graph.read_bytes(), str(request.profiles))
    if key not in _BUILT:
        built = build_engine(request, progress)
        _BUILT[key] = built, request.plan.read_bytes()
    built, plan = _BUILT[key]
    request.plan.write_bytes(plan)
    return built


def build_row(family: str, folder: Path) -> str:
    """The table's row of a family: its tiny model in f16 for four GPUs, decode steps and prompts."""
    from enginewright.plugins.tensorrt_rtx.compile.whole import emit_whole

    program = lowered_family(family)
    layers = len(program.nodes_of(torch.ops.ew.paged_attention.default))
    built: list[EngineReport] = []
    try:
        with BundleWriter(folder / "b") as writer:
            options = EmitOptions(context_length=_CONTEXT, record=built.append)
            emit_whole(program, writer, silent, options, DEFAULT)
    except (TargetError, UnsupportedModelError) as e:
        return f"| {family} | {' '.join(e.message.split()).replace('|', '')[:300]} | |"
    (engine,) = built
    fused = {0: "op by op", layers: "one operator"}.get(engine.attentions, f"{engine.attentions} of {layers} fused")
    return f"| {family} | yes | {fused} |"


@pytest.mark.matrix
@pytest.mark.parametrize("family", families())
def test_row(family: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginewright.plugins.tensorrt_rtx.compile.whole.build_engine", _build_once)
    pytest.importorskip("tensorrt_rtx", reason="install it with: pip install 'enginewright[tensorrt-rtx]'")
    row = build_row(family, tmp_path)
    _TABLE.hold(family, row, request.config)


def test_the_table_has_every_family_and_no_other() -> None:
    assert list(_TABLE.rows()) == sorted(families())
