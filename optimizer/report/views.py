"""Prepares the sections about passes, layers and bytes on the page of a report: groups, sorts and shortens the rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enginewright.optimizer.shared.export_records import PassSummary
from enginewright.optimizer.shared.storage import StoredBytes, kind_of, layer_of
from enginewright.passes.framework.records import Metric

from .charts import NARROW, WIDE, Box, Size, stacked, treemap
from .diffs import ProgramDiff

COLUMN_HEIGHT = 160.0
_MAP_HEIGHT = 0.82
"""The height of a treemap as a share of a chart's height. It is less, because a treemap has no axes."""
_PLACES = 12
_WORST = 10
_KINDS = 9


@dataclass(frozen=True)
class Reason:
    """A reason for which a pass rejected places: the text, the number of places, and the first of them."""

    text: str
    count: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class PassView:
    """A run of a pass. ``number`` is its position from 1; ``diff`` is None if it changed nothing."""

    number: int
    entry: PassSummary
    reasons: tuple[Reason, ...]
    diff: ProgramDiff | None

    @property
    def acted(self) -> bool:
        """True if the pass changed, rejected or measured something."""
        return bool(self.entry.matched or self.entry.rejected or self.entry.figures)


def pass_views(passes: Sequence[PassSummary], diffs: Sequence[ProgramDiff]) -> list[PassView]:
    """Returns the views of all passes, with the changes that they made."""
    by_number = {(d.number, d.name): d for d in diffs}
    return [PassView(i + 1, p, _reasons(p), by_number.get((i, p.name))) for i, p in enumerate(passes)]


def _reasons(entry: PassSummary) -> tuple[Reason, ...]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for rejection in entry.rejected:
        where = rejection.where or "the model"
        places[rejection.reason].append(f"{where} ({rejection.node})" if rejection.node else where)
    ordered = sorted(places.items(), key=lambda item: -len(item[1]))
    return tuple(Reason(text, len(nodes), tuple(nodes[:_PLACES])) for text, nodes in ordered)


@dataclass(frozen=True)
class Cell:
    """A figure's value at a layer. ``shade`` is 0 for the smallest value of the figure and 1 for the largest."""

    layer: int
    value: float
    shade: float
    where: str


@dataclass(frozen=True)
class FigureView:
    """A figure of a pass, by layer and kind of module.

    Attributes:
        source, name: the name of the pass, and of the figure.
        layers: the numbers of the layers in order, which are the columns.
        rows: kinds of modules with a cell for each layer that has the figure, in descending order of their means.
        elsewhere: the values of modules outside layers.
        worst: the largest values, in descending order.
        low, high: the smallest and the largest value.
    """

    source: str
    name: str
    layers: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    elsewhere: tuple[Metric, ...]
    worst: tuple[Metric, ...]
    low: float
    high: float


def figure_views(passes: Sequence[PassSummary]) -> list[FigureView]:
    """Returns a view for each pass and each of its figures."""
    by_figure: dict[tuple[str, str], list[Metric]] = {}
    for entry in passes:
        for figure in entry.figures:
            by_figure.setdefault((entry.name, figure.name), []).append(figure)
    return [figure_view(source, name, figures) for (source, name), figures in by_figure.items()]


def figure_view(source: str, name: str, figures: Sequence[Metric]) -> FigureView:
    """Returns the values of one figure as a grid of kinds by layers."""
    values = [f.value for f in figures]
    low, high = min(values), max(values)
    cells: dict[str, dict[int, Cell]] = {}
    elsewhere = []
    for figure in figures:
        layer = layer_of(figure.where)
        if layer is None:
            elsewhere.append(figure)
            continue
        shade = (figure.value - low) / (high - low) if high > low else 1.0
        cells.setdefault(kind_of(figure.where), {})[layer] = Cell(layer, figure.value, shade, figure.where)
    layers = tuple(sorted({layer for row in cells.values() for layer in row}))
    rows = sorted(cells.items(), key=lambda item: -sum(c.value for c in item[1].values()) / len(item[1]))
    return FigureView(
        source,
        name,
        layers,
        tuple((kind, tuple(row.get(layer) for layer in layers)) for kind, row in rows),
        tuple(elsewhere),
        tuple(sorted(figures, key=lambda f: -f.value)[:_WORST]),
        low,
        high,
    )


@dataclass(frozen=True)
class Tile:
    """A kind of weights in a treemap: its rectangle, bytes, share, and index in the list of colours."""

    kind: str
    nbytes: int
    share: float
    box: Box
    colour: int


@dataclass(frozen=True)
class Treemap:
    """The kinds of weights as areas of a picture."""

    size: Size
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a stacked column: its distance from the bottom, its height, its kind of weights and its bytes."""

    start: float
    height: float
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class StorageView:
    """The bytes of a bundle's weights.

    Attributes:
        total: all bytes.
        maps: the treemap of kinds of modules, for wide and for narrow windows.
        dtypes: the bytes of each type.
        columns: for each layer the bytes of each type.
        rows: for each kind of module the bytes of each type.
    """

    total: int
    maps: tuple[Treemap, ...]
    dtypes: tuple[tuple[str, int], ...]
    columns: tuple[tuple[int, tuple[Piece, ...]], ...]
    rows: tuple[tuple[str, dict[str, int]], ...]


def storage_view(parts: Sequence[StoredBytes]) -> StorageView | None:
    """Returns the bytes of weights by kind, by type, and by layer; None if there are none."""
    total = sum(p.nbytes for p in parts)
    if not total:
        return None
    by_kind, by_dtype = _sums((p.kind, p.nbytes) for p in parts), _sums((p.dtype, p.nbytes) for p in parts)
    shown = by_kind.most_common(_KINDS)
    if rest := total - sum(n for _, n in shown):
        shown.append((f"{len(by_kind) - len(shown)} more", rest))
    maps = [_treemap(shown, total, Size(size.width, _MAP_HEIGHT * size.height)) for size in (WIDE, NARROW)]
    order = [dtype for dtype, _ in by_dtype.most_common()]
    layers: defaultdict[int, Counter[str]] = defaultdict(Counter)
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part in parts:
        kinds[part.kind][part.dtype] += part.nbytes
        if part.layer is not None:
            layers[part.layer][part.dtype] += part.nbytes
    tallest = max((sum(sizes.values()) for sizes in layers.values()), default=0)
    columns = []
    for layer, sizes in sorted(layers.items()):
        places = stacked([sizes[d] for d in order], COLUMN_HEIGHT, tallest)
        pieces = [Piece(a, h, d, sizes[d]) for d, (a, h) in zip(order, places, strict=True) if sizes[d]]
        columns.append((layer, tuple(pieces)))
    return StorageView(
        total,
        tuple(maps),
        tuple(by_dtype.most_common()),
        tuple(columns),
        tuple((kind, dict(kinds[kind].most_common())) for kind, _ in by_kind.most_common()),
    )


def _treemap(shown: Sequence[tuple[str, int]], total: int, size: Size) -> Treemap:
    boxes = treemap([n for _, n in shown], (0.0, 0.0, size.width, size.height))
    tiles = [Tile(k, n, n / total, b, i) for i, ((k, n), b) in enumerate(zip(shown, boxes, strict=True))]
    return Treemap(size, tuple(tiles))


def _sums(items: Iterable[tuple[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, size in items:
        sums[name] += size
    return sums
