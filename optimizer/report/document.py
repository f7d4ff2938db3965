"""Reads report/report.json of a bundle, of this version or an earlier one: what is missing there is just not shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from enginewright.optimizer.buckets.report import BucketsReport
from enginewright.optimizer.emit.shared.engine_report import EngineReport
from enginewright.optimizer.search.report import AutoReport, Candidate, KvHeadsReport, PruneReport
from enginewright.optimizer.shared.storage import ArenaSize, StoredBytes
from enginewright.plugins.shared.errors import BundleError
from enginewright.plugins.shared.json_document import parse_json
from enginewright.runtime.bundle.manifest import REPORT_FOLDER
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular

from .diffs import ProgramDiff
from .roofline import Roofline

REPORT_PATH = f"{REPORT_FOLDER}report.json"
DIFFS_PATH = f"{REPORT_FOLDER}diffs.json"
PAGE_PATH = f"{REPORT_FOLDER}report.html"

T = TypeVar("T")


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RejectionEntry(_Section):
    """A place that a pass rejected."""

    node: str
    where: str
    reason: str


class FigureEntry(_Section):
    """A number that a pass measured at a module."""

    where: str
    name: str
    value: float


class MeasurementEntry(_Section):
    """How far the program is from its source after a pass: see ``verify.report.Measurement``."""

    tokens: int
    max_logit_error: float
    kl_mean: float
    top1_agreement: float
    perplexity: float | None = None
    source_perplexity: float | None = None
    unchanged: bool = False


class PassVerificationEntry(_Section):
    """How passes were measured: see ``verify.report.PassVerification``."""

    origin: str
    sequences: int
    tokens: int
    captured: MeasurementEntry
    measured: int
    seconds: float


class PassEntry(_Section):
    """What one run of a pass did."""

    name: str
    matched: int
    rejected: tuple[RejectionEntry, ...] = ()
    seconds: float | None = None
    target: str = ""
    measurement: MeasurementEntry | None = None
    figures: tuple[FigureEntry, ...] = ()


class ComparisonEntry(_Section):
    """How far from the source: see ``verify.report.Comparison``."""

    tokens: int
    max_logit_error: float
    largest_logit: float
    kl_mean: float
    kl_max: float
    top1_agreement: float


class TextEntry(ComparisonEntry):
    """The same over a text: see ``verify.report.TextComparison``."""

    windows: int
    windows_in_text: int
    perplexity: float
    source_perplexity: float


class VerificationEntry(_Section):
    """One target compared with the source."""

    target: str
    exact: bool
    random_tokens: ComparisonEntry
    tolerance: float | None = None
    max_kl: float | None = None
    text: TextEntry | None = None
    text_omitted: str | None = None
    seconds: float | None = None


class InputRangeEntry(_Section):
    """The largest input of a linear on the calibration tokens."""

    where: str
    largest: float


class CoverageEntry(_Section):
    """What the calibration tokens cover."""

    sequences: int
    tokens: int
    distinct_tokens: int
    vocabulary_share: float
    warnings: tuple[str, ...] = ()
    ranges: tuple[InputRangeEntry, ...] = ()


class CalibrationEntry(_Section):
    """Where the calibration tokens are from."""

    origin: str
    coverage: CoverageEntry


class QuantizationEntry(_Section):
    """What rounding did beyond rounding; ``kept``: weights that are the source's own integers."""

    values: int
    saturated: int
    vanished: int
    kept: int = 0


class FusionEntry(_Section):
    """Microseconds of a step with and without one fusion: see ``fusion_effects.FusionEffect``."""

    fusion: str
    matched: int
    decode_without: float | None = None
    decode_with: float | None = None
    prefill_without: float | None = None
    prefill_with: float | None = None
    decode_saves: tuple[float, float] | None = None
    prefill_saves: tuple[float, float] | None = None


class FusionEffectsEntry(_Section):
    """What a target's fusions change: see ``fusion_effects.FusionEffects``."""

    target: str
    context: int
    prefill_tokens: int
    effects: tuple[FusionEntry, ...] = ()
    skipped: str = ""
    decode_noise: float | None = None
    prefill_noise: float | None = None


class ReportDocument(_Section):
    """report.json. All of it may be missing: a bundle without a report has what the bundle itself says."""

    context_length: int | None = None
    seconds: float | None = None
    peak_rss_bytes: int | None = None
    bundle_bytes: int | None = None
    stages: dict[str, float] = {}
    passes: tuple[PassEntry, ...] = ()
    pass_verification: PassVerificationEntry | None = None
    auto: AutoReport | None = None
    pruning: PruneReport | None = None
    fusion_effects: tuple[FusionEffectsEntry, ...] = ()
    buckets: tuple[BucketsReport, ...] = ()
    engines: tuple[EngineReport, ...] = ()
    kv_heads: tuple[KvHeadsReport, ...] = ()
    ways: tuple[Candidate, ...] = ()
    calibration: CalibrationEntry | None = None
    quantization: QuantizationEntry | None = None
    verification: tuple[VerificationEntry, ...] = ()
    storage: tuple[StoredBytes, ...] = ()
    arena: tuple[ArenaSize, ...] = ()
    rooflines: tuple[Roofline, ...] = ()


@dataclass(frozen=True)
class SavedReport:
    """What an export left in report/. ``document`` is None where it left nothing, or it was removed."""

    document: ReportDocument | None
    diffs: tuple[ProgramDiff, ...]


def read_report(bundle: Bundle) -> SavedReport:
    """What is in the bundle's folder report/; missing files aren't an error.

    Raises BundleError naming the file, and the field, that is damaged.
    """
    document = _read(bundle.path / REPORT_PATH, TypeAdapter(ReportDocument))
    diffs = _read(bundle.path / DIFFS_PATH, TypeAdapter(tuple[ProgramDiff, ...]))
    return SavedReport(document, diffs or ())


def _read(path: Path, kind: TypeAdapter[T]) -> T | None:
    hint = "Remove the file for a report of what the bundle itself says, or export the model again."
    try:
        return kind.validate_python(parse_json(read_regular(path, most=MOST_JSON_BYTES)))
    except FileNotFoundError:
        return None
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"{path}: {field or 'the document'}: {first['msg']}", hint=hint) from e
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else f"not JSON: {e}"
        raise BundleError(f"{path}: {reason}", hint=hint) from e
