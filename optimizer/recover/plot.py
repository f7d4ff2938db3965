"""Draws the loss over the steps as one HTML page without references: each step, and the measurements on held-out
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from enginewright.optimizer.report.charts import LogAxis

from .options import RecoveryReport

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 880.0, 20.0, 380.0
_LEAST = 1e-6
"""The lower end of the loss axis, which is logarithmic. Smaller losses are drawn there."""


def loss_page(report: RecoveryReport) -> str:
    """Returns the page of a report. Losses of zero are drawn at the end of the axis."""
    losses = [max(x, _LEAST) for x in report.losses]
    held_out = [(m.step, max(m.kl, _LEAST)) for m in report.measured]
    values = [*losses, *(kl for _, kl in held_out)]
    axis = LogAxis.around(values, _BOTTOM, _TOP)
    width = (_RIGHT - _LEFT) / max(report.steps, 1)
    lines = [
        f'<line x1="{_LEFT}" y1="{axis.at(v)}" x2="{_RIGHT}" y2="{axis.at(v)}" class="grid"/>'
        f'<text x="{_LEFT - 8}" y="{axis.at(v) + 4}" text-anchor="end">{v:g}</text>'
        for v in axis.ticks()
    ]
    lines += [
        f'<text x="{_LEFT + step * width:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{step}</text>'
        for step in sorted({0, report.steps // 2, report.steps})
    ]
    training = _points([(i + 1, x) for i, x in enumerate(losses)], axis, width)
    measured = _points(held_out, axis, width)
    dots = "".join(f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3"/>' for p in measured.split())
    first, last = report.measured[0], report.measured[-1]
    rows = "".join(
        f"<tr><td>{m.step}</td><td>{m.kl:.4g}</td><td>{m.perplexity:.5g}</td><td>{m.source_perplexity:.5g}</td></tr>"
        for m in report.measured
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Recovery: {escape(report.recipe)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 900px; }}
svg {{ width: 100%; }} text {{ font-size: 12px; fill: #555; }} .grid {{ stroke: #ddd; }}
.training {{ fill: none; stroke: #7aa6d8; }} .held {{ fill: none; stroke: #b3472f; stroke-width: 2; }}
circle {{ fill: #b3472f; }} td, th {{ padding: 0 1em; text-align: right; }}
</style>
<h1>Recovery for the recipe {escape(report.recipe)}</h1>
<p>{report.steps:,} steps on {report.tokens:,} tokens ({escape(report.origin)}). On {report.held_out_tokens:,} held-out
tokens KL from the source went from {first.kl:.4g} to {last.kl:.4g} nats a token, perplexity from {first.perplexity:.5g}
to {last.perplexity:.5g}; the source's is {last.source_perplexity:.5g}.</p>
<svg viewBox="0 0 900 410" role="img" aria-label="loss over steps">{"".join(lines)}
<polyline points="{training}" class="training"/><polyline points="{measured}" class="held"/>{dots}</svg>
<p>Thin: the loss of each step. Thick: KL on the held-out tokens.</p>
<table><tr><th>step</th><th>KL</th><th>perplexity</th><th>source's</th></tr>{rows}</table>
</html>
"""


def _points(pairs: Sequence[tuple[int, float]], axis: LogAxis, width: float) -> str:
    return " ".join(f"{_LEFT + step * width:.1f},{axis.at(value)}" for step, value in pairs)
