"""Engines of the formats that there are, and what stands in the way of one."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import OffsetOptions, PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.emit.engine_report import EngineReport
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.steps.linear_io import LinearIo
from enginewright.plugins.tensorrt_rtx.compile.emitter import TensorRtRtxEmitter
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.progress import silent
from tests.acceptance.tiny_configs import tiny_family
from tests.plugins.graphs.linear_session import lowered

pytest.importorskip("tensorrt_rtx")

INT8_GROUPS = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
INT4_OFFSETS = WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64)
INT4_CHANNEL = WeightFormat(storage="int4", zero_point=True, activation="int8")

Usage = namedtuple("Usage", "total used free")


def _emit(program: Program, folder: Path, **options: Any) -> tuple[Any, EngineReport]:
    built: list[EngineReport] = []
    with BundleWriter(folder / "b") as writer:
        emit_options = EmitOptions(context_length=64, record=built.append, **options)
        target = TensorRtRtxEmitter().emit(program, writer, silent, emit_options)
        # Nothing is left of the graph that it was built from.
        assert [p.name for p in writer.folder.iterdir()] == ["targets"]
    return target, built[0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "default", "embeddings", "offsets", "dtype", "gpus"),
    [
        ("llama", INT4_OFFSETS, INT8_GROUPS, "keep", "f16", ("8.0", "12.0")),
        ("gemma2", INT4_OFFSETS, INT4_OFFSETS, "requantize", "bf16", ("8.6",)),  # tied: a table and the head
        ("llama", INT4_CHANNEL, INT4_CHANNEL, "requantize", "f16", ("8.9",)),
        ("mixtral", WeightFormat(storage="fp8"), WeightFormat(storage="f32"), "keep", "f16", ("8.9",)),
    ],
)
def test_formats(
    family: str,
    default: WeightFormat,
    embeddings: WeightFormat,
    offsets: Any,
    dtype: Any,
    gpus: tuple[str, ...],
    tmp_path: Path,
) -> None:
    context = PassContext(
        recipe=PassOptions(
            weights=WeightFormats(default=default, embeddings=embeddings), engines=OffsetOptions(offsets=offsets)
        )
    )
    program = lowered(tiny_family(family), context)
    PassManager([p for p in TensorRtRtxEmitter().passes() if p.wanted(context)], context).run(program)
    engines = EnginesSection(gpus=gpus, dtype=dtype)
    target, built = _emit(program, tmp_path, engines=engines, buckets=BucketPlan.from_sizes((8, 32), (2,), 2))
    section, io = target.section(TensorRtSection), target.section(LinearIo)
    assert section is not None and section.compute_capabilities == built.compute_capabilities == gpus
    assert io is not None and section.dtype == io.cache_groups[0].dtype == dtype
    (engine,) = section.engines
    assert engine.phase == "both" and engine.bytes == built.file_bytes
    assert [(p.phase, p.B, p.S) for p in engine.profiles] == [
        ("decode", (1, 2, 2), (1, 1, 1)),
        ("prefill", (1, 1, 2), (1, 8, 8)),
        ("prefill", (1, 1, 2), (9, 32, 32)),
    ]


def test_what_stands_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered(tiny_family("llama"))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1000))
        with pytest.raises(CapacityError, match=r"b: building the engine needs [\d,]+ bytes, and 1,000 are free"):
            _emit(program, tmp_path)
    assert list(tmp_path.iterdir()) == []
