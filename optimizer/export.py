"""``export``: a model in, a bundle out."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from enginewright.passes.base import PassContext, PassRecord
from enginewright.passes.ir.program import Program
from enginewright.passes.manager import PassManager
from enginewright.passes.quantization.report import QuantizationReport, quantization_report
from enginewright.plugins.errors import CapacityError, RecipeError
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, PassSection
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.bundle.writer import BundleWriter

from .capture import CapturedModel, capture
from .emit.base import Emitter
from .emit.cpu import CpuEmitter
from .pipeline import OPTIONAL, choose_passes
from .progress import Progress, ProgressEvent, silent
from .recipes.recipe import Recipe, load_recipe
from .resources import peak_rss_bytes
from .verify import VerificationReport, verify

EMITTERS: dict[str, Emitter] = {"cpu": CpuEmitter()}
"""One for each target that can be emitted; the names are those of recipes and bundles."""

_WIDEST = 4
"""Bytes of a number in a bundle: 64-bit ones of the program become 32-bit ones."""


@dataclass(frozen=True)
class PassSummary:
    """What one run of a pass did."""

    name: str
    matched: int
    rejected: list[dict[str, str]]
    seconds: float


@dataclass(frozen=True)
class ExportReport:
    """What an export did. ``peak_rss_bytes`` is the process's largest resident size so far, from the system.

    ``bundle_bytes`` counts all files but the manifests and report/; ``verification`` has an entry for each target.
    """

    path: str
    recipe: str
    targets: list[str]
    parameters: int
    context_length: int
    seconds: float
    peak_rss_bytes: int
    bundle_bytes: int
    stages: dict[str, float]
    passes: list[PassSummary]
    quantization: QuantizationReport | None
    verification: list[VerificationReport]

    def to_json(self) -> dict[str, Any]:
        """As plain values for ``--json`` and report/report.json."""
        return asdict(self)


def export(
    source: str | Path | PreTrainedModel,
    output: str | Path,
    *,
    recipe: str | Path | Recipe = "f32",
    targets: Sequence[str] | None = None,
    context_length: int | None = None,
    overwrite: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Captures a decoder, rewrites it, writes a bundle, and compares it with the source before it gets its name.

    Args:
        source: a Hugging Face directory, a GGUF file, or a transformers model, which is not touched.
        output: the bundle to write: a folder that appears whole or not at all.
        recipe: a built-in recipe's name, a TOML file, or a Recipe.
        targets: instead of the recipe's.
        context_length: instead of the recipe's: the longest request in tokens.
        overwrite: replace an existing bundle.
        tokenizer: for a model object, which brings none.
        progress: called as the work goes on.

    Raises:
        SourceError, UnsupportedModelError, RecipeError, PassError, BundleError, CapacityError: as their names say; each
            names the file, field or module. Nothing is left behind, also after Ctrl-C.
        VerificationError: what was exported differs from the source by more than the recipe allows; says by how much.
    """
    start = time.perf_counter()
    tell = progress or silent
    stages: dict[str, float] = {}
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    _check_passes(chosen)
    wanted = _check_targets(tuple(targets) if targets is not None else chosen.targets)
    passes, required = choose_passes(chosen.passes)

    with BundleWriter(output, overwrite=overwrite) as writer:
        tell(ProgressEvent("capture", 0, 1, str(getattr(source, "name_or_path", source))))
        captured = capture(source, tokenizer=tokenizer, context_length=context_length or chosen.context_length)
        program = captured.program
        tell(ProgressEvent("capture", 1, 1, captured.model_info.architecture))
        stages["capture"] = time.perf_counter() - start

        records: list[PassRecord] = []

        def after_pass(_: Program, record: PassRecord) -> None:
            records.append(record)
            tell(ProgressEvent("passes", len(records), len(passes), record.name))

        PassManager(passes, PassContext(required, chosen.weights.to_formats()), after_pass).run(program)
        stages["passes"] = time.perf_counter() - start - sum(stages.values())

        _check_disk(program, writer.final_path)
        emitted = {name: EMITTERS[name].emit(program, writer, tell) for name in wanted}
        for path, data in (captured.tokenizer_files or TokenizerFiles()).to_files().items():
            writer.write_bytes(path, data)
        writer.complete(_manifest(captured, chosen, records), emitted)
        stages["emit"] = time.perf_counter() - start - sum(stages.values())

        verification = [verify(writer.folder, source, chosen, name, tell) for name in wanted]
        stages["verify"] = time.perf_counter() - start - sum(stages.values())

        tell(ProgressEvent("write", 0, 1, str(output)))
        summaries = [
            PassSummary(r.name, r.matched, [asdict(x) for x in r.rejected], round(r.seconds, 4)) for r in records
        ]
        report = ExportReport(
            path=str(output),
            recipe=chosen.name,
            targets=list(wanted),
            parameters=captured.model_info.parameters,
            context_length=captured.model_info.context_length,
            seconds=round(time.perf_counter() - start, 3),
            peak_rss_bytes=peak_rss_bytes(),
            bundle_bytes=writer.bytes_written,
            stages={k: round(v, 3) for k, v in stages.items()},
            passes=summaries,
            quantization=quantization_report((name, program.weights[name]) for name in program.weights),
            verification=verification,
        )
        writer.write_text("report/report.json", json.dumps(report.to_json(), indent=1) + "\n")
        writer.publish()
        tell(ProgressEvent("write", 1, 1, str(output)))
    return report


def _manifest(captured: CapturedModel, recipe: Recipe, records: Sequence[PassRecord]) -> Manifest:
    """The manifest before targets and files are known."""
    return Manifest(
        model=ModelSection.of(captured.model_info),
        source=captured.source,
        targets=(),
        recipe=recipe.model_dump(mode="json"),
        passes=tuple(PassSection(name=r.name, matched=r.matched, rejected=len(r.rejected)) for r in records),
        toolchain={name: version(name) for name in ("enginewright", "torch", "transformers")},
    )


def _check_passes(recipe: Recipe) -> None:
    for name in recipe.passes:
        if name not in OPTIONAL:
            raise RecipeError(
                f"recipe {recipe.name}: passes.{name}: there is no pass of that name to turn on or off",
                hint=f"Passes that can be: {', '.join(sorted(OPTIONAL))}.",
            )


def _check_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    for name in targets:
        if name not in EMITTERS:
            raise RecipeError(f"there is no target {name!r}", hint=f"Targets: {', '.join(EMITTERS)}.")
    if not targets:
        raise RecipeError("no target is given", hint=f"Targets: {', '.join(EMITTERS)}.")
    return targets


def _check_disk(program: Program, output: Path) -> None:
    """Fails now rather than after minutes of writing; the writer still reports a disk that fills up meanwhile."""
    exprs = [program.weights[name] for name in program.weights]
    needed = sum(math.prod(e.shape) * min(e.dtype.itemsize, _WIDEST) for e in exprs)
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise CapacityError(
            f"{output}: the weights need {needed:,} bytes, and {free:,} are free on that disk",
            hint="Free space there, or write the bundle to another disk.",
        )
