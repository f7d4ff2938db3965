"""The middle of an export: the common passes, then each target's own on a copy, all of them measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from enginewright.optimizer.report.diffs import DiffRecorder, ProgramDiff
from enginewright.optimizer.shared.export_records import PassSummary
from enginewright.optimizer.verify import PassMeasurements
from enginewright.passes.framework.base import Pass, PassContext, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.print_program import print_program
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import (
    EnginewrightError,
    MissingDependencyError,
    PassError,
    TargetError,
    UnsupportedModelError,
)
from enginewright.runtime.shared.progress import Progress, ProgressEvent


@dataclass
class Rewritten:
    """The result of the passes.

    Attributes:
        programs: target -> its program.
        records, summaries: one for each run of a pass, in order; the summaries contain the measurements.
        diffs: the changes of each pass to the program.
        failed: target -> the error of the pass that failed; such a target has no program.
    """

    programs: dict[str, Program] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    summaries: list[PassSummary] = field(default_factory=list)
    diffs: list[ProgramDiff] = field(default_factory=list)
    failed: dict[str, EnginewrightError] = field(default_factory=dict)


OF_ONE_TARGET = (TargetError, UnsupportedModelError, PassError, MissingDependencyError)
"""The errors in one target's passes or emitter that don't stop the export of the other targets."""


def first_of(failed: Mapping[str, EnginewrightError]) -> EnginewrightError:
    """Returns the error that an export raises if all of its targets failed."""
    return next(iter(failed.values()))


def rewrite(
    program: Program,
    passes: Sequence[Pass],
    of_targets: Mapping[str, Sequence[Pass]],
    context: PassContext,
    measurements: PassMeasurements,
    progress: Progress,
) -> Rewritten:
    """Runs ``passes`` on ``program``, and each target's passes on a copy of the result.

    Args:
        of_targets: each target's passes, in the order of emitting.
        measurements: called after every pass.
        progress: called with the stage "passes".

    Raises:
        PassError: a required pass changed nothing: one of ``passes``, or in every target.
        VerificationError: a pass changed the results by more than the recipe allows.
    """
    result = Rewritten()
    diffs, owners = DiffRecorder(), list[str]()
    total = sum(one.wanted(context) for target_passes in (passes, *of_targets.values()) for one in target_passes)

    def run(given: Sequence[Pass], rewritten: Program, target: str = "") -> None:
        some = [one for one in given if one.wanted(context)]
        measurements.begin(some, target)

        def after_pass(now: Program, record: PassRecord) -> None:
            if record.matched:
                diffs.changed(len(result.records), record.name, print_program(now, node_names=True))
            result.records.append(record)
            owners.append(target)
            measurements.after(now, record)
            progress(ProgressEvent("passes", len(result.records), total, record.name))

        diffs.start(print_program(rewritten, node_names=True))
        PassManager(some, context, after_pass).run(rewritten)

    run(passes, program)
    for target, target_passes in of_targets.items():
        copy = program.copy()
        try:
            run(target_passes, copy, target)
        except OF_ONE_TARGET as e:
            result.failed[target] = e
        else:
            result.programs[target] = copy
    if not result.programs:
        raise first_of(result.failed)
    result.diffs = diffs.diffs
    result.summaries = [
        PassSummary(
            record.name,
            record.matched,
            record.rejected,
            round(record.seconds, 4),
            target,
            measurement,
            record.metrics,
        )
        for record, target, measurement in zip(result.records, owners, measurements.found, strict=True)
    ]
    return result
