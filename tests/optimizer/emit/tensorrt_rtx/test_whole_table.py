"""docs/tensorrt-rtx.md has what building an engine of a tiny model of every family gives.

``pytest -m matrix tests/optimizer/emit/tensorrt_rtx/test_whole_table.py --update-golden`` writes its table anew.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from enginewright.optimizer.emit.base import EmitOptions
from enginewright.optimizer.emit.engine_report import EngineReport
from enginewright.optimizer.emit.tensorrt_rtx.build_engine import BuiltEngine, EngineRequest, build_engine
from enginewright.optimizer.emit.tensorrt_rtx.gpus import DEFAULT
from enginewright.optimizer.progress import silent
from enginewright.plugins.errors import TargetError, UnsupportedModelError
from enginewright.runtime.bundle.writer import BundleWriter
from tests.conftest import REPOSITORY
from tests.optimizer.emit.onnx.linear_session import lowered_family

_PAGE = REPOSITORY / "docs" / "tensorrt-rtx.md"
_HEAD = "| family | builds | attention |\n| --- | --- | --- |\n"
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


def _families() -> list[str]:
    """Those that the onnx target takes."""
    rows = (REPOSITORY / "docs/families.md").read_text().splitlines()
    return [row.split("|")[1].strip() for row in rows if "| works |" in row and "," not in row.split("|")[1]]


def build_row(family: str, folder: Path) -> str:
    """The table's row of a family: its tiny model in f16 for four GPUs, decode steps and prompts."""
    from enginewright.optimizer.emit.tensorrt_rtx.whole import emit_whole

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


def _rows(text: str) -> dict[str, str]:
    """The rows of the table by family."""
    lines = text.partition(_HEAD)[2].splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}


@pytest.mark.matrix
@pytest.mark.parametrize("family", _families())
def test_row(family: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginewright.optimizer.emit.tensorrt_rtx.whole.build_engine", _build_once)
    pytest.importorskip("tensorrt_rtx", reason="install it with: pip install 'enginewright[tensorrt-rtx]'")
    row = build_row(family, tmp_path)
    if request.config.getoption("--update-golden"):
        _update(family, row)
    else:
        assert _rows(_PAGE.read_text())[family] == row, (
            "docs/tensorrt-rtx.md is stale: run this file's tests with -m matrix --update-golden"
        )


def test_the_table_has_every_family_and_no_other() -> None:
    assert list(_rows(_PAGE.read_text())) == sorted(_families())


def _update(family: str, row: str) -> None:
    with open(_PAGE, "r+", encoding="utf-8") as file:  # workers wait for one another
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        rows = {f: r for f, r in _rows(text).items() if f in _families()} | {family: row}
        file.seek(0)
        file.truncate()
        file.write(text.partition(_HEAD)[0] + _HEAD + "".join(rows[f] + "\n" for f in sorted(rows)))
