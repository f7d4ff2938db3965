"""Puts a result into the documents, between markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.chart import chart
from peers.loading import REPOSITORY
from peers.tables import short, whole

BEGIN, END = "<!-- benchmarks/bench_peers.py: begin -->", "<!-- benchmarks/bench_peers.py: end -->"


def update(result: Mapping[str, Any], source: str, repository: Path = REPOSITORY) -> list[Path]:
    """Writes docs/inside/benchmark.md, its chart and the README's section; ``source`` is the result's path there."""
    page, readme = repository / "docs/inside/benchmark.md", repository / "README.md"
    picture = page.with_suffix(".svg")
    put(page, [f"From [{Path(source).name}](../../{source}).", "", *whole(result)])
    picture.write_text(chart(result), encoding="utf-8")
    put(readme, [f"From [{Path(source).name}]({source}).", "", *short(result)])
    return [page, picture, readme]


def put(path: Path, lines: Sequence[str]) -> None:
    """Replaces what is between the markers. Raises ValueError for a file that hasn't both, once and in order."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path.name} has no lines {BEGIN} and {END} to put the tables between")
    before, rest = text.split(BEGIN)
    path.write_text(
        f"{before}{BEGIN}\n\n" + "\n".join(lines).rstrip() + f"\n\n{END}{rest.split(END)[1]}", encoding="utf-8"
    )
