"""Moves a built engine into the bundle."""

from __future__ import annotations

from enginewright.runtime.bundle.manifest import target_folder

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...emit.engine_report import EngineReport
from ...engines.section import EngineSection
from .build_engine import BuiltEngine, EngineRequest

TARGET = "tensorrt-rtx"


def adopt_engine(
    built: BuiltEngine,
    request: EngineRequest,
    file: str,
    sizes: tuple[str, ...],
    writer: BundleWriter,
    options: EmitOptions,
) -> EngineSection:
    """Moves an engine's plan into the target's folder, records its report, and returns its section.

    Args:
        built: the result of the build.
        request: the request for which it was built; ``plan`` is the file to move.
        file: the name of the plan in the target's folder.
        sizes: its optimization profiles, as text for the report.
        writer: the bundle's writer.
        options: the emitter's options, whose ``record`` gets the report.

    Raises:
        BundleError: the plan can't be moved.
    """
    path = f"{target_folder(TARGET)}/{file}"
    written = writer.adopt(path, request.plan)
    options.record(
        EngineReport(
            target=TARGET,
            file=path,
            seconds=built.seconds,
            peak_rss_bytes=built.peak_rss_bytes,
            file_bytes=written.bytes,
            compute_capabilities=request.compute_capabilities,
            profiles=sizes,
            attentions=built.attentions,
        )
    )
    return EngineSection(file=file, bytes=written.bytes, sha256=written.sha256)
