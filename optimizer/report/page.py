"""Renders report.html: one page without references to other files or the network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from enginewright.optimizer.measure.text_metrics import shown_metrics
from enginewright.optimizer.shared.export_records import PassSummary, SourceSpeed
from enginewright.optimizer.shared.storage import stored_weights
from enginewright.passes.framework.records import Metric
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import plural

from . import numbers
from .auto_view import auto_view
from .charts import NARROW, WIDE
from .document import ReportDocument, SavedReport
from .lines import already_quantized_lines, candidate_lines, kv_formats_lines, kv_heads_lines, quality_sentence
from .roofline import Roofline, predict
from .roofline_view import RooflineChart, ShapeView, TimeBars, chart, shape_view, time_bars
from .views import COLUMN_HEIGHT, PassView, figure_view, figure_views, pass_views, storage_view

_LEAST_KL, _LEAST_CHANGE = 1e-6, 0.002
"""The smallest change of KL that is shown: in nats, and as a share of the KL before."""

_LETTER = 7.6
"""The approximate width of a letter in charts."""


@dataclass(frozen=True)
class Tile:
    """A figure at the top of the page.

    Attributes:
        label, value, unit, note: its texts.
        beside: the source's figure; "" if it is unknown.
        own, source: the lengths of two bars for the bundle and the source, in per cent.
    """

    label: str
    value: str
    unit: str
    note: str
    beside: str = ""
    own: float = 0.0
    source: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The result of a target's verification.

    Attributes:
        target: the name of the target.
        passed: True if it is within the recipe's budget.
        what, value, limit: the measure, its value, and the limit; "" without one.
        share: the share of the budget that is used; None without a limit.
    """

    target: str
    passed: bool
    what: str
    value: str
    limit: str
    share: float | None


@dataclass(frozen=True)
class Loss:
    """A pass that changed the KL from the source: the KL after it, and a bar from the KL before to after, in
    per cent.
    """

    name: str
    kl: float
    start: float
    length: float


@dataclass(frozen=True)
class PassRow:
    """A row of the table of passes.

    ``rejected``: the number of rejected places, the only fact about them in an older report.
    """

    view: PassView
    rejected: int


@dataclass(frozen=True)
class RooflineView:
    """The shapes of a target, and their charts for wide and for narrow windows; none if nothing was timed."""

    roofline: Roofline
    shapes: tuple[ShapeView, ...]
    charts: tuple[RooflineChart, ...]
    bars: tuple[TimeBars, ...]


def rooflines_of(bundle: Bundle, document: ReportDocument | None) -> tuple[Roofline, ...]:
    """Returns the rooflines of the report, or predicted ones if it has none."""
    if document is not None and document.rooflines:
        return document.rooflines
    return tuple(predict(bundle, name) for name in bundle.programs)


def render_page(bundle: Bundle, saved: SavedReport, rooflines: Sequence[Roofline] | None = None) -> str:
    """Returns the page as HTML. For parts that the report lacks, the bundle is read; if it lacks them too, they are
    omitted.

    Args:
        bundle: an open bundle; no weight is read.
        saved: the report of the bundle's export.
        rooflines: rooflines that replace the report's; None for the report's.
    """
    document = saved.document or ReportDocument()
    shown_rooflines = rooflines if rooflines is not None else rooflines_of(bundle, saved.document)
    views = [roofline_view(r) for r in shown_rooflines]
    passes = passes_of(bundle, saved.document)
    entries = [entry for entry, _ in passes]
    rows = [PassRow(v, n) for v, (_, n) in zip(pass_views(entries, saved.diffs), passes, strict=True)]
    coverage = document.calibration.coverage if document.calibration is not None else None
    ranges = [Metric(where=r.where, name="largest input", value=r.largest) for r in coverage.ranges] if coverage else []
    stages = [(name, time) for name, time in document.stages.items() if time > 0]
    return template("report.html.j2").render(
        document=document,
        complete=saved.document is not None,
        model=bundle.model,
        source=bundle.manifest.source,
        recipe=str(bundle.manifest.recipe.get("name", "")),
        recipe_text=json.dumps(bundle.manifest.recipe, indent=2, ensure_ascii=False),
        targets=bundle.manifest.targets,
        tiles=tiles(bundle, document, views),
        date=date_of(document),
        version=bundle.manifest.toolchain.get("enginewright", ""),
        verdicts=verdicts(document),
        losses=losses(entries),
        source_speed=source_speed(document) if any(v.roofline.measured == "export" for v in views) else None,
        quality=quality_sentence(document),
        already_quantized_lines=already_quantized_lines(document),
        auto=auto_view(document.auto) if document.auto is not None else None,
        passes=rows,
        slowest=max((p.seconds or 0 for p in entries), default=0) or 1,
        bucket_plans=bundle.buckets,
        kv_heads_lines=kv_heads_lines(document),
        kv_formats_lines=kv_formats_lines(document),
        candidates=candidate_lines(document),
        figures=figure_views(entries),
        storage=storage_view(stored_weights(bundle)),
        column_height=COLUMN_HEIGHT,
        chart_sizes=(WIDE, NARROW),
        rooflines=views,
        ranges=figure_view("calibration", "largest input", ranges) if ranges else None,
        stages=stages,
        total=sum(time for _, time in stages) or 1,
        toolchain=list(bundle.manifest.toolchain.items()),
    )


