"""What an export did: for report/report.json, ``--json`` and whoever called ``export``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from enginewright.optimizer.buckets.report import SizesReport
from enginewright.optimizer.report.roofline import Roofline
from enginewright.optimizer.search.report import AutoReport, Candidate, KvHeadsReport, PruneReport
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
    """The limit that was set, and the process's largest resident size, from the system, mapped files included."""

    limit: int
    peak: int
    kept: bool


@dataclass(frozen=True)
class ExportReport:
    """What an export did. ``peak_rss_bytes`` is the process's largest resident size so far, from the system; ``memory``
    compares it with the limit, if there was one.

    ``stages`` are seconds: capture, calibration, search (for formats, and for what goes of the model), measure (the
    program against the source from pass to pass), passes, emit, verify (the complete bundle against the source),
    roofline and fusions (what each of a target's fusions is worth on this machine).
    ``bundle_bytes`` counts all files but manifests and report/. ``pass_verification`` says how passes were measured;
    ``verification``, ``rooflines`` and ``fusion_effects`` have an entry for each target, ``engines`` for each that was
    built; ``kv_heads`` has one if heads of keys and values were grouped; ``pruning`` says how it was searched for what
    goes; ``bucket_sizes`` is what sizes of steps were chosen by, None where the recipe lists them or has none; ``ways``
    are the candidates that were compared, if formats and shapes were both searched for. ``source_bytes`` are those of
    the source's weights as they are stored; how fast it ran is in the first of ``verification``. What passes changed in
    the program is in report/diffs.json.
    ``already_quantized`` are the weights that a folder's checkpoint had quantized, with whether their values were kept.
    ``source_warnings`` are what the source says that isn't followed, and what may be wrong with its tokenizer.
    ``template_appends`` says whether the chat template only appends (see ``Tokenizer.template_appends``).
    ``failed`` has the targets that the bundle lacks, each with the error that it ended in.
    ``kept_since`` is when an earlier export made the bundle (in ISO 8601), if one did; then all figures but ``seconds``
    are that one's.
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
    ways: list[Candidate] = field(default_factory=list)
    exported: ExportedOn | None = None
    source_bytes: int | None = None
    template_appends: bool | None = None
    kept_since: str | None = None
    already_quantized: list[StoredWeight] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    source_warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Makes plain values for ``--json`` and report/report.json."""
        return asdict(self)
