"""A load test's result as a terminal shows it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from enginewright.optimizer.report.numbers import duration, rate
from enginewright.runtime.shared.json_document import printable

from .result import Figures, LoadResult, Spread

_TIMES = {
    "ttft": "first token",
    "tpot": "time per token",
    "gap": "between pieces",
    "end_to_end": "end to end",
}


def print_load(result: LoadResult, console: Console) -> None:
    """Prints the load that was sent, the outcome and times of the requests, and notes on the figures."""
    work = result.workload
    how = f"{work['clients']} clients" if work["loop"] == "closed" else _rate(work)
    console.print(
        f"{printable(result.model)} at {result.url}: {how}, seed {work['seed']}", markup=False, soft_wrap=True
    )
    console.print()
    for figures in (result.figures, *result.classes):
        _figures(figures, console, all_of=bool(result.classes))
    cpu = result.cpu_seconds / result.figures.tokens * 1e6 if result.figures.tokens else 0.0
    usage = f"{result.cpu_share:.1%} of a core" + (f", {cpu:.0f} µs a token" if cpu else "")
    console.print(f"{'load tool':<14}{usage}", markup=False, soft_wrap=True)
    for note in result.notes():
        console.print(f"{'note':<14}{note}", markup=False, soft_wrap=True)


def _rate(work: dict[str, object]) -> str:
    if "rate" in work:
        return f"{work['rate']:g} requests a second ({work['arrivals']})"
    return f"the times of {work['trace']}"


def _figures(of: Figures, console: Console, *, all_of: bool) -> None:
    def row(label: str, text: str) -> None:
        console.print(f"{label:<14}{text}", markup=False, soft_wrap=True)

    if all_of:
        console.print(f"class {of.name}" if of.name else "all", markup=False, soft_wrap=True)
    ends = [(of.left, "left"), (of.failed, "failed"), (of.unfinished, "unfinished")]
    counts = [f"{of.finished:,} finished", *(f"{count:,} {name}" for count, name in ends if count)]
    row("requests", f"{', '.join(counts)}; {of.requests_per_second:.3g} a second")
    prompt = "" if of.prompt_tokens is None else f"; {of.prompt_tokens:,} of prompts"
    if of.prompt_tokens and of.cached_tokens:
        prompt += f", {of.cached_tokens / of.prompt_tokens:.0%} of them cached"
    if of.texts:
        row("texts", f"{of.texts:,}, {rate(of.texts_per_second)} a second{prompt.removesuffix(' of prompts')} tokens")
    else:
        row("tokens", f"{of.tokens:,} written, {rate(of.tokens_per_second)} a second{prompt}")
    if (good := of.goodput) is not None:
        goals = ", ".join(
            f"{name.replace('_', ' ')} {duration(goal)}" for name, goal in vars(good.goals).items() if goal is not None
        )
        row("goodput", f"{good.per_second:.3g} requests a second: {good.share:.1%} within {goals}")
    for kind, (count, example) in of.errors.items():
        row("error", f"{count:,} {kind}" + (f": {example}" if example else ""))
    table = Table(box=None, pad_edge=False)
    table.add_column("", min_width=13)
    for heading in ("mean", "p50", "p90", "p99", "largest"):
        table.add_column(heading, justify="right")
    for name, label in _TIMES.items():
        spread: Spread | None = getattr(of, name)
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.largest)
            table.add_row(label, *map(duration, values))
    if table.row_count:
        console.print(table)
    console.print()
