"""Segments as a target: engines, kernels and schedule are in the bundle, and it opens; a damaged one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.emit.engine_report import EngineReport
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.engines.segments import SegmentStep, schedule_of
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.tensorrt_rtx.compile import emit_segments as module
from enginewright.plugins.tensorrt_rtx.compile.emit_segments import emit_segments, profiles_of
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, TargetError
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model
from tests.passes.small_programs import Shape, decoder
from tests.plugins.graphs.linear_session import lowered
from tests.plugins.tensorrt_rtx.compile.segment_session import MANIFEST

TARGET = "tensorrt-rtx"


@pytest.mark.matrix
def test_a_bundle_of_segments(tmp_path: Path) -> None:
    for package in ("tensorrt_rtx", "triton"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'enginewright[tensorrt-rtx]'")
    program = lowered(make_tiny_model("Llama", num_hidden_layers=3))
    reports: list[EngineReport] = []
    options = EmitOptions(engines=EnginesSection(requests=2, chunk=8, dtype="bf16"), record=reports.append)
    with BundleWriter(tmp_path / "b") as writer:
        section_written = emit_segments(program, writer, silent, options, ("8.9",))
        writer.commit(MANIFEST, {TARGET: section_written})
    bundle = Bundle.open(tmp_path / "b")
    schedule, section = schedule_of(bundle, TARGET), bundle.target(TARGET).section(TensorRtSection)
    assert section is not None and section.form == "segments" and section.dtype == schedule.dtype == "bf16"
    runs = [step.segment for step in schedule.steps if isinstance(step, SegmentStep)]
    assert runs == ["segment_0", "segment_1", "segment_1", "segment_2"]
    assert [engine.file for engine in section.engines] == [f"segment_{i}.plan" for i in range(3)]
    assert [p.model_dump() for p in schedule.profiles] == [
        {"T": (1, 2, 2), "R": (1, 2, 2)},
        {"T": (1, 8, 8), "R": (1, 1, 8)},
    ]
    (kernels,) = schedule.kernels
    assert kernels.layers == (0, 1, 2) and kernels.compute_capability == "8.9"
    assert kernels.write.startswith("kv_write-sm89-") and kernels.combine.startswith("combine_splits-sm89-")
    assert all(stem.startswith("paged_attention-sm89-") for stem in (*kernels.prefill, *kernels.decode))
    assert {group.dtype for group in schedule.cache_groups} == {"bf16"}
    assert [(r.file, r.file_bytes) for r in reports] == [
        (f"targets/{TARGET}/{e.file}", e.bytes) for e in section.engines
    ]
    assert not [path.name for path in (tmp_path / "b").iterdir() if path.name.startswith("tmp")]
    bundle.verify_hashes()

    (tmp_path / "b/targets" / TARGET / "segment_1.plan").write_bytes(b"")
    with pytest.raises(BundleError, match=r"segment_1.plan: 0 bytes"):
        Bundle.open(tmp_path / "b")


def test_a_gpu_without_kernels_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "build_engine", pytest.fail)
    program = decoder(Shape())
    LowerAttention().run(program, PassContext())
    with BundleWriter(tmp_path / "b") as writer, pytest.raises(TargetError, match="capability 75"):
        emit_segments(program, writer, silent, EmitOptions(), ("8.9", "7.5"))


@pytest.mark.parametrize(
    ("section", "most"),
    [(EnginesSection(requests=2, chunk=8), 8), (EnginesSection(requests=64, chunk=32), 64), (EnginesSection(), 512)],
)
def test_every_step_of_fewer_tokens_runs_in_the_last_profile(section: EnginesSection, most: int) -> None:
    decode, mixed = profiles_of(section)
    assert decode.T == decode.R and decode.T[2] == (section.requests or 16)
    assert (mixed.T[2], mixed.R[2]) == (most, most)
    assert all(mixed.holds(tokens, rows) for tokens in (1, most) for rows in (1, tokens))
