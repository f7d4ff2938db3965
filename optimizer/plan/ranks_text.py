"""Prints a plan for ranks in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from enginewright.optimizer.report.numbers import duration, format_bytes, rate

from .ranks import Best, PartitionPlan, RankPlans
from .text import busy, device_line, limit_of, longest_request, plain_table, speed_cells


def print_rank_plans(result: RankPlans, console: Console) -> None:
    """Prints the memory, the received bytes and the speed of each partition, and the best partitions, for each device
    and recipe.
    """
    for device in result.devices:
        console.print(device_line(device), markup=False, soft_wrap=True)
        console.print(link_line(result.links[device.name]), markup=False, soft_wrap=True)
        for recipes in dict.fromkeys(p.recipes for p in result.plans if p.device == device.name):
            plans = [p for p in result.plans if (p.device, p.recipes) == (device.name, recipes)]
            best = [b for b in result.best if (b.device, b.recipes) == (device.name, recipes)]
            console.print(f"\n{', '.join(recipes)}", markup=False)
            shown = _shown(plans, best)
            console.print(_held(shown, result.context_length))
            console.print()
            if any(plan.fits for plan in shown):
                console.print(_speeds([plan for plan in shown if plan.fits], result))
                console.print()
            for line in map(best_line, best):
                console.print(line, markup=False, soft_wrap=True)
    for line in notes(result):
        console.print(line, markup=False, soft_wrap=True)


def link_line(wires: dict[str, Any]) -> str:
    """Returns a line about the links between ranks."""
    parts = []
    for link, where in ((wires["inside"], "within a machine"), (wires["between"], "between machines")):
        if link is None:
            continue
        speed = f"{link['bandwidth'] / 1e9:,.4g} GB/s, {wires['share']:.0%} of which is assumed to be reached"
        if not link["bandwidth"]:
            speed = "nothing is copied"
        waits = f"{link['base'] * 1e6:.3g} us a gather and {link['hop'] * 1e6:.3g} us a further rank"
        parts.append(f"{link['name']} {where}: {speed}, {waits}")
    if wires["inside"] is not None and wires["between"] is not None:
        parts.append(f"{wires['per_machine']} ranks a machine")
    return "links: " + "; ".join(parts)


def best_line(best: Best) -> str:
    """Returns a line with the best partitions of a number of ranks."""
    if best.latency is None and best.throughput is None:
        return f"{best.ranks:,} ranks: none fits and meets the goals"
    latency, throughput = best.latency or "none", best.throughput or "none"
    return f"{best.ranks:,} ranks: the shortest time per token {latency}, the most tokens a second {throughput}"


def notes(result: RankPlans) -> Iterator[str]:
    """Yields the plans that were left out, and the meaning of the columns."""
    for omitted in result.omitted:
        yield f"omitted  {', '.join(omitted.recipes)}: {omitted.why}"
    yield from busy(result.devices)
    context, prompt = result.options["context"], result.options["prompt"]
    yield f"requests of {context:,} tokens with their answers, prompts of {prompt:,}. Of unlike ranks, the largest."
    yield "received a token, links: bytes that a rank receives in a step of one token, and its wait for them."
    if any(plan.pipeline > 1 for plan in result.plans):
        yield "As many steps are in flight as a partition has stages, of different requests."


def _shown(plans: list[PartitionPlan], best: list[Best]) -> list[PartitionPlan]:
    """Returns the partitions to print: all of a single number of ranks, or the best ones of several numbers."""
    if len(best) == 1:
        return plans
    named = {(b.ranks, name) for b in best for name in (b.latency, b.throughput)}
    none = {b.ranks for b in best if b.latency is None and b.throughput is None}
    return [p for p in plans if (p.ranks, p.partition) in named or (p.ranks in none and p.pipeline == 1)]


def _held(plans: list[PartitionPlan], context_length: int) -> Table:
    columns = [
        "partition",
        "weights a rank",
        "KV a token",
        "most requests",
        "longest request",
        "largest batch",
        "limited by",
    ]
    table = plain_table(*columns)
    for plan in plans:
        row = [plan.partition, format_bytes(plan.weights), format_bytes(plan.kv_per_token)]
        if not plan.fits:
            table.add_row(*row, "too big")
            continue
        largest = plan.largest
        most = "none" if largest is None else f"{largest.batch:,}, {rate(largest.tokens_per_second or 0)} tokens/s"
        row += [f"{plan.most_requests:,}", longest_request(plan.most_tokens, context_length), most]
        table.add_row(*row, limit_of(plan.largest_limit))
    return table


def _speeds(plans: list[PartitionPlan], result: RankPlans) -> Table:
    table = plain_table("partition", "received a token", "links", "requests", "TTFT", "TPOT", "tokens/s", "waits for")
    for plan in plans:
        for i, speed in enumerate(plan.speeds):
            moved = format_bytes(round(plan.received)), duration(plan.waited)
            row = ["", "", ""] if i else [plan.partition, *moved]
            table.add_row(*row, *speed_cells(speed, result.options))
    return table
