"""The work of ``export`` on checked arguments: captures a decoder, rewrites it, writes a bundle and runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright.optimizer.calibration import Calibration, calibration_report
from enginewright.optimizer.recipes.stored import to_toml
from enginewright.optimizer.report.export_report import report_files
from enginewright.optimizer.search.compose import Searched
from enginewright.optimizer.search.report import RECIPE_COMMENT, RECIPE_FILE, AutoReport, heads_report
from enginewright.optimizer.shared.export_records import ExportedOn, PassVerification
from enginewright.optimizer.shared.resources import fewer_collections, peak_rss_bytes
from enginewright.passes.attention.group_kv_heads import GroupKvHeads
from enginewright.passes.ir.code_files import CodeFiles
from enginewright.passes.quantization.report import already_quantized, quantization_report
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.native.processor import processor_name
from enginewright.runtime.shared.errors import PartialExportError
from enginewright.runtime.shared.progress import ProgressEvent
from enginewright.runtime.shared.threads import available_threads

from .report import ExportReport
from .request import ExportRequest
from .rewrite import Rewritten, first_of
from .stages import (
    Clock,
    OpenModel,
    Ran,
    Written,
    calibration_tokens,
    find_model,
    measure_source,
    open_model,
    run_bundle,
    run_passes,
    search_within_budget,
    source_bytes,
    write_bundle,
)

if TYPE_CHECKING:
    from enginewright.optimizer.capture.hub import Listing


def compile_model(
    request: ExportRequest, output: str | Path, revision: str | None, listed: Listing | None, overwrite: bool
) -> ExportReport:
    """Runs the stages of ``export``, one after the other. Raises its errors.

    Args:
        request: the checked arguments of ``export``.
        output: the folder of the bundle.
        revision: branch, tag or commit of a Hub id.
        listed: the Hub's list of the model's files; None for a local model.
        overwrite: True replaces an existing bundle.
    """
    clock, on_progress = Clock(), request.on_progress
    with fewer_collections(), BundleWriter(output, overwrite, request.inputs) as writer:
        # 1. The model, fetched if it is the Hub's; its graph; its weights are read when they are needed.
        request = find_model(request, revision, listed, clock)
        model = open_model(request)
        clock.end("capture")

        # 2. What passes look at, what a budget leaves to be found, and what passes are held to.
        calibration = calibration_tokens(request, model)
        sequences = () if calibration is None else calibration.sequences
        clock.end("calibration")
        scratch = writer.folder / "scratch"  # what a killed export leaves goes with its folder
        scratch.mkdir()
        code_files = CodeFiles(scratch)
        searched = search_within_budget(request, model, sequences, scratch, code_files)
        model = replace(model, recipe=searched.recipe)
        clock.end("search")
        measurements = measure_source(request, model, sequences, clock)
        clock.end("measure")

        # 3. The passes, each measured.
        before = measurements.seconds
        rewritten = run_passes(request, model, sequences, scratch, code_files, measurements)
        clock.end("passes", elsewhere=measurements.seconds - before)
        measured = measurements.finish()

        # 4. The bundle, complete but for its name; then run as a user's will be.
        written = write_bundle(request, model, rewritten, writer, scratch, code_files)
        request = replace(request, targets=written.targets)
        clock.end("emit")
        ran = run_bundle(request, model, rewritten, writer.folder, clock)

        # 5. The report, and the name.
        on_progress(ProgressEvent("write", 0, 1, str(output)))
        results = _Results(model, calibration, searched, measured, rewritten, written, ran)
        report = _report(request, results, writer, clock, str(output))
        for path, text in report_files(writer.folder, report.to_json(), rewritten.diffs).items():
            writer.write_text(path, text)
        if searched.anything:
            writer.write_text(RECIPE_FILE, to_toml(model.recipe, RECIPE_COMMENT))
        writer.publish()
        on_progress(ProgressEvent("write", 1, 1, str(output)))
    if written.failed:
        raise _partial(report, written)
    return report


def _partial(report: ExportReport, written: Written) -> PartialExportError:
    """Returns the error for a bundle that lacks some of the requested targets."""
    error = PartialExportError(
        "; ".join(
            f"target {name} failed: {e.message.removeprefix(f'target {name}: ')}" for name, e in written.failed.items()
        ),
        report,
        hint=f"{report.path} was written for the others: {', '.join(report.targets)}.",
    )
    error.__cause__ = first_of(written.failed)
    return error


@dataclass(frozen=True)
class _Results:
    """The results of an export's stages, in their order."""

    model: OpenModel
    calibration: Calibration | None
    searched: Searched
    measured: PassVerification
    rewritten: Rewritten
    written: Written
    ran: Ran


def _report(request: ExportRequest, of: _Results, writer: BundleWriter, clock: Clock, path: str) -> ExportReport:
    model, searched, rewritten, written, ran = of.model, of.searched, of.rewritten, of.written, of.ran
    program, info = model.captured.program, model.captured.model_info
    metrics = [metric for record in rewritten.records for metric in record.metrics]
    grouped = [record for record in rewritten.records if record.name == GroupKvHeads.name]
    groups = rewritten.programs[request.targets[0]].cache_groups
    return ExportReport(
        path=path,
        recipe=model.recipe.name,
        targets=list(request.targets),
        parameters=written.info.parameters,
        context_length=info.context_length,
        seconds=round(clock.elapsed, 3),
        peak_rss_bytes=peak_rss_bytes(),
        memory=request.limit.report(),
        bundle_bytes=writer.bytes_written,
        stages={name: round(seconds, 3) for name, seconds in clock.seconds.items()},
        passes=rewritten.summaries,
        calibration=calibration_report(of.calibration, info.vocab_size, metrics),
        quantization=quantization_report((name, program.weights[name]) for name in program.weights),
        auto=_with_time(searched.auto, ran.ms_per_token),
        pruning=searched.pruning,
        pass_verification=of.measured,
        verification=ran.verification,
        storage=ran.storage,
        rooflines=ran.rooflines,
        fusion_effects=ran.fusion_effects,
        bucket_sizes=model.buckets.sizes if model.buckets else None,
        engines=list(written.engines),
        kv_heads=[heads_report(record, groups, searched.heads) for record in grouped],
        kv_formats=searched.caches,
        ways=list(searched.candidates),
        exported=ExportedOn(datetime.now(UTC).isoformat(timespec="seconds"), processor_name(), available_threads()),
        source_bytes=source_bytes(request.source),
        template_appends=model.template_appends,
        source_warnings=list(model.captured.warnings),
        already_quantized=already_quantized((name, program.weights[name]) for name in program.weights),
        failed={name: error.message for name, error in written.failed.items()},
    )


def _with_time(auto: AutoReport | None, ms_per_token: float | None) -> AutoReport | None:
    """Returns the search's report with the bundle's measured time of a token."""
    if auto is None or auto.time is None:
        return auto
    return replace(auto, time=replace(auto.time, measured=ms_per_token))
