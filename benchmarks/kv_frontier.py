"""The frontier of KL divergence by bits of a KV cache: rotations, widths of keys and of values, groups, kept tokens.

    python benchmarks/kv_frontier.py [--models smollm2 gemma3] [--tokens 2048] [--every 1] [--layers] [--json FILE]
    python benchmarks/kv_frontier.py --needles [--tokens 8192] [--llama-cpp PYTHON]
    python benchmarks/kv_frontier.py --page benchmarks/results/FILE.json

Formats are simulated in transformers' model (``kv_rounding``) over the text that comes with the package. KL is from a
cache of bf16. Calibrated formats see other tokens: the end of the text. ``--layers`` measures each layer alone in some
formats, and then the caches that a choice by these KLs gives under a budget of bits.

``--needles`` measures the formats that are built over that text, followed by the pages of docs/use, in which keys are
planted (``needles``). ``--llama-cpp`` is a Python that has llama-cpp-python: its caches are measured over the same
tokens, against its own cache of f16.

Rows are written to the JSON file as they are measured, and a file that exists is continued. ``--page`` writes
benchmarks/notes/kv-bits.md's table and chart instead of measuring.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kv_rounding import EIGHT, Cache, RoundedModel, Rounding
from needles import Needles, plant
from peers.loading import BENCHMARKS, REPOSITORY, load_module
from peers.machine import commit, processor
from peers.marked_table import MarkedTable, line
from peers.processes import environment
from transformers import AutoTokenizer

from enginewright.optimizer.measure.texts import BUILT_IN, EVALUATION_TEXT, read_text

HERE = Path(__file__).resolve().parent
PAGE = HERE / "notes" / "kv-bits.md"
TABLE = MarkedTable("kv_frontier.py")
LIMIT = 0.01
"""KL in nats that a cache may be away from one of 16 bits, to be in recipes."""
CALIBRATION = 1024
"""Tokens at the end of the text."""


def integers(bits: int, group: int = 0, **rest: Any) -> Rounding:
    """Returns symmetric integers with scales of f16."""
    return Rounding(bits, group, **rest)


def turned(bits: int, group: int = 0, **rest: Any) -> Rounding:
    """Returns rotated integers."""
    return Rounding(bits, group, rotated=True, **rest)


def odd(bits: int, **rest: Any) -> Rounding:
    """Returns rotated odd integers with one scale for a head."""
    return Rounding(bits, rotated=True, elements="odd", **rest)


NORMAL_4 = turned(4, elements="normal")
V4 = integers(4, 32, offset=True)
FORMATS: Mapping[str, Cache] = {
    "8, 8": Cache(EIGHT, EIGHT),
    "8, 8; keys rotated": Cache(turned(8), EIGHT),
    "8, 8; rotated, one scale (k8v8)": Cache(turned(8), turned(8)),
    "8, 4": Cache(EIGHT, integers(4, 32)),
    "8, 4 with offsets": Cache(EIGHT, V4),
    "8, 4 with offsets by 16": Cache(EIGHT, integers(4, 16, offset=True)),
    "8, 4 rotated": Cache(EIGHT, turned(4, 32)),
    "8, 4 rotated, one scale, searched": Cache(EIGHT, turned(4, searched=True)),
    "8, 4 rotated, one scale, normal, searched": Cache(EIGHT, turned(4, elements="normal", searched=True)),
    "8, 4 in NVFP4": Cache(EIGHT, Rounding(4, 16, elements="e2m1", scale="e4m3")),
    "8, 4 in MXFP4": Cache(EIGHT, Rounding(4, 32, elements="e2m1", scale="e8m0")),
    "8, 5": Cache(EIGHT, integers(5, 32)),
    "8, 6": Cache(EIGHT, integers(6, 32)),
    "8, 4; rotated, one scale (k8v4)": Cache(turned(8), NORMAL_4),
    "6 odd, 4; rotated, one scale (k6v4)": Cache(odd(6), NORMAL_4),
    "5 odd, 4; rotated, one scale (k5v4)": Cache(odd(5), NORMAL_4),
    "5 odd, 4; rotated, one scale; keys centered": Cache(odd(5, centered=True), NORMAL_4),
    "4, 4; rotated, one scale; the first and last 128 in 8 (k4v4)": Cache(NORMAL_4, NORMAL_4, first=128, recent=128),
    "4, 4; rotated, one scale": Cache(NORMAL_4, NORMAL_4),
    "4, 4; rotated, one scale; keys centered": Cache(turned(4, elements="normal", centered=True), NORMAL_4),
    "8, 4 rotated, one scale, odd": Cache(EIGHT, odd(4)),
    "6, 4; rotated, one scale, odd": Cache(odd(6), odd(4)),
    "5, 4; rotated, one scale, odd": Cache(odd(5), odd(4)),
    "5, 5; rotated, one scale, odd": Cache(odd(5), odd(5)),
    "4, 4; rotated, one scale, odd": Cache(odd(4), odd(4)),
    "6, 5; rotated, one scale, odd": Cache(odd(6), odd(5)),
    "6, 6; rotated, one scale, odd": Cache(odd(6), odd(6)),
    "5, 4; rotated, one scale, odd and searched": Cache(odd(5, searched=True), odd(4, searched=True)),
    "5 rotated odd, 8": Cache(odd(5), EIGHT),
    "5 rotated odd, 8; keys centered": Cache(odd(5, centered=True), EIGHT),
    "5 rotated odd, 8; keys from the block's first token": Cache(odd(5, base="first"), EIGHT),
    "5 rotated odd, 8; keys from the mean of the block before": Cache(odd(5, base="before"), EIGHT),
    "5, 4; rotated, one scale, odd; keys centered": Cache(odd(5, centered=True), odd(4)),
    "4, 4; rotated, one scale, odd; keys centered": Cache(odd(4, centered=True), odd(4)),
    "4 rotated, 8": Cache(turned(4, 32), EIGHT),
    "5 rotated, 8": Cache(turned(5, 32), EIGHT),
    "6 rotated, 6": Cache(turned(6), integers(6)),
    "6 rotated, 5": Cache(turned(6), integers(5, 32)),
    "6 rotated, 4 with offsets": Cache(turned(6), V4),
    "5 rotated, 5": Cache(turned(5), integers(5, 32)),
    "5 rotated, 4 with offsets": Cache(turned(5), V4),
    "4, 4": Cache(integers(4, 32), integers(4, 32)),
    "4, 4 in NVFP4": Cache(*[Rounding(4, 16, elements="e2m1", scale="e4m3")] * 2),
    "4, 4 in MXFP4": Cache(*[Rounding(4, 32, elements="e2m1", scale="e8m0")] * 2),
    "4 rotated, 4": Cache(turned(4, 32), integers(4, 32)),
    "4 rotated, 4, NVFP4": Cache(
        Rounding(4, 16, elements="e2m1", scale="e4m3", rotated=True), Rounding(4, 16, elements="e2m1", scale="e4m3")
    ),
    "4 rotated, 4 rotated": Cache(turned(4, 32), turned(4, 32)),
    "4 rotated, 4 rotated, searched": Cache(turned(4, 32, searched=True), turned(4, 32, searched=True)),
    "4 rotated, 4 rotated, one scale, normal's values": Cache(*[turned(4, elements="normal", searched=True)] * 2),
    "4 rotated, 4, both with offsets": Cache(turned(4, 32, offset=True), V4),
    "4 rotated, 4, both with offsets by 16": Cache(turned(4, 16, offset=True), integers(4, 16, offset=True)),
    "4 by channel of 32 tokens, 4 with offsets": Cache(integers(4, 32, offset=True, by_channel=True), V4),
    "4 by channel of 32 tokens, 4 by 16, both with offsets": Cache(
        integers(4, 32, offset=True, by_channel=True), integers(4, 16, offset=True)
    ),
    "4 by channel of 32 tokens, 4 rotated, one scale": Cache(
        integers(4, 32, offset=True, by_channel=True), turned(4, searched=True)
    ),
    "4 by channel of 32 tokens, 8": Cache(integers(4, 32, offset=True, by_channel=True), EIGHT),
    "4 by channel of 64 tokens, 4 with offsets": Cache(integers(4, 64, offset=True, by_channel=True), V4),
    "4 rotated, from the block's first token, 8": Cache(turned(4, base="first"), EIGHT),
    "4 rotated, from the mean of the block before, 8": Cache(turned(4, base="before"), EIGHT),
    "4 rotated by 32, from the mean of the block before, 8": Cache(turned(4, 32, base="before"), EIGHT),
    "4, from the mean of the block before, 8": Cache(integers(4, 32, base="before"), EIGHT),
    "5 rotated, from the mean of the block before, 8": Cache(turned(5, base="before"), EIGHT),
    "5 rotated, from the mean of the block before, 4 with offsets": Cache(turned(5, base="before"), V4),
    "4 centered and rotated, 8": Cache(turned(4, 32, offset=True, centered=True), EIGHT),
    "4 centered and weighted, 8": Cache(integers(4, 32, offset=True, centered=True, weighted=True), EIGHT),
    "4 centered and rotated, 4, both with offsets": Cache(turned(4, 32, offset=True, centered=True), V4),
    "4 centered, weighted and rotated, 4, both with offsets": Cache(
        turned(4, 32, offset=True, centered=True, weighted=True), V4
    ),
    "4 centered and rotated, 4, the first 128 in 8": Cache(turned(4, 32, offset=True, centered=True), V4, first=128),
    "4 rotated, 4, the first 128 in 8": Cache(turned(4, 32, offset=True), V4, first=128),
    "4 rotated, 4, the last 128 in 8": Cache(turned(4, 32, offset=True), V4, recent=128),
    "4 rotated, 4, the first and last 128 in 8": Cache(turned(4, 32, offset=True), V4, first=128, recent=128),
    "5 rotated, 4 with offsets, the first and last 128 in 8": Cache(turned(5), V4, first=128, recent=128),
    "6 rotated, 4 with offsets, the first and last 128 in 8": Cache(turned(6), V4, first=128, recent=128),
    "8, 4 with offsets, the first and last 128 in 8": Cache(EIGHT, V4, first=128, recent=128),
}
"""By name: widths of keys and values. The default is a scale for 32 numbers, and one for a head of 5 and more bits."""

WITH_ENDS = "4, 4; rotated, one scale; the first and last 128 in 8 (k4v4)"
BUILT = (
    "16, 16",
    "8, 8",
    "8, 8; rotated, one scale (k8v8)",
    "8, 4; rotated, one scale (k8v4)",
    "6 odd, 4; rotated, one scale (k6v4)",
    "5 odd, 4; rotated, one scale (k5v4)",
    WITH_ENDS,
    "4, 4; rotated, one scale",
    "4, 4",
)
"""The formats that are measured with needles: those that are built, and 4 bits without ends or rotation."""

SHORT_WINDOWS = "k4v4, and 8, 8 rotated in layers with a short window"
"""The format as it is built: a window of less than 1,024 tokens has 8 bits. The bits are those of the other layers."""

CHOICES: Mapping[str, Cache] = {
    "5, 4": Cache(odd(5), NORMAL_4),
    "6, 4": Cache(odd(6), NORMAL_4),
    "8, 4": Cache(turned(8), NORMAL_4),
}
"""The formats that a layer may have if each has its own."""
BUDGETS = (5.0, 5.5)


def main() -> None:
    """Measures, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"], help="by examples/fetch_model.py")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, in one sequence")
    parser.add_argument("--every", type=int, default=1, help="the places whose next token is compared")
    parser.add_argument("--only", nargs="+", help="names of formats; all if left out")
    parser.add_argument("--needles", action="store_true", help="plant keys in a long text, and measure built formats")
    parser.add_argument("--llama-cpp", type=Path, help="a Python with llama-cpp-python, whose caches are measured too")
    parser.add_argument("--layers", action="store_true", help="measure formats of each layer too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=HERE / "results" / f"kv-bits-{date.today().isoformat()}.json")
    parser.add_argument("--page", type=Path, help="a file of results, to make the page of")
    options = parser.parse_args()
    if options.page:
        result = json.loads(options.page.read_text())
        TABLE.put(PAGE, tables(result))
        PAGE.with_suffix(".svg").write_text(drawing(result))
        return
    torch.set_num_threads(options.threads)
    for model in options.models:
        (measure_needles if options.needles else measure)(model, options)


def measure(name: str, options: argparse.Namespace) -> None:
    """Adds a model's rows that the file of results lacks."""
    path = _fetched(name)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = tokenizer(read_text(BUILT_IN, "text", EVALUATION_TEXT))["input_ids"]
    ids = text[: min(options.tokens, len(text) - CALIBRATION)]
    model = RoundedModel(path)
    model.calibrate(text[-CALIBRATION:])
    exact = model.hidden(ids, Cache())

    def row(label: str, caches: Cache | Sequence[Cache]) -> dict[str, Any]:
        each = [caches] if isinstance(caches, Cache) else caches
        bits = sum(c.bits_a_number(model.head) for c in each) / len(each)
        return _row(path, model, label, bits, exact, model.hidden(ids, caches), ids, options.every)

    for label, (caches, bits) in _formats(model).items():
        if options.only and label not in options.only:
            continue
        if not _has(options.json, path.name, len(ids), label):
            _add(options.json, row(label, caches) | {"bits": bits})
    if options.layers:
        choose_layers(model, row, options, path.name, len(ids))


def measure_needles(name: str, options: argparse.Namespace) -> None:
    """Adds the rows of a model with planted keys that the file of results lacks."""
    path = _fetched(name)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = tokenizer(read_text(BUILT_IN, "text", EVALUATION_TEXT))["input_ids"][:-CALIBRATION]
    pages = (page.read_text() for page in sorted((REPOSITORY / "docs" / "use").glob("*.md")))
    while len(text) < options.tokens:
        text += _tokens(tokenizer, next(pages))
    needles = plant(lambda some: _tokens(tokenizer, some), text, options.tokens)
    model = RoundedModel(path)
    exact = None
    for label, (caches, bits) in _formats(model).items():
        if label not in (*BUILT, SHORT_WINDOWS) or (options.only and label not in options.only):
            continue
        if _has(options.json, path.name, len(needles.ids), label, len(needles.keys)):
            continue
        exact = model.hidden(needles.ids, Cache()) if exact is None else exact
        hidden = exact if label == "16, 16" else model.hidden(needles.ids, caches)
        row = _row(path, model, label, bits, exact, hidden, needles.ids, options.every)
        each = [caches] * model.layers if isinstance(caches, Cache) else caches
        row["bytes"] = sum(c.bits_a_number(model.head) for c in each) * model.numbers / model.layers / 8
        _add(options.json, row | needles.score(model.logits(hidden[needles.places])))
    if options.llama_cpp:
        _measure_llama_cpp(path, model, needles, options)


def _measure_llama_cpp(path: Path, model: RoundedModel, needles: Needles, options: argparse.Namespace) -> None:
    """Adds the rows of llama.cpp's caches, rotated and not."""
    tokens = len(needles.ids)
    known = {"model": path.name, "head": model.head, "tokens": tokens, "every": options.every}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.npz"
        places = np.arange(options.every - 1, tokens - 1, options.every)
        np.savez(text, places=places, **needles.arrays())
        for rotation in ({}, {"LLAMA_ATTN_ROT_DISABLE": "1"}):
            command = [options.llama_cpp, "-m", "peers.workers.llama_cpp_cache", path, text, str(options.threads)]
            printed = subprocess.run(
                [*map(str, command), "q8_0", "q4_0"],
                env=environment() | rotation,
                cwd=BENCHMARKS,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=True,
                text=True,
            ).stdout
            for row in map(json.loads, printed.splitlines()):
                if not _has(options.json, path.name, tokens, row["format"], len(needles.keys)):
                    _add(options.json, known | row | {"bytes": row["bits"] * model.numbers / 8})
                    print(f"{row['format']}: KL {row['kl']:.5f}", flush=True)


def _fetched(name: str) -> Path:
    fetched: Path = load_module("fetch_model", REPOSITORY / "examples" / "fetch_model.py").fetch(name)
    return fetched


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _formats(model: RoundedModel) -> dict[str, tuple[Cache | Sequence[Cache], float]]:
    """Returns all formats, with the bits of a number; for a model with windows also ``SHORT_WINDOWS``."""
    every: dict[str, tuple[Cache | Sequence[Cache], float]] = {
        label: (cache, cache.bits_a_number(model.head)) for label, cache in {"16, 16": Cache(), **FORMATS}.items()
    }
    if any(model.windows):
        whole, short = FORMATS[WITH_ENDS], Cache(turned(8), turned(8))
        each = [short if 0 < window < 1024 else whole for window in model.windows]
        every[SHORT_WINDOWS] = each, whole.bits_a_number(model.head)
    return every


def _row(
    path: Path,
    model: RoundedModel,
    label: str,
    bits: float,
    exact: torch.Tensor,
    found: torch.Tensor,
    ids: Sequence[int],
    every: int,
) -> dict[str, Any]:
    distance = model.compare(exact, found, ids, every)
    print(f"{label}: {bits:.2f} bits, KL {distance['kl']:.5f}, at {time.strftime('%X')}", flush=True)
    of = {"model": path.name, "head": model.head, "tokens": len(ids), "context": model.context, "format": label}
    return of | {"bits": bits, **distance, "every": every}


def choose_layers(model: RoundedModel, row: Any, options: argparse.Namespace, name: str, tokens: int) -> None:
    """Measures each layer alone in each of ``CHOICES``, then the choices of least KL under ``BUDGETS``.

    KLs of layers add up in the choice; the whole cache is measured.
    """
    alone: dict[tuple[int, str], float] = {}
    for layer in range(model.layers):
        for choice, cache in CHOICES.items():
            label = f"layer {layer}: {choice}"
            known = _has(options.json, name, tokens, label)
            if not known:
                known = row(label, [cache if i == layer else Cache() for i in range(model.layers)])
                _add(options.json, known)
            alone[layer, choice] = known["kl"]
    for budget in BUDGETS:
        label = f"by layer, {budget:g} bits"
        if _has(options.json, name, tokens, label):
            continue
        chosen = cheapest(alone, {c: of.bits_a_number(model.head) for c, of in CHOICES.items()}, model.layers, budget)
        _add(options.json, row(label, [CHOICES[c] for c in chosen]) | {"layers": chosen})


def cheapest(
    alone: Mapping[tuple[int, str], float], bits: Mapping[str, float], layers: int, budget: float
) -> list[str]:
    """Returns a choice for each layer, of little total KL within ``budget`` bits a number.

    Begins with the widest and takes the step down with the least KL for a bit, until the budget holds.
    """
    chosen = [max(bits, key=lambda c: bits[c])] * layers
    while sum(bits[c] for c in chosen) > budget * layers:
        steps = [
            ((alone[i, c] - alone[i, now]) / (bits[now] - bits[c]), i, c)
            for i, now in enumerate(chosen)
            for c in bits
            if bits[c] < bits[now]
        ]
        if not steps:
            sys.exit(f"no choice has {budget} bits")
        _, layer, choice = min(steps)
        chosen[layer] = choice
    return chosen


def _has(path: Path, model: str, tokens: int, label: str, needles: int = 0) -> Any:
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return next((r for r in rows if (*_panel_of(r), r["format"]) == (model, tokens, needles, label)), None)


def _panel_of(row: Mapping[str, Any]) -> tuple[str, int, int]:
    """The model, the tokens, and the number of planted keys of a row."""
    return row["model"], row["tokens"], row.get("needles", 0)


def _add(path: Path, row: Mapping[str, Any]) -> None:
    result = json.loads(path.read_text()) if path.exists() else {"rows": []}
    result |= {"processor": processor(), "commit": commit(), "date": date.today().isoformat()}
    result["rows"].append(dict(row))
    path.write_text(json.dumps(result, indent=1) + "\n")


def tables(result: Mapping[str, Any]) -> str:
    """Returns a table for each model and length, and for each with planted keys."""
    parts = []
    for panel in dict.fromkeys(map(_panel_of, result["rows"])):
        model, tokens, needles = panel
        rows = [r for r in result["rows"] if _panel_of(r) == panel and not r["format"].startswith("layer ")]
        context = min(r.get("context", tokens) for r in rows)
        longer = f" (trained for {context:,})" if context < tokens else ""
        planted = f", {needles} planted keys" if needles else ""
        heads = ["keys, values", "bits a number", "KL", "KL, 99 %", "same best token"]
        heads += ["bytes a token", "keys found", "log-probability of a key"] if needles else []
        parts += [
            f"**{model}**, heads of {rows[0]['head']}, {tokens:,} tokens{longer}{planted}",
            "",
            line(heads),
            line(["---", *["---:"] * (len(heads) - 1)]),
            *(line(_cells(r)) for r in sorted(rows, key=lambda r: (-r["bits"], r["kl"])) if r["bits"] < 16 or needles),
            "",
        ]
    measured = f", commit {result['commit']}" if result["commit"] else ""  # none outside a clone
    return "\n".join([*parts, f"{result['processor']}; {result['date']}{measured}."])


def _cells(row: Mapping[str, Any]) -> list[str]:
    kl = f"{row['kl']:.4f}"
    cells = [row["format"], f"{row['bits']:.2f}", f"**{kl}**" if row["kl"] <= LIMIT else kl]
    cells += [f"{row['kl_99']:.3f}", f"{row['top_1']:.1%}"]
    if "needles" in row:
        cells += [f"{row['bytes']:,.0f}", f"{row['found'] * row['needles']:.0f}", f"{row['answer']:.2f}"]
    return cells


COLORS = {"by layer": "#8250df", "llama.cpp": "#bf8700"}
"""Colors of points by a part of the format's name."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 620, 380, 64, 24, 40, 44


def drawing(result: Mapping[str, Any]) -> str:
    """Draws KL, as powers of ten, by bits a number: a panel for each model and length, as SVG."""
    panels = list(dict.fromkeys(map(_panel_of, result["rows"])))
    parts: list[str] = []
    for i, panel in enumerate(panels):
        rows = [r for r in result["rows"] if _panel_of(r) == panel]
        rows = [r for r in rows if r["bits"] < 16 and not r["format"].startswith("layer ")]
        model, tokens, needles = panel
        title = f"{model}, {tokens:,} tokens" + (f", {needles} planted keys" if needles else "")
        parts += _panel(title, rows, i % 2 * WIDTH, i // 2 * HEIGHT)
    width, height = WIDTH * min(len(panels), 2), HEIGHT * ((len(panels) + 1) // 2)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    back = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head + 'font-family="sans-serif" font-size="12" fill="#57606a">', back, *parts, "</svg>", ""])


def _panel(title: str, rows: Sequence[Mapping[str, Any]], right: int, down: int) -> list[str]:
    logs = [float(torch.tensor(r["kl"]).log10()) for r in rows]
    low, high = min(min(logs), -3.5), max(max(logs), -0.5)

    def x(bits: float) -> float:
        return round(LEFT + (bits - 4) / 5 * (WIDTH - LEFT - RIGHT), 1)

    def y(log: float) -> float:
        return round(TOP + (high - log) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<g transform="translate({right} {down})">']
    parts.append(f'<text x="{LEFT}" y="22" font-size="14" fill="#24292f">{title}</text>')
    for log in range(int(low) - 1, int(high) + 1):
        if low <= log <= high:
            parts.append(f'<path d="M{LEFT} {y(log)}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y(log) + 4}" text-anchor="end">{10.0**log:g}</text>')
    parts.append(f'<path d="M{LEFT} {y(-2)}H{WIDTH - RIGHT}" stroke="#cf222e" stroke-dasharray="4 3"/>')
    for bits in range(4, 10):
        parts.append(f'<text x="{x(bits)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{bits}</text>')
    parts.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 8}" text-anchor="middle">bits a number, scales too</text>')
    best = [r for r in rows if not any(o["bits"] <= r["bits"] and o["kl"] < r["kl"] for o in rows)]
    for r, log in zip(rows, logs, strict=True):
        color = next((c for name, c in COLORS.items() if name in r["format"]), "#0969da")
        parts.append(
            f'<circle cx="{x(r["bits"])}" cy="{y(log)}" r="4" fill="{color}">'
            f"<title>{r['format']}: {r['kl']:.4f}</title></circle>"
        )
    path = "L".join(
        f"{x(r['bits'])} {y(float(torch.tensor(r['kl']).log10()))}" for r in sorted(best, key=lambda r: r["bits"])
    )
    return [*parts, f'<path d="M{path}" fill="none" stroke="#0969da"/>', "</g>"]


if __name__ == "__main__":
    main()
