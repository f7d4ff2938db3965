"""report.html: one page that needs nothing else, neither files nor a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from enginewright.optimizer.shared.export_records import PassSummary
from enginewright.optimizer.shared.storage import stored_weights
from enginewright.passes.framework.records import Metric
from enginewright.runtime.bundle.reader import Bundle

from . import numbers
from .auto_view import auto_view
from .document import ReportDocument, SavedReport
from .lines import candidate_lines, kv_heads_lines, quality_sentence
from .roofline import Roofline, predict
from .roofline_view import RooflineChart, ShapeView, chart, shape_view
from .views import COLUMN_HEIGHT, PassView, figure_view, figure_views, pass_views, storage_view

_LETTER = 6.9
"""Width of a letter of the charts' text, about."""


@dataclass(frozen=True)
class Tile:
    """A figure at the top of the page."""

    label: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True)
class PassRow:
    """A line of the table of passes: ``rejected`` counts places, of which an older report has no more than that."""

    view: PassView
    rejected: int


@dataclass(frozen=True)
class RooflineView:
    """A target's shapes and their chart."""

    roofline: Roofline
    shapes: tuple[ShapeView, ...]
    chart: RooflineChart | None


def rooflines_of(bundle: Bundle, document: ReportDocument | None) -> tuple[Roofline, ...]:
    """Those of the report, or where it has none what can be predicted."""
    if document is not None and document.rooflines:
        return document.rooflines
    return tuple(predict(bundle, name) for name in bundle.programs)


def render_page(bundle: Bundle, saved: SavedReport, rooflines: Sequence[Roofline] | None = None) -> str:
    """The page as HTML. What the report doesn't have is left out, or taken from the bundle itself.

    Args:
        bundle: opened; no weight is read.
        saved: its report.
        rooflines: instead of the report's.
    """
    document = saved.document or ReportDocument()
    given = rooflines if rooflines is not None else rooflines_of(bundle, saved.document)
    views = [roofline_view(r) for r in given]
    passes = passes_of(bundle, saved.document)
    entries = [entry for entry, _ in passes]
    rows = [PassRow(v, n) for v, (_, n) in zip(pass_views(entries, saved.diffs), passes, strict=True)]
    coverage = document.calibration.coverage if document.calibration is not None else None
    ranges = [Metric(where=r.where, name="largest input", value=r.largest) for r in coverage.ranges] if coverage else []
    stages = [(name, time) for name, time in document.stages.items() if time > 0]
    return template("report.html.j2").render(
        complete=saved.document is not None,
        model=bundle.model,
        source=bundle.manifest.source,
        recipe=str(bundle.manifest.recipe.get("name", "")),
        recipe_text=json.dumps(bundle.manifest.recipe, indent=2, ensure_ascii=False),
        targets=bundle.manifest.targets,
        tiles=tiles(bundle, document, views),
        quality=quality_sentence(document),
        verification=document.verification,
        quantization=document.quantization,
        measured=document.pass_verification,
        auto=auto_view(document.auto) if document.auto is not None else None,
        passes=rows,
        slowest=max((p.seconds or 0 for p in entries), default=0) or 1,
        fusions=document.fusion_effects,
        buckets=document.buckets,
        kv_heads=document.kv_heads,
        kv_heads_lines=kv_heads_lines(document),
        candidates=candidate_lines(document),
        figures=figure_views(entries),
        storage=storage_view(stored_weights(bundle)),
        column_height=COLUMN_HEIGHT,
        rooflines=views,
        calibration=document.calibration,
        ranges=figure_view("calibration", "largest input", ranges) if ranges else None,
        stages=stages,
        total=sum(time for _, time in stages) or 1,
        seconds=document.seconds,
        peak=document.peak_rss_bytes,
        toolchain=list(bundle.manifest.toolchain.items()),
    )