def passes_of(bundle: Bundle, document: ReportDocument | None) -> list[tuple[PassSummary, int]]:
    """Returns every run of a pass with the number of rejected places, from the report, or from the bundle's manifest
    without one.
    """
    if document is not None and document.passes:
        return [(entry, len(entry.rejected)) for entry in document.passes]
    return [(PassSummary(name=p.name, matched=p.matched), p.rejected) for p in bundle.manifest.passes]


def roofline_view(roofline: Roofline) -> RooflineView:
    """Returns a roofline with its steps in groups, and its charts."""
    shapes = tuple(shape_view(shape, roofline.machine) for shape in roofline.shapes)
    charts = tuple(c for size in (WIDE, NARROW) if (c := chart(roofline, shapes, size)) is not None)
    bars = tuple(b for size in (WIDE, NARROW) if (b := time_bars(shapes, size.width)) is not None)
    return RooflineView(roofline, shapes, charts, bars)


def date_of(document: ReportDocument) -> str:
    """Returns the time of the export, such as "2026-11-23 07:50 UTC"; "" if the report doesn't have it."""
    date = document.exported.date if document.exported is not None else ""
    return f"{date[:16].replace('T', ' ')} UTC" if date.endswith("+00:00") else date


def source_speed(document: ReportDocument) -> SourceSpeed | None:
    """Returns the speed of the source; None if no target was compared with it."""
    return next((v.source_speed for v in document.verification if v.source_speed is not None), None)


def verdicts(document: ReportDocument) -> list[Verdict]:
    """Returns a verdict for each target that was compared with the source."""
    rows = []
    for v in document.verification:
        compared = v.text or v.random_tokens
        if v.exact:
            what, value, limit = "largest difference of a logit", v.random_tokens.max_logit_error, v.tolerance
            passed = limit is None or value <= limit
        else:
            distance = "cosine distance" if compared.of_vectors else "KL"
            what = f"{distance} from the source, on {'a text' if v.text else 'random tokens'}"
            value, limit = compared.kl_mean, v.max_kl
            kls = [c.kl_mean for c in (v.random_tokens, v.text) if c is not None]
            passed = limit is None or all(kl <= limit for kl in kls)
        share = value / limit if limit else None
        text = numbers.significant(limit) if limit is not None else ""
        rows.append(Verdict(v.target, passed, what, numbers.significant(value), text, share))
    return rows


def losses(passes: Sequence[PassSummary]) -> list[Loss]:
    """Returns the passes that changed the KL from the source by more than rounding explains."""
    costs: list[tuple[str, float]] = []
    before = 0.0
    for entry in passes:
        if (m := entry.measurement) is None or m.unchanged:
            continue
        if abs(m.kl_mean - before) > max(_LEAST_CHANGE * before, _LEAST_KL):
            costs.append((entry.name, m.kl_mean))
            before = m.kl_mean
    most = max((kl for _, kl in costs), default=0.0) or 1.0
    befores = [0.0, *(kl for _, kl in costs)]
    return [
        Loss(name, kl, round(100 * min(b, kl) / most, 1), round(100 * abs(kl - b) / most, 1))
        for (name, kl), b in zip(costs, befores, strict=False)
    ]


