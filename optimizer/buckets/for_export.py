"""The buckets of an export: sizes for the model's context, a program for each, and a step of each run and compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.passes.memory.specialize_program import specialize_program
from enginewright.plugins.cpu.executable import CpuProgram
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle.buckets import Bucket, BucketPlan, plan_path
from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import PROGRAM_FILE, Bundle
from enginewright.runtime.executors.static_shapes import pad, padding_blocks
from enginewright.runtime.kv_cache.cache_groups import free_memory
from enginewright.runtime.shared.contracts import CacheGroup, ModelInfo, StepInput
from enginewright.runtime.shared.errors import CapacityError, RecipeError, VerificationError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .choose import BucketSource, choose
from .report import BucketsReport, ProgramReport, SizesReport

_RUN_HERE = ("cpu",)

_PAST = 40
"""Tokens before that of a decode step: more than a block."""

_MOST_SECONDS = 30.0
"""That an export runs steps of buckets for."""


@dataclass(frozen=True)
class ExportBuckets:
    """What an export makes of [buckets].

    Attributes:
        section: with sizes alone, for the manifest: it says all that there is to know, without a file beside it.
        sizes: what they were chosen by; None where the recipe lists them.
    """

    section: BucketsSection
    plan: BucketPlan
    sizes: SizesReport | None


def check_files(section: BucketsSection) -> None:
    """Raises what ``buckets_of`` would raise of the files that a recipe names, before there is a model."""
    if not section.tokens:
        choose(_source(section))


def _source(section: BucketsSection) -> BucketSource:
    return BucketSource(**section.model_dump(exclude={"tokens", "batch"}))


def buckets_of(section: BucketsSection, context_length: int) -> ExportBuckets:
    """The sizes for a model of that context.

    Raises:
        RecipeError: a size is beyond the context.
        RequestError: a file is invalid; see ``choose``.
    """
    report: SizesReport | None = None
    tokens, batch = section.tokens, section.batch
    if not tokens:
        chosen = choose(_source(section), context_length)
        tokens, batch, report = chosen.tokens, chosen.batch, chosen.report
    if tokens[-1] > context_length:
        raise RecipeError(
            f"buckets.tokens: a bucket of {tokens[-1]:,} tokens is beyond the context of {context_length:,}",
            hint="No step has more tokens than a request may: leave it out, or export for a longer context.",
        )
    sizes = BucketsSection(tokens=tokens, batch=batch, max_batch=section.max_batch)
    return ExportBuckets(sizes, BucketPlan.of(tokens, batch, section.max_batch), report)


def write_programs(writer: BundleWriter, target: str, plan: BucketPlan) -> list[ProgramReport]:
    """Writes the plan and a specialised program for each bucket into a target's folder, from its program there."""
    path = writer.folder / target_folder(target) / PROGRAM_FILE
    program = LoweredProgram.from_json(path.read_bytes(), source=str(path))
    reports = []
    for bucket in plan.buckets:
        start = time.perf_counter()
        fixed = specialize_program(program, bucket.tokens, bucket.requests, bucket.rows)
        text = fixed.to_json()
        writer.write_text(f"{target_folder(target)}/{bucket.file}", text)
        reports.append(
            ProgramReport(
                name=bucket.name,
                tokens=bucket.tokens,
                requests=bucket.requests,
                rows=bucket.rows,
                seconds=round(time.perf_counter() - start, 4),
                file_bytes=len(text.encode()),
                arena_bytes=fixed.arena_bytes.constant,
                arena_bytes_any=program.arena_bytes.evaluate(bucket.tokens, bucket.requests, bucket.rows),
            )
        )
    writer.write_text(plan_path(target), plan.to_json())
    return reports