def passes_of(bundle: Bundle, document: ReportDocument | None) -> list[tuple[PassSummary, int]]:
    """Every run of a pass, and how many places it rejected: of the report, else counts of the bundle's manifest."""
    if document is not None and document.passes:
        return [(entry, len(entry.rejected)) for entry in document.passes]
    return [(PassSummary(name=p.name, matched=p.matched), p.rejected) for p in bundle.manifest.passes]


def roofline_view(roofline: Roofline) -> RooflineView:
    """A roofline with its steps grouped, and its chart."""
    shapes = tuple(shape_view(shape, roofline.machine) for shape in roofline.shapes)
    return RooflineView(roofline, shapes, chart(roofline, shapes))


def tiles(bundle: Bundle, document: ReportDocument, views: Sequence[RooflineView]) -> list[Tile]:
    """What matters most, in the order that it is asked for: size, quality, speed, cost."""
    nbytes = document.bundle_bytes or sum(f.bytes for f in bundle.files.values())
    value, _, unit = numbers.format_bytes(nbytes).partition(" ")
    bits = (
        8 * sum(t.bytes for t in bundle.index.stored_once().values()) / bundle.model.parameters
        if bundle.model.parameters
        else 0
    )
    found = [Tile("Size", value, unit, f"{numbers.significant(bits)} bits a parameter" if bits else "")]
    for v in document.verification[:1]:
        if v.exact:
            note = f"rounding explains {numbers.significant(v.tolerance)}" if v.tolerance is not None else ""
            found.append(Tile("Logits apart at most", numbers.significant(v.random_tokens.max_logit_error), "", note))
        else:
            note = f"of {numbers.significant(v.max_kl)} allowed" if v.max_kl is not None else ""
            c = v.text or v.random_tokens
            found.append(Tile("KL from the source", numbers.significant(c.kl_mean), "nats", note))
            note = f"perplexity {v.text.perplexity:.2f}, the source's {v.text.source_perplexity:.2f}" if v.text else ""
            found.append(Tile("Same likeliest token", f"{c.top1_agreement:.1%}".rstrip("%"), "%", note))
    for view in views[:1]:
        for s in view.shapes:
            if s.tokens_per_second is None:
                continue
            note = numbers.of_machine(s.share) if s.share is not None else ""
            found.append(
                Tile(s.shape.name[:1].upper() + s.shape.name[1:], numbers.rate(s.tokens_per_second), "tokens/s", note)
            )
    if document.seconds is not None:
        note = f"{numbers.format_bytes(document.peak_rss_bytes)} of memory" if document.peak_rss_bytes else ""
        found.append(Tile("Export", numbers.duration(document.seconds), "", note))
    return found


def template(name: str) -> Template:
    """A template of this package, with the page's filters: for what is drawn as the page is."""
    return _environment().get_template(name)


def layers(numbers_of: Sequence[int]) -> str:
    """Numbers of layers as a sentence has them: in layers 1 to 28 and 30."""
    runs: list[list[int]] = []
    for n in numbers_of:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{r[0]} to {r[-1]}" if len(r) > 2 else " and ".join(map(str, r)) for r in runs]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"in layer{'s' if len(numbers_of) > 1 else ''} {text}"


def fit(text: str, width: float) -> str:
    """A text cut to a width in a chart."""
    most = max(1, int(width / _LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


@cache
def _environment() -> Environment:
    """Everything that a template prints is escaped: names of modules come from the model's maker."""
    environment = Environment(
        loader=PackageLoader(__package__ or "", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "bytes": numbers.format_bytes,
        "count": numbers.count,
        "duration": numbers.duration,
        "gain": numbers.gain,
        "of_limit": numbers.of_limit,
        "percent": numbers.percent,
        "rate": numbers.rate,
        "significant": numbers.significant,
        "layers": layers,
        "fit": fit,
        "colour": _colour,
    }
    return environment


def _colour(pairs: Sequence[tuple[str, Any]], name: str) -> int:
    """The place of a name in a list of pairs."""
    return [first for first, _ in pairs].index(name)