def tiles(bundle: Bundle, document: ReportDocument, views: Sequence[RooflineView]) -> list[Tile]:
    """Returns the tiles at the top of the page: size, speed and quality in the first row, other measurements in the
    second.
    """
    first, second = [_size_tile(bundle, document)], list[Tile]()
    shapes = views[0].shapes if views else ()
    # The machine may have been slower at the export than when steps were timed again.
    source = source_speed(document) if views and views[0].roofline.measured == "export" else None
    speeds = [tile for view in shapes if (tile := _speed_tile(view, source)) is not None]
    first += speeds[:1]
    for v in document.verification[:1]:
        compared = v.text or v.random_tokens
        if v.exact:
            note = f"rounding explains {numbers.significant(v.tolerance)}" if v.tolerance is not None else ""
            first.append(Tile("Logits apart at most", numbers.significant(compared.max_logit_error), "", note))
        else:
            note = f"of {numbers.significant(v.max_kl)} allowed" if v.max_kl is not None else ""
            name, unit = ("Cosine distance", "") if compared.of_vectors else ("KL", "nats")
            first.append(Tile(f"{name} from the source", numbers.significant(compared.kl_mean), unit, note))
        if v.text is not None and v.text.metrics:
            note = f"of {v.text.windows:,} texts"
            first += [Tile(label.capitalize(), value, "", note) for label, value in shown_metrics(v.text.metrics)]
        else:
            same = f"{compared.top1_agreement:.1%}".rstrip("%")
            first.append(Tile("Same likeliest token", same, "%", f"of {compared.tokens:,} positions"))
        if v.text is not None and v.text.perplexity is not None and v.text.source_perplexity is not None:
            ours, theirs = v.text.perplexity, v.text.source_perplexity
            note = f"source {theirs:.2f}; {v.text.windows} of {v.text.windows_in_text} windows"
            second.append(Tile("Perplexity", f"{ours:.2f}", "", note))
    second = speeds[1:] + second
    if document.seconds is not None:
        note = f"{numbers.format_bytes(document.peak_rss_bytes)} of memory" if document.peak_rss_bytes else ""
        second.append(Tile("Export", *_value_and_unit(numbers.duration(document.seconds)), note))
    return first + second


def _size_tile(bundle: Bundle, document: ReportDocument) -> Tile:
    nbytes = document.bundle_bytes or sum(f.bytes for f in bundle.files.values())
    stored = 8 * sum(t.bytes for t in bundle.index.stored_once().values())
    bits = stored / bundle.model.parameters if bundle.model.parameters else 0
    note = f"{numbers.significant(bits)} bits a parameter" if bits else ""
    beside = _beside(nbytes, document.source_bytes, numbers.format_bytes)
    value, unit = _value_and_unit(numbers.format_bytes(nbytes))
    return Tile("Size", value, unit, note, *beside)


def _speed_tile(view: ShapeView, source: SourceSpeed | None) -> Tile | None:
    """Returns the tile with the speed of a shape, next to the source's speed for a decode step of one request; None if
    it wasn't timed.
    """
    if view.tokens_per_second is None:
        return None
    shape = view.shape
    theirs = source.decode if source is not None and shape.tokens == 1 else None
    note = numbers.of_machine(view.share) if view.share is not None else ""
    label = shape.name[:1].upper() + shape.name[1:]
    beside = _beside(view.tokens_per_second, theirs, numbers.rate)
    return Tile(label, numbers.rate(view.tokens_per_second), "tokens/s", note, *beside)


def _beside(own: float, source: float | None, written: Callable[[Any], str]) -> tuple[str, float, float]:
    """Returns the fields ``beside``, ``own`` and ``source`` of a tile.

    Args:
        own: the bundle's figure.
        source: the source's figure; None if it is unknown.
        written: formats a figure.
    """
    if not source:
        return "", 0.0, 0.0
    most = max(own, source)
    return f"source {written(source)}", round(100 * own / most, 1), round(100 * source / most, 1)


def _value_and_unit(text: str) -> tuple[str, str]:
    """Divides a text into value and unit; a text of several units, such as "3 min 20 s", is all value."""
    value, _, unit = text.partition(" ")
    return (text, "") if " " in unit else (value, unit)


def template(name: str) -> Template:
    """Returns a template of this package, with the filters of the page."""
    return _environment().get_template(name)


def layers(numbers_of: Sequence[int]) -> str:
    """Returns numbers of layers as a phrase, such as "in layers 1 to 28 and 30"."""
    runs: list[list[int]] = []
    for n in numbers_of:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{r[0]} to {r[-1]}" if len(r) > 2 else " and ".join(map(str, r)) for r in runs]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"in {plural('layer', len(numbers_of))} {text}"


def fit(text: str, width: float) -> str:
    """Returns a text cut to ``width``, in units of a chart."""
    most = max(1, int(width / _LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def pieces(name: str) -> list[str]:
    """Divides a module's name after each dot, underscore and plus, where its line may break."""
    return re.findall(r"[^._+/]*[._+/]+|[^._+/]+", name)


@cache
def _environment() -> Environment:
    """Returns the environment of templates. It escapes all output, since names of modules come from the model's
    maker.
    """
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
        "pieces": pieces,
        "fit": fit,
        "colour": _colour,
    }
    return environment


def _colour(pairs: Sequence[tuple[str, Any]], name: str) -> int:
    """Returns the index of a name's colour: its position among the first items of ``pairs``."""
    return [first for first, _ in pairs].index(name)
