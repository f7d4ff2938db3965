"""The parts of a report that need the complete bundle: its bytes by purpose, its speed, and the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginewright.optimizer.shared.storage import StoredBytes, arena_sizes, stored_weights
from enginewright.plugins.cpu.compile.machine import MOST_BYTES
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.memory import free_memory
from enginewright.runtime.shared.progress import Progress
from enginewright.runtime.shared.step_costs import stored_bytes
from enginewright.runtime.shared.targets import MEASURED

from .diffs import ProgramDiff
from .document import DIFFS_PATH, PAGE_PATH, REPORT_PATH, ReportDocument, SavedReport
from .page import render_page
from .roofline import Roofline, measure, predict

_SHARE = 0.03
_MOST_SECONDS = 3.0
"""The most seconds for which steps are timed within an export.

It is also at most the share ``_SHARE`` of its time so far.
"""

_BESIDE_WEIGHTS = (256 << 20) + MOST_BYTES
"""The most bytes besides weights: KV caches, the values of a prompt's step, and the measurement of the bandwidth."""


def storage_and_speed(
    folder: Path, targets: Sequence[str], elapsed: float, progress: Progress, memory_budget: int | None = None
) -> tuple[list[StoredBytes], list[Roofline]]:
    """Measures the storage and the speed of a complete bundle, for ``ExportReport``.

    Args:
        folder: the bundle's folder.
        targets: the bundle's targets. Those that run here are timed, for a small share of ``elapsed``. For others, and
            if there isn't enough memory, bytes and multiply-adds are predicted.
        elapsed: the seconds of the export so far.
        progress: called with the stage "roofline".
        memory_budget: the most bytes of memory to use; None for the free memory.
    """
    bundle = Bundle.open(folder)
    seconds = min(_MOST_SECONDS, _SHARE * elapsed)
    rooflines = [
        _roofline(bundle, name, seconds, progress, memory_budget) for name in targets if name in bundle.programs
    ]
    return stored_weights(bundle), rooflines


def _roofline(bundle: Bundle, target: str, seconds: float, progress: Progress, memory_budget: int | None) -> Roofline:
    needed = _BESIDE_WEIGHTS + sum(stored_bytes(use) for use in bundle.program(target).weights)
    if target == MEASURED and needed < (free_memory() if memory_budget is None else memory_budget):
        try:
            return measure(bundle, seconds=seconds, measured="export", progress=progress)
        except CapacityError:
            pass  # the bundle is good all the same: who serves it chooses how much memory its caches get
    return predict(bundle, target)


def report_files(folder: Path, report: Mapping[str, Any], diffs: Sequence[ProgramDiff]) -> dict[str, str]:
    """Returns the files of report/ by their paths in the bundle: the report as JSON, the changes of passes, and the
    page.

    Args:
        folder: the folder of the complete bundle.
        report: ``ExportReport.to_json()``.
        diffs: the changes that ``DiffRecorder`` recorded.
    """
    bundle = Bundle.open(folder)
    report = {**report, "arena": [asdict(size) for size in arena_sizes(bundle)]}
    saved = SavedReport(ReportDocument.model_validate(report), tuple(diffs))
    return {
        REPORT_PATH: json.dumps(report, indent=1) + "\n",
        DIFFS_PATH: json.dumps([asdict(diff) for diff in diffs], indent=1) + "\n",
        PAGE_PATH: render_page(bundle, saved),
    }
