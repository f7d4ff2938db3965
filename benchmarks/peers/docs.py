"""Puts a result into the documents, between the markers of its kind of machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.chart import chart
from peers.loading import REPOSITORY
from peers.tables import WIDEST, instructions, short, whole


def marks(machine: str) -> tuple[str, str]:
    """The lines around what is of such a machine."""
    return (
        f"<!-- benchmarks/bench_peers.py, {machine}: begin -->",
        f"<!-- benchmarks/bench_peers.py, {machine}: end -->",
    )


def update(result: Mapping[str, Any], source: str, repository: Path = REPOSITORY) -> list[Path]:
    """Writes benchmarks/notes/benchmark.md, its chart and the README's section; ``source`` is the result's path."""
    page, readme = repository / "benchmarks/notes/benchmark.md", repository / "README.md"
    machine = instructions(result)
    picture = page.with_name("benchmark.svg" if machine == WIDEST else f"benchmark-{machine.lower()}.svg")
    put(page, machine, [f"From [{Path(source).name}](../../{source}).", "", *whole(result)])
    picture.write_text(chart(result), encoding="utf-8")
    put(readme, machine, [f"From [{Path(source).name}]({source}).", "", *short(result)])
    return [page, picture, readme]


def put(path: Path, machine: str, lines: Sequence[str]) -> None:
    """Replaces what is between the markers. Raises ValueError for a file that hasn't both, once and in order."""
    text = path.read_text(encoding="utf-8")
    begin, end = marks(machine)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path.name} has no lines {begin} and {end} to put the tables between")
    before, rest = text.split(begin)
    path.write_text(
        f"{before}{begin}\n\n" + "\n".join(lines).rstrip() + f"\n\n{end}{rest.split(end)[1]}", encoding="utf-8"
    )
