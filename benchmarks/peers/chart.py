"""A chart of ratios as SVG: for each figure a bar, ours over the best peer's, with a line where both are equal."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from peers.engines import TITLES
from peers.summary import FIGURES

WIDTH, LABEL, BAR, GAP, HEAD = 760, 190, 16, 6, 34
AHEAD, BEHIND, TEXT, GRID = "#1b7f5c", "#b5452c", "#57606a", "#8c959f"


def chart(result: Mapping[str, Any]) -> str:
    """The SVG. Bars of what isn't measured are left out."""
    groups = [
        (f"{entry['title']}, {kind}", table["best"])
        for entry in result["models"].values()
        for kind, table in entry["formats"].items()
        if table["best"]
    ]
    most = max((best["ratio"] for _, bests in groups for best in bests.values()), default=1.0)
    scale = (WIDTH - LABEL - 170) / max(most, 1.0)
    parts, y = [], 10
    for title, bests in groups:
        y += 18
        parts.append(f'<text x="0" y="{y}" font-weight="bold" fill="{TEXT}">{escape(title)}</text>')
        y += 10
        top = y
        for figure in FIGURES:
            if (best := bests.get(figure.name)) is None:
                continue
            width = best["ratio"] * scale
            color = AHEAD if best["ratio"] >= 1 else BEHIND
            label = f"{best['ratio']:.2f}x {TITLES[best['engine']]}"
            name = figure.title.replace(", tok/s", "").replace(", MB", "").replace(", s", "")
            parts += [
                f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end" fill="{TEXT}">{escape(name)}</text>',
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>',
                f'<text x="{LABEL + width + 6:.1f}" y="{y + 12}" fill="{TEXT}">{escape(label)}</text>',
            ]
            y += BAR + GAP
        x = LABEL + scale
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{y - 3}" stroke="{GRID}" stroke-dasharray="3 3"/>'
        parts.append(line)
        y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + HEAD}" '
    head += f'viewBox="0 0 {WIDTH} {y + HEAD}" font-family="sans-serif" font-size="12">'
    note = "Enginewright over the best peer of the same bits; of seconds and memory the peer over Enginewright."
    foot = f'<text x="0" y="{y + 16}" fill="{TEXT}">{note}</text>'
    return "\n".join([head, *parts, foot, "</svg>", ""])
