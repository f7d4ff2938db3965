"""``export``: a model in, a bundle out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from enginewright.optimizer.calibration import Calibration, calibration_report
from enginewright.optimizer.emit.shared.bundle_writer import BundleWriter
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.stored import to_toml
from enginewright.optimizer.report.export_report import report_files
from enginewright.optimizer.search.compose import Searched
from enginewright.optimizer.search.report import RECIPE_COMMENT, RECIPE_FILE, heads_report
from enginewright.optimizer.shared.export_records import PassVerification
from enginewright.optimizer.shared.progress import Progress, ProgressEvent, silent
from enginewright.optimizer.shared.resources import fewer_collections, peak_rss_bytes
from enginewright.passes.attention.group_kv_heads import GroupKvHeads
from enginewright.passes.quantization.report import quantization_report

from .report import ExportReport
from .request import ExportRequest
from .rewrite import Rewritten
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
    write_bundle,
)


def export(
    source: str | Path | PreTrainedModel,
    output: str | Path,
    *,
    revision: str | None = None,
    recipe: str | Path | Recipe | None = None,
    targets: Sequence[str] | None = None,
    context_length: int | None = None,
    calibration: str | Path | None = None,
    recovered: str | Path | None = None,
    max_memory: int | str | None = None,
    gpus: Sequence[str] | None = None,
    kv_cache: str | None = None,
    overwrite: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Captures a decoder, rewrites it, writes a bundle, and compares it with the source all the way.

    Args:
        source: a Hugging Face directory, a GGUF file, a model's id on the Hugging Face Hub, such as "org/name" or
            "org/name:Q4_K_M" (see ``find_source``), or a transformers model, which is not touched.
        output: the bundle to write: a folder that appears whole or not at all.
        revision: of a Hub id: a branch, tag or commit.
        recipe: a built-in recipe's name, a TOML file, or a Recipe. By default f32, or what was recovered for.
        targets: instead of the recipe's.
        context_length: instead of the recipe's: the longest request in tokens.
        calibration: a file of text or JSONL for passes that look at what the model computes; without one a recipe that
            has such passes samples from the model.
        recovered: a folder of ``recover``, whose weights are exported in the places of the source's.
        max_memory: most bytes that the process may have resident, or a size such as "4GiB". More is never used in
            silence: the report says what was.
        gpus: instead of the recipe's: compute capabilities that engines are built for, such as "8.9" or "sm89".
        kv_cache: instead of the recipe's: what keys and values are stored in: "f32", "bf16", "int8" or "fp8".
        overwrite: replace an existing bundle.
        tokenizer: for a model object, which brings none.
        progress: called as the work goes on.

    Raises:
        SourceError, UnsupportedModelError, RecipeError, PassError, BundleError, CapacityError: as their names say; each
            names the file, field or module. Nothing is left behind, also after Ctrl-C.
        RequestError: the calibration file, or a recipe's file of lengths, is invalid, or ``max_memory`` no size.
        TargetError: there is no such GPU, or engines for it can't be built.
        VerificationError: a pass, or the bundle, differs from the source by more than the recipe allows; says by how
            much, and what a pass changed most.
    """
    clock, on_progress = Clock(), progress or silent
    asked = ExportRequest.of(
        source,
        recipe=recipe,
        targets=targets,
        context_length=context_length,
        calibration=calibration,
        recovered=recovered,
        max_memory=max_memory,
        gpus=gpus,
        kv_cache=kv_cache,
        tokenizer=tokenizer,
        on_progress=on_progress,
    )
    with fewer_collections(), BundleWriter(output, overwrite, asked.inputs) as writer:
        # 1. The model, fetched if it is the Hub's; its graph; its weights are read when they are needed.
        asked = find_model(asked, revision, clock)
        model = open_model(asked)
        clock.end("capture")

        # 2. What passes look at, what a budget leaves to be found, and what passes are held to.
        found = calibration_tokens(asked, model)
        sequences = () if found is None else found.sequences
        clock.end("calibration")
        scratch = writer.folder / "scratch"  # what a killed export leaves goes with its folder
        scratch.mkdir()
        searched = search_within_budget(asked, model, sequences, scratch)
        model = replace(model, recipe=searched.recipe)
        clock.end("search")
        measurements = measure_source(asked, model, sequences, clock)
        clock.end("measure")

        # 3. The passes, each measured.
        before = measurements.seconds
        rewritten = run_passes(asked, model, sequences, scratch, measurements)
        clock.end("passes", elsewhere=measurements.seconds - before)
        measured = measurements.finish()

        # 4. The bundle, complete but for its name; then run as a user's will be.
        written = write_bundle(asked, model, rewritten, writer, scratch)
        clock.end("emit")
        ran = run_bundle(asked, model, rewritten, written, writer.folder, clock)

        # 5. The report, and the name.
        on_progress(ProgressEvent("write", 0, 1, str(output)))
        report = _report(asked, model, found, searched, measured, rewritten, written, ran, writer, clock, str(output))
        for path, text in report_files(writer.folder, report.to_json(), rewritten.diffs).items():
            writer.write_text(path, text)
        if searched.anything:
            writer.write_text(RECIPE_FILE, to_toml(model.recipe, RECIPE_COMMENT))
        writer.publish()
        on_progress(ProgressEvent("write", 1, 1, str(output)))
    return report


def _report(
    asked: ExportRequest,
    model: OpenModel,
    calibration: Calibration | None,
    searched: Searched,
    measured: PassVerification,
    rewritten: Rewritten,
    written: Written,
    ran: Ran,
    writer: BundleWriter,
    clock: Clock,
    path: str,
) -> ExportReport:
    program, info = model.captured.program, model.captured.model_info
    metrics = [metric for record in rewritten.records for metric in record.metrics]
    grouped = [record for record in rewritten.records if record.name == GroupKvHeads.name]
    groups = rewritten.programs[asked.targets[0]].cache_groups
    return ExportReport(
        path=path,
        recipe=model.recipe.name,
        targets=list(asked.targets),
        parameters=written.info.parameters,
        context_length=info.context_length,
        seconds=round(clock.elapsed, 3),
        peak_rss_bytes=peak_rss_bytes(),
        memory=asked.limit.report(),
        bundle_bytes=writer.bytes_written,
        stages={name: round(seconds, 3) for name, seconds in clock.seconds.items()},
        passes=rewritten.summaries,
        calibration=calibration_report(calibration, info.vocab_size, metrics),
        quantization=quantization_report((name, program.weights[name]) for name in program.weights),
        auto=searched.auto,
        pruning=searched.pruning,
        pass_verification=measured,
        verification=ran.verification,
        storage=ran.storage,
        rooflines=ran.rooflines,
        fusion_effects=ran.fusion_effects,
        buckets=ran.buckets,
        engines=list(written.engines),
        kv_heads=[heads_report(record, groups, searched.heads) for record in grouped],
        ways=list(searched.candidates),
    )
