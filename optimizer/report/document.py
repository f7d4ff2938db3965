"""Reads report/report.json of a bundle of this version or an earlier one; parts that are missing there are left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from enginewright.optimizer.buckets.report import SizesReport
from enginewright.optimizer.search.report import AutoReport, Candidate, KvFormatsReport, KvHeadsReport, PruneReport
from enginewright.optimizer.shared.export_records import (
    CalibrationReport,
    ExportedOn,
    FusionEffects,
    PassSummary,
    PassVerification,
    VerificationReport,
)
from enginewright.optimizer.shared.storage import ArenaSize, StoredBytes
from enginewright.passes.framework.records import QuantizationReport, StoredWeight
from enginewright.plugins.emit.engine_report import EngineReport
from enginewright.runtime.bundle.manifest import REPORT_FOLDER
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.json_document import parse_shown

from .diffs import ProgramDiff
from .roofline import Roofline

REPORT_PATH = f"{REPORT_FOLDER}report.json"
DIFFS_PATH = f"{REPORT_FOLDER}diffs.json"
PAGE_PATH = f"{REPORT_FOLDER}report.html"

T = TypeVar("T")


class ReportDocument(BaseModel):
    """The content of report.json, as ``export.report.ExportReport`` writes it. Every field may be missing."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    context_length: int | None = None
    seconds: float | None = None
    peak_rss_bytes: int | None = None
    bundle_bytes: int | None = None
    stages: dict[str, float] = {}
    passes: tuple[PassSummary, ...] = ()
    pass_verification: PassVerification | None = None
    auto: AutoReport | None = None
    pruning: PruneReport | None = None
    fusion_effects: tuple[FusionEffects, ...] = ()
    bucket_sizes: SizesReport | None = None
    engines: tuple[EngineReport, ...] = ()
    kv_heads: tuple[KvHeadsReport, ...] = ()
    kv_formats: KvFormatsReport | None = None
    ways: tuple[Candidate, ...] = ()
    calibration: CalibrationReport | None = None
    quantization: QuantizationReport | None = None
    verification: tuple[VerificationReport, ...] = ()
    storage: tuple[StoredBytes, ...] = ()
    arena: tuple[ArenaSize, ...] = ()
    rooflines: tuple[Roofline, ...] = ()
    exported: ExportedOn | None = None
    source_bytes: int | None = None
    already_quantized: tuple[StoredWeight, ...] = ()


@dataclass(frozen=True)
class SavedReport:
    """The files of an export in report/. ``document`` is None if there is no report.json."""

    document: ReportDocument | None
    diffs: tuple[ProgramDiff, ...]


def read_report(bundle: Bundle) -> SavedReport:
    """Reads the folder report/ of a bundle; missing files aren't an error.

    Raises BundleError naming the damaged file and field.
    """
    document = _read(bundle.path / REPORT_PATH, TypeAdapter(ReportDocument))
    diffs = _read(bundle.path / DIFFS_PATH, TypeAdapter(tuple[ProgramDiff, ...]))
    return SavedReport(document, diffs or ())


def _read(path: Path, kind: TypeAdapter[T]) -> T | None:
    hint = "Remove the file for a report of what the bundle itself says, or export the model again."
    try:
        return kind.validate_python(parse_shown(read_regular(path, most=MOST_JSON_BYTES)))
    except FileNotFoundError:
        return None
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"{path}: {field or 'the document'}: {first['msg']}", hint=hint) from e
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else f"not JSON: {e}"
        raise BundleError(f"{path}: {reason}", hint=hint) from e
