"""The report of an export: for report/report.json, ``--json`` and callers of ``export``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from enginewright.optimizer.buckets.report import SizesReport
from enginewright.optimizer.report.roofline import Roofline
from enginewright.optimizer.search.report import AutoReport, Candidate, KvFormatsReport, KvHeadsReport, PruneReport
from enginewright.optimizer.shared.export_records import (
    CalibrationReport,
    ExportedOn,
    FusionEffects,
    PassSummary,
    PassVerification,
    VerificationReport,
)
from enginewright.optimizer.shared.storage import StoredBytes
from enginewright.passes.framework.records import QuantizationReport, StoredWeight
from enginewright.plugins.emit.engine_report import EngineReport


@dataclass(frozen=True)
class MemoryReport:
    """The limit of memory and the process's largest resident size, in bytes.

    Attributes:
        limit: the limit.
        peak: the largest resident size, by the system's count, mapped files included.
        kept: True if the limit wasn't exceeded.
    """

    limit: int
    peak: int
    kept: bool


@dataclass(frozen=True)
class ExportReport:
    """The report of an export.

    Attributes:
        peak_rss_bytes: the process's largest resident size so far, as the system counts it.
        memory: the same compared with the limit; None without a limit.
        bundle_bytes: bytes of all files except manifests and report/.
        stages: seconds by stage: capture, calibration, search (for formats and shapes), measure (the program against
            the source after each pass), passes, emit, verify (the complete bundle against the source), roofline and
            fusions (the effect of each of a target's fusions on this machine).
        pass_verification: the settings by which passes were measured.
        verification, rooflines, fusion_effects: an entry for each target; the first of ``verification`` has the
            source's speed.
        engines: an entry for each engine that was built.
        kv_heads: the grouping of key and value heads; None if they weren't grouped.
        kv_formats: the search for the formats of keys and values; None if there was none.
        pruning: the search for weights to remove; None if there was none.
        bucket_sizes: the choice of step sizes; None if the recipe lists them or has none.
        ways: the candidates compared, if both formats and shapes were searched for.
        source_bytes: bytes of the source's weights as stored.
        already_quantized: the weights that the checkpoint had quantized, each with a flag that says if its values were
            kept.
        source_warnings: settings of the source that aren't followed, and problems of its tokenizer.
        template_appends: True if the chat template only appends (see ``Tokenizer.template_appends``).
        failed: the targets that the bundle lacks, each with its error.
        kept_since: the time (ISO 8601) of the earlier export that made this bundle; None if this one made it. All
            figures except ``seconds`` are then the earlier export's.

    The changes of passes to the program are in report/diffs.json.
    """

    path: str
    recipe: str
    targets: list[str]
    parameters: int
    context_length: int
    seconds: float
    peak_rss_bytes: int
    memory: MemoryReport | None
    bundle_bytes: int
    stages: dict[str, float]
    passes: list[PassSummary]
    calibration: CalibrationReport | None
    quantization: QuantizationReport | None
    auto: AutoReport | None
    pass_verification: PassVerification
    verification: list[VerificationReport]
    storage: list[StoredBytes]
    rooflines: list[Roofline]
    fusion_effects: list[FusionEffects]
    pruning: PruneReport | None = None
    bucket_sizes: SizesReport | None = None
    engines: list[EngineReport] = field(default_factory=list)
    kv_heads: list[KvHeadsReport] = field(default_factory=list)
    kv_formats: KvFormatsReport | None = None
    ways: list[Candidate] = field(default_factory=list)
    exported: ExportedOn | None = None
    source_bytes: int | None = None
    template_appends: bool | None = None
    kept_since: str | None = None
    already_quantized: list[StoredWeight] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    source_warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json`` and report/report.json."""
        return asdict(self)
