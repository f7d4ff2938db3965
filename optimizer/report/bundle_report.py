"""``open_report``: the report of a bundle's export, with the properties of the bundle; its steps can be timed again."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginewright.optimizer.shared.export_records import PassSummary
from enginewright.optimizer.shared.files import write_output
from enginewright.optimizer.shared.storage import arena_sizes, stored_weights
from enginewright.runtime.bundle.buckets import KINDS
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.json_document import parse_shown
from enginewright.runtime.shared.progress import Progress, silent

from . import numbers
from .document import PAGE_PATH, REPORT_PATH, ReportDocument, SavedReport, read_report
from .lines import quality_sentence
from .page import RooflineView, passes_of, render_page, roofline_view, rooflines_of
from .roofline import PROMPT, Roofline, measure

MEASURE_SECONDS = 15.0
"""The approximate seconds for which a report times steps."""

# As passes/quantization/apply_gptq.py and held_out.py call themselves and metrics; importing it would load torch.
APPLY_GPTQ, APPLY_GPTQ_IN_0_1 = "apply_gptq", "choose_integers"
HELD_OUT_NEAREST, HELD_OUT_ERROR = "nearest, held-out tokens: relative error", "held-out tokens: relative error"
BETTER_HELD_OUT = "better on held-out tokens"


@dataclass(frozen=True)
class BundleReport:
    """A bundle with the report of its export.

    Attributes:
        bundle: the bundle.
        saved: the files of the report.
        rooflines: the steps of each target, timed now, timed at the export, or predicted.
    """

    bundle: Bundle
    saved: SavedReport
    rooflines: tuple[Roofline, ...]

    @property
    def page_path(self) -> Path | None:
        """The page that the export wrote; None if it is missing."""
        path = self.bundle.path / PAGE_PATH
        return path if path.is_file() else None

    @property
    def passes(self) -> list[tuple[PassSummary, int]]:
        """The passes that changed or rejected something, with the number of rejected places."""
        return [(entry, n) for entry, n in passes_of(self.bundle, self.saved.document) if entry.matched or n]

    def page(self) -> str:
        """Returns the page as HTML."""
        return render_page(self.bundle, self.saved, self.rooflines)

    def write_page(self, path: Path) -> None:
        """Writes the page to a file. Raises BundleError if it can't be written."""
        write_output(path, self.page())

    def to_json(self) -> dict[str, Any]:
        """Returns report.json with this report's rooflines. If the bundle has no report.json, only its storage,
        rooflines and arena are returned.
        """
        path = self.bundle.path / REPORT_PATH
        report: dict[str, Any] = (
            parse_shown(read_regular(path, most=MOST_JSON_BYTES)) if self.saved.document is not None else {}
        )
        return report | {
            "storage": [asdict(part) for part in stored_weights(self.bundle)],
            "rooflines": [asdict(roofline) for roofline in self.rooflines],
            "arena": [asdict(size) for size in arena_sizes(self.bundle)],
        }

    def size_line(self) -> str:
        """Returns a line with the bundle's size, the types of its weights, and bits a parameter."""
        nbytes = sum(file.bytes for file in self.bundle.files.values())
        types: Counter[str] = Counter()
        for tensor in self.bundle.index.stored_once().values():
            types[tensor.kind] += tensor.bytes
        if not types:
            return f"{numbers.format_bytes(nbytes)}: engines, which have the weights in them"
        parts = ", ".join(f"{dtype} {numbers.format_bytes(n)}" for dtype, n in types.most_common())
        line = f"{numbers.format_bytes(nbytes)}: {parts}"
        if count := self.bundle.model.parameters:
            line += f"; {numbers.significant(8 * sum(types.values()) / count)} bits a parameter"
        return line

    def quality_line(self) -> str | None:
        """Returns a sentence about the bundle's quality; None if it wasn't compared with the source."""
        return None if self.saved.document is None else quality_sentence(self.saved.document)

    def speed_lines(self) -> list[str]:
        """Returns a line for each shape that was timed or predicted."""
        longest = min(PROMPT, self.bundle.model.context_length)
        return [line for roofline in self.rooflines for line in _speed(roofline_view(roofline), longest)]

    def bucket_lines(self) -> list[str]:
        """Returns lines with the sizes that steps are padded to, and the padding; none without buckets."""
        document = self.saved.document
        chosen = document.bucket_sizes.kinds if document is not None and document.bucket_sizes is not None else ()
        wastes = {
            k.kind: f"; padding {k.chosen.share:.1%}, with one size {k.one_size.share:.1%}"
            f", as many powers of two {k.powers_of_two.share:.1%}"
            for k in chosen
        }
        return [
            f"{name}, {kind}: {', '.join(map(str, sizes))}{wastes.get(kind, '')}"
            for name, plan in self.bundle.buckets.items()
            for kind in KINDS
            if (sizes := plan.sizes(kind))
        ]

    def memory_lines(self) -> list[str]:
        """Returns lines with the size of the arena, and the most bytes alive at once; none without target cpu."""
        return [
            f"{size.name}: {numbers.format_bytes(size.arena_bytes)} for values, "
            f"of which {numbers.format_bytes(size.live_bytes)} are alive at once"
            for size in arena_sizes(self.bundle)
        ]

    def time_line(self) -> str | None:
        """Returns a line with the time of the export by stages, and its memory; None if there is no report."""
        document = self.saved.document
        if document is None or document.seconds is None:
            return None
        stages = ", ".join(f"{name} {numbers.duration(t)}" for name, t in document.stages.items() if t >= 0.05)
        line = numbers.duration(document.seconds) + (f": {stages}" if stages else "")
        if document.peak_rss_bytes is not None:
            line += f"; {numbers.format_bytes(document.peak_rss_bytes)} of memory at most"
        return line