def check_programs(
    bundle: Bundle,
    target: str,
    sizes: SizesReport | None,
    programs: Sequence[ProgramReport],
    progress: Progress = silent,
    *,
    memory_budget: int | None = None,
    seconds: float = _MOST_SECONDS,
) -> BucketsReport:
    """Runs the smallest step that goes to each bucket, padded, in its program, and as it is in the program of any size.

    Args:
        bundle: complete.
        target: one that is run here, or whose report is given back as it is.
        sizes, programs: of ``buckets_of`` and ``write_programs``.
        progress: called with the stage "buckets".
        memory_budget: bytes of memory that may be taken; None: what is free. A bucket that needs more is not run.
        seconds: after so many no other bucket is run; the small ones come first.

    Raises:
        VerificationError: logits differ in any bit.
        BundleError: a program is none that the target takes.
    """
    if target not in _RUN_HERE:
        return BucketsReport(target, sizes, list(programs))
    plan = bundle.buckets[target]
    start, memory_budget = time.perf_counter(), free_memory() if memory_budget is None else memory_budget
    reports = {report.name: report for report in programs}
    for done, bucket in enumerate(sorted(plan.buckets, key=lambda b: b.tokens)):
        progress(ProgressEvent("buckets", done, len(plan.buckets), bucket.name))
        report = reports[bucket.name]
        if report.arena_bytes + report.arena_bytes_any > memory_budget or time.perf_counter() - start > seconds:
            continue
        below = [b.tokens for b in plan.buckets if b.kind == bucket.kind and b.tokens < bucket.tokens]
        try:
            _check(bundle, target, bucket, 1 + max(below, default=0), plan)
        except CapacityError:
            continue  # the bundle is good all the same: it is served where there is memory
        reports[bucket.name] = replace(report, checked=1)
    progress(ProgressEvent("buckets", len(plan.buckets), len(plan.buckets)))
    return BucketsReport(target, sizes, [reports[bucket.name] for bucket in plan.buckets])


def _check(bundle: Bundle, target: str, bucket: Bucket, tokens: int, plan: BucketPlan) -> None:
    any_size = bundle.program(target)
    groups = [group.to_group() for group in any_size.cache_groups]
    step = _smallest_step(bucket, tokens, groups, bundle.model)
    used = {name: int(table.max()) + 1 for name, table in step.block_tables.items()}
    padding = padding_blocks(plan, groups)
    blocks = {name: used[name] + padding[name] for name in used}
    weights = {use.name: bundle.weight(use.name) for use in any_size.weights}
    expected = CpuProgram(any_size, weights, blocks=blocks).run(step).logits
    padded = pad(step, bucket, groups, used)
    found = CpuProgram(bundle.bucket_program(target, bucket), weights, blocks=blocks).run(padded).logits
    assert expected is not None and found is not None
    if not np.array_equal(found[: len(expected)], expected, equal_nan=True):
        raise VerificationError(
            f"target {target}: the program of bucket {bucket.name} computes other logits than that of any size",
            hint="Please report it, with the model's configuration and the recipe; leave [buckets] out until then.",
        )


def _smallest_step(bucket: Bucket, tokens: int, groups: Sequence[CacheGroup], model: ModelInfo) -> StepInput:
    """A prompt of so many tokens, or a decode step of so many requests, each in blocks of its own.

    Requests of a decode step have a past, whose keys and values are the zeros that a cache has at first.
    """
    requests = tokens if bucket.kind == "batch" else 1
    past = min(_PAST, model.context_length - 1) if bucket.kind == "batch" else 0
    each = tokens // requests
    positions = np.tile(np.arange(past, past + each, dtype=np.int32), requests)  # [T]
    owners = np.repeat(np.arange(requests), each)  # [T]
    tables, slots = {}, {}
    for group in groups:
        width, size = -(-(past + each) // group.block_size), np.int32(group.block_size)
        tables[group.name] = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
        slots[group.name] = tables[group.name][owners, positions // size] * size + positions % size
    return StepInput(
        ids=np.random.default_rng(tokens).integers(0, model.vocab_size, tokens, dtype=np.int32),
        positions=positions,
        q_start=np.arange(0, tokens + 1, each, dtype=np.int32),
        kv_len=np.full(requests, past + each, np.int32),
        block_tables=tables,
        slots=slots,
        rows=np.arange(each - 1, tokens, each, dtype=np.int32),
        return_logits=True,
    )
