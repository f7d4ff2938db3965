from __future__ import annotations

from pathlib import Path

from enginewright.optimizer.emit.shared.engine_report import EngineReport
from enginewright.optimizer.report.bundle_report import open_report
from enginewright.optimizer.report.document import ReportDocument
from enginewright.optimizer.report.engine_lines import engine_lines
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection
from tests.runtime.tensorrt_bundles import plan, section, write_engines


def test_what_is_said_of_an_engine() -> None:
    engine = EngineReport(
        target="tensorrt-rtx",
        file="targets/tensorrt-rtx/model.plan",
        seconds=16.62,
        peak_rss_bytes=3 << 29,
        file_bytes=271 << 20,
        compute_capabilities=("8.6", "8.9"),
        profiles=("1 to 16 requests of 1 token", "1 to 4 prompts of 1 to 512 tokens"),
        attentions=30,
    )
    assert engine_lines(ReportDocument(engines=(engine,))) == [
        "tensorrt-rtx: targets/tensorrt-rtx/model.plan: 271.0 MiB for compute capability 8.6, 8.9, built in 16.6 s "
        "with 1.5 GiB of memory",
        "tensorrt-rtx: steps of 1 to 16 requests of 1 token; 1 to 4 prompts of 1 to 512 tokens",
    ]
    assert engine_lines(ReportDocument()) == []


def test_the_size_of_a_bundle_that_is_engines_alone(tmp_path: Path) -> None:
    model = ModelSection(name="a", architecture="b", vocab_size=3, context_length=4, parameters=1000)
    manifest = Manifest(model=model, source=SourceSection(kind="module", name="a"), targets=())
    path = write_engines(tmp_path / "b", manifest, section(plan()), plan())
    assert open_report(path).size_line() == "4.0 KiB: engines, which have the weights in them"
