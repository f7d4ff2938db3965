"""The result as a terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from enginewright.optimizer.report.numbers import count, duration, format_bytes, of_limit, percent, rate
from enginewright.runtime.shared.errors import counted

from .result import BenchResult, ProfileLine, Speculation, Spread

_MOST_LINES = 8
"""The most modules of a profile that are shown. They are the slowest ones."""


def print_result(result: BenchResult, console: Console) -> None:
    """Prints tables of prompts and decode steps with their limits, and profiles if there are any."""
    if result.prompts:
        console.print(_prompts(result))
        console.print()
    if result.decodes:
        console.print(_decodes(result))
        console.print()
    if result.speculation is not None:
        console.print(_speculation(result.speculation))
        console.print()
    for line in notes(result):
        console.print(line, markup=False, soft_wrap=True)
    for profile in result.profiles:
        console.print()
        title = f"{profile.name}: {duration(profile.seconds)}, {duration(profile.around)} of it outside of kernels"
        console.print(title, markup=False)
        console.print(_profile(profile.by_op, "op"))
        console.print(_profile(profile.by_module[:_MOST_LINES], "op and module"))


def notes(result: BenchResult) -> Iterator[str]:
    """Returns lines about memory, limits, and the origin of the figures."""
    memory = result.memory
    parts = [f"{format_bytes(memory.peak)} at most, {format_bytes(memory.before)} before the bundle was opened"]
    if memory.weights:
        parts.append(f"weights {format_bytes(memory.weights)}")
    parts.append(f"KV cache {format_bytes(memory.kv_cache)}")
    yield f"memory   {'; '.join(parts)}"
    if (limits := result.limits) is not None:
        peaks = [f"{count(peak.median)} {kind} multiply-adds/s" for kind, peak in limits.peaks.items()]
        read = f"reads {format_bytes(limits.working_set)} at {limits.bandwidth.median / 1e9:.1f} GB/s"
        yield f"limits   {', '.join([read, *peaks])}"
    engine = ", ".join(f"{key} {value}" for key, value in result.engine.items())
    yield f"machine  {result.machine['processor']}, {result.machine['cores']} cores; {engine}"
    rounds, steps = result.options["rounds"], result.options["steps"]
    yield f"times    medians of {counted(rounds, 'round')} of {steps} steps; in brackets the quartiles"


def _table(*headings: str, left: int = 0) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    return table


def _spread(spread: Spread) -> str:
    middle = duration(spread.median)
    return f"{middle} [{duration(spread.low)} .. {duration(spread.high)}]"


def _share(share: float | None) -> str:
    return "" if share is None else of_limit(share)


def _prompts(result: BenchResult) -> Table:
    table = _table("prompt", "time to first token", "tokens/s", "of limit", "time per token after")
    for p in result.prompts:
        if p.ttft is None or p.tpot is None or p.tokens_per_second is None:
            table.add_row(f"{p.tokens:,}", _plain(p.omitted or ""))
            continue
        cells = (f"{p.tokens:,}", _spread(p.ttft), rate(p.tokens_per_second), _share(p.share), _spread(p.tpot))
        table.add_row(*map(_plain, cells))
    return table


def _decodes(result: BenchResult) -> Table:
    table = _table("requests", "context", "time per output token", "tokens/s", "GB/s", "of limit")
    for d in result.decodes:
        if d.step is None or d.tokens_per_second is None:
            table.add_row(f"{d.batch:,}", f"{d.context:,}", _plain(d.omitted or ""))
            continue
        moved = "" if d.bytes_per_second is None else f"{d.bytes_per_second / 1e9:.1f}"
        cells = (f"{d.batch:,}", f"{d.context:,}", _spread(d.step), rate(d.tokens_per_second), moved, _share(d.share))
        table.add_row(*map(_plain, cells))
    return table


def _speculation(found: Speculation) -> Table:
    table = _table("text", "tokens/s", f"with {found.guessed_by}", "ratio of these", "drafted", "accepted", left=1)
    for one in found.tasks:
        ratio = one.ahead.median / one.plain.median  # not of each round: a reader divides the two columns
        speeds = rate(one.plain.median), rate(one.ahead.median), f"{ratio:.2f}"
        table.add_row(one.task, *speeds, f"{one.drafted:,}", f"{one.accepted:,}")
    return table


def _profile(lines: Sequence[ProfileLine], heading: str) -> Table:
    table = _table(heading, "calls", "time", "of kernels", "GB/s", "G madd/s", "of limit", left=1)
    for line in lines:
        took = max(line.seconds, 1e-12)
        cells = (
            line.name,
            f"{line.calls:,}",
            duration(line.seconds),
            percent(line.part),
            f"{(line.weights + line.kv) / took / 1e9:.1f}",
            f"{line.products / took / 1e9:.1f}" if line.products else "",
            _share(line.share) if line.products else "",
        )
        table.add_row(*map(_plain, cells))
    return table


def _plain(text: str) -> str:
    """Escapes brackets, which Rich would read as markup."""
    return text.replace("[", r"\[")