def open_report(path: Path, *, again: bool = False, threads: int = 0, progress: Progress = silent) -> BundleReport:
    """Opens a bundle and its report. Parts that are missing, or that an older report lacks, are left out.

    Args:
        path: the bundle's folder, which isn't changed.
        again: True to time the steps now, for some seconds.
        threads: threads of the timed kernels; 0 for one per core.
        progress: called with the stage "roofline".

    Raises:
        BundleError: the bundle, or its report, is damaged.
        CapacityError: there isn't enough memory to run it.
    """
    bundle = Bundle.open(path)
    saved = read_report(bundle)
    if again:
        timed = measure(bundle, seconds=MEASURE_SECONDS, measured="report", threads=threads, progress=progress)
        return BundleReport(bundle, saved, (timed,))
    return BundleReport(bundle, saved, rooflines_of(bundle, saved.document))


def _speed(view: RooflineView, longest: int) -> list[str]:
    """Returns a line for each shape. ``longest``: the tokens of the prompt that is timed if there is enough time."""
    lines = []
    for shape in view.shapes:
        cost = shape.shape.cost
        line = f"{shape.shape.name}: "
        if shape.tokens_per_second is None:
            line += f"{numbers.format_bytes(cost.memory)} of weights and KV cache"
            line += f", {numbers.count(cost.multiply_adds)} multiply-adds"
        else:
            line += f"{numbers.rate(shape.tokens_per_second)} tokens/s"
            line += f", {numbers.of_machine(shape.share)}" if shape.share is not None else ""
            if shape.shape.requests < shape.shape.tokens < longest:
                line += f"; a prompt of {longest}, as `optimize bench` times it, takes too long for an export"
        lines.append(line)
    return lines


def measured_lines(document: ReportDocument) -> list[str]:
    """Returns the measurement of passes as lines; empty if they weren't measured."""
    if (v := document.pass_verification) is None:
        return []
    times = "once" if v.measured == 1 else f"{v.measured} times"
    return [f"measured {times} on {v.tokens:,} tokens ({v.origin}), in {numbers.duration(v.seconds)}"]


def quantized_lines(document: ReportDocument) -> list[str]:
    """Returns the counts of quantized, saturated and vanished values as lines; empty if nothing was quantized."""
    if (q := document.quantization) is None:
        return []
    unchanged = f"{q.kept:,} the source's own integers, " if q.kept else ""
    return [
        f"{q.values:,} quantized: {unchanged}{q.saturated:,} saturated, {q.vanished:,} groups of small ones became zero"
    ]


def calibration_lines(document: ReportDocument) -> list[str]:
    """Returns the coverage of calibration tokens and its gaps as lines; empty if nothing was calibrated."""
    if (c := document.calibration) is None:
        return []
    tokens = f"{c.coverage.tokens:,} tokens in {c.coverage.sequences:,} sequences"
    line = f"{c.origin}: {tokens}, {c.coverage.vocabulary_share:.1%} of the vocabulary"
    return [line, *_gptq_lines(document), *(f"warning: {text}" for text in c.coverage.warnings)]


def _gptq_lines(document: ReportDocument) -> list[str]:
    """Returns the errors of GPTQ and of the nearest integers on held-out tokens, as a line; empty without GPTQ."""
    passes = [entry for entry in document.passes if entry.name in (APPLY_GPTQ, APPLY_GPTQ_IN_0_1)]
    figures = [f for entry in passes for f in entry.figures]
    gptq, nearest = (
        {f.where: f.value for f in figures if f.name == name} for name in (HELD_OUT_ERROR, HELD_OUT_NEAREST)
    )
    if not gptq or gptq.keys() != nearest.keys():
        return []
    reasons = [r.reason for entry in passes for r in entry.rejected]
    fell_back = sum(BETTER_HELD_OUT in reason for reason in reasons)
    errors = " and ".join(
        f"{sum(errors_by_linear.values()) / len(errors_by_linear):.4f}" for errors_by_linear in (gptq, nearest)
    )
    line = f"GPTQ's and the nearest integers' errors of a linear's output on held-out tokens: {errors} on average"
    return [f"{line}; {fell_back} of {len(gptq)} linears have nearest ones, which are better there"]
