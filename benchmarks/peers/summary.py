"""From what was measured to medians, ratios and goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from peers.engines import ENGINES, OURS
from peers.goals import GOALS, judge
from peers.models import MODELS
from peers.rounds import Measured
from peers.workload import Report


@dataclass(frozen=True)
class Figure:
    """Something that is compared. ``more``: whether more of it is better."""

    name: str
    title: str
    more: bool = True


FIGURES = (
    Figure("prefill", "prefill 512, tok/s"),
    Figure("decode_1", "decode, 1 request, tok/s"),
    Figure("decode_8", "decode, 8, tok/s"),
    Figure("decode_16", "decode, 16, tok/s"),
    Figure("prefill_long", "prefill 4,096, tok/s"),
    Figure("decode_long", "decode at 4,096, tok/s"),
    Figure("prefill_far", "prefill 16,384, tok/s"),
    Figure("decode_far", "decode at 16,384, tok/s"),
    Figure("decode_farther", "decode at 32,768, tok/s"),
    Figure("start", "first token, s", more=False),
    Figure("peak", "peak memory, MB", more=False),
)
RECURRENCE = "recurrence_share_of_"
"""The beginning of the names of figures that are shares of time in recurrences."""
SAME_KL = 1.02
"""KL divergences up to this factor apart are taken as equal: the order of a sum alone moves them by as much."""


def figures_of(measured: Measured) -> dict[str, float]:
    """Medians over the rounds; peak memory is the most of all."""
    names = dict.fromkeys(name for figures in measured.rounds for name in figures)
    middles = {name: median(f[name] for f in measured.rounds if name in f) for name in names}
    if "peak" in measured.bytes:
        middles["peak"] = float(measured.bytes["peak"])
    return middles


def ratio(ours: Measured, theirs: Measured, figure: Figure) -> dict[str, float] | None:
    """Ours over theirs, or theirs over ours where less is better: the median of the rounds that have both, the least
    and the most. None if no round has."""
    pairs: list[tuple[float, float]]
    if figure.name == "peak":
        pairs = [(m["peak"], t["peak"]) for m, t in [(ours.bytes, theirs.bytes)] if "peak" in m and "peak" in t]
    else:
        rounds = zip(ours.rounds, theirs.rounds, strict=False)
        pairs = [(m[figure.name], t[figure.name]) for m, t in rounds if figure.name in m and figure.name in t]
    ratios = [m / t if figure.more else t / m for m, t in pairs]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)} if ratios else None


def best_peers(ours: Measured, peers: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """For each figure the peer that we are the least ahead of, and whether our KL divergence is no more than its."""
    figures = figures_of(ours)
    bests = {}
    for figure in FIGURES:
        ratios = [(r["median"], peer) for peer in peers if (r := ratio(ours, peer, figure)) is not None]
        if not ratios:
            continue
        least, peer = min(ratios, key=lambda pair: pair[0])
        theirs = figures_of(peer).get("kl")
        no_worse = None if theirs is None or "kl" not in figures else figures["kl"] <= theirs * SAME_KL
        bests[figure.name] = {"engine": peer.contender.engine, "ratio": least, "kl_no_worse": no_worse}
    return bests


def limits_of(ours: Measured, roofs: Sequence[Report]) -> dict[str, float]:
    """Shares of what the machine can do. Bandwidths and peaks are medians of those measured before each round."""
    figures, limits = figures_of(ours), dict[str, float]()
    names = ["bandwidth", "bandwidth_of_weights", "peak", "matmul", "matmul_share_of_prefill"]
    for name in (*names, *(name for name in (roofs[0].figures if roofs else ()) if name.startswith(RECURRENCE))):
        values = [roof.figures[name] for roof in roofs if name in roof.figures]
        if values:
            limits[name] = median(values)
    if roofs and "decode_1" in figures:
        read = roofs[0].bytes["read"] * figures["decode_1"] / 1e9
        limits["read_of_a_step"] = roofs[0].bytes["read"]
        # What caches keep of a small model comes faster than from memory: the loop reads as many bytes as a step.
        limits["bandwidth_share"] = read / limits["bandwidth_of_weights"]
    for name in ("decode_long", "decode_far", "decode_farther"):
        if roofs and name in figures and name in roofs[0].bytes:
            limits[f"{name}_share"] = roofs[0].bytes[name] * figures[name] / 1e9 / limits["bandwidth"]
    if "peak" in limits:
        limits["peak_share"] = limits["matmul"] / limits["peak"]
    if {"peak", "weights", "kv"} <= set(ours.bytes):
        limits["memory"] = ours.bytes["peak"] / (ours.bytes["weights"] + ours.bytes["kv"])
    return limits


def table_of(group: Sequence[Measured], roofs: Sequence[Report]) -> dict[str, Any]:
    """All engines of a model and format."""
    ours = next((m for m in group if m.contender.engine == OURS), None)
    peers = [m for m in group if m.contender.engine != OURS]
    engines = {}
    for measured in group:
        name = measured.contender.engine
        row: dict[str, Any] = {
            "version": measured.engine,
            "settings": measured.settings,
            "weights": ENGINES[name].formats[measured.contender.format],
            "figures": figures_of(measured),
            "bytes": measured.bytes,
            "rounds": measured.rounds,
        }
        if ours is not None and measured is not ours:
            row["ratio"] = {f.name: r for f in FIGURES if (r := ratio(ours, measured, f)) is not None}
        engines[name] = row
    best = best_peers(ours, peers) if ours is not None else {}
    return {"engines": engines, "best": best, "limits": limits_of(ours, roofs) if ours is not None else {}}


def summarize(
    measured: Sequence[Measured], roofs: Mapping[tuple[str, str], Sequence[Report]], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """``models``: by name, their formats' tables; ``goals``: those of what was measured."""
    models: dict[str, Any] = {}
    groups = dict.fromkeys((m.contender.model, m.contender.format) for m in measured)
    for model, kind in groups:
        group = [m for m in measured if (m.contender.model, m.contender.format) == (model, kind)]
        entry = models.setdefault(model, {"title": MODELS[model].title, "about": asdict(MODELS[model]), "formats": {}})
        entry["formats"][kind] = table_of(group, roofs.get((model, kind), ()))
    return {"models": models, "goals": judged(models, reasons)}


def judged(models: Mapping[str, Any], reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """The goals of all models and formats that are there; ``models`` is that of a result."""
    tables = {(model, kind): table for model, entry in models.items() for kind, table in entry["formats"].items()}
    return [judge(g, tables[g.model, g.format], reasons) for g in GOALS if (g.model, g.format) in tables]
