"""Prints a plan in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from enginewright.optimizer.report.numbers import count, duration, format_bytes, rate

from .programs import target_on
from .result import BatchSpeed, DevicePlan, DeviceSection, PlanResult

_LIMITS = {"memory": "memory", "tpot": "the TPOT", "ttft": "the TTFT", "requests": "what is asked"}
BUSY = 0.5
"""The number of processes per core from which on other work slows kernels down."""
_PREDICTED = "a prediction, not a measurement (docs/build/cuda.md has what was measured on an H100)"


def print_plan(result: PlanResult, console: Console) -> None:
    """Prints the memory and the speed on each device, then the plans that were left out and the meaning of the
    columns.
    """
    for device in result.devices:
        plans = [plan for plan in result.plans if plan.device == device.name]
        console.print(device_line(device), markup=False, soft_wrap=True)
        if plans:
            console.print(_memory(plans, result))
            console.print()
            if any(plan.fits for plan in plans):
                console.print(_speeds([plan for plan in plans if plan.fits], result))
                console.print()
    for line in notes(result):
        console.print(line, markup=False, soft_wrap=True)


def device_line(device: DeviceSection) -> str:
    """Returns a line with the assumed properties of a device."""
    room = f"{format_bytes(device.room)} may be used"
    if device.measured or device.bandwidth is None:
        return f"{device.name}: this machine, whose kernels were timed just now; {room}"
    peaks = ", ".join(f"{count(peak)} {kind}" for kind, peak in device.peaks.items())
    shares = f"{device.shares['bandwidth']:.0%} of the bandwidth and {device.shares['compute']:.0%} of the operations"
    return (
        f"{device.name}: {device.bandwidth / 1e9:,.0f} GB/s, {peaks} operations/s, {room}. With {shares}, which is "
        f"assumed, it is {_PREDICTED}."
    )


def notes(result: PlanResult) -> Iterator[str]:
    """Yields the plans that don't fit, with suggestions; the plans that were left out; and the meaning of the
    columns.
    """
    for plan in result.plans:
        if not plan.fits:
            needed = f"{format_bytes(plan.needed)} of {format_bytes(plan.room)}"
            yield f"too big  {', '.join(plan.recipes)} on {plan.device} needs {needed}. {plan.advice}"
    for omitted in result.omitted:
        where = "" if omitted.device is None else f" on {omitted.device}"
        yield f"omitted  {', '.join(omitted.recipes)}{where}: {omitted.why}"
    measured = {device.name for device in result.devices if device.measured}
    gpu_target = target_on(gpu=True)
    if lent := {plan.target for plan in result.plans if plan.device not in measured} - {gpu_target}:
        yield f"GPUs are planned with the program of target {', '.join(lent)}: the bundle has none of {gpu_target}"
    yield from busy(result.devices)
    context, prompt = result.options["context"], result.options["prompt"]
    yield f"requests of {context:,} tokens with their answers, prompts of {prompt:,}. TPOT: when all are that long."
    late = "; !: later than the goal" if any(result.options[name] is not None for name in ("tpot", "ttft")) else ""
    yield f"TTFT: of a prompt that comes while all other requests get tokens, without waiting for another prompt{late}."


def busy(devices: Iterable[DeviceSection]) -> Iterator[str]:
    """Yields a warning about figures that were measured while other processes ran."""
    for device in devices:
        if device.measured and device.load >= BUSY:
            yield (
                f"busy     this machine: in the minute before, {device.load:.1f} processes wanted each core. "
                "Its figures are too slow: plan again when it is idle"
            )


def limit_of(name: str) -> str:
    """Returns a phrase for the limit that a larger batch would exceed. ``name``: as in ``DevicePlan.largest_limit``."""
    return _LIMITS.get(name, "")


def longest_request(most_tokens: int, context_length: int) -> str:
    """Returns the most tokens of a single request, and which of two limits that is.

    Args:
        most_tokens: tokens that memory has room for.
        context_length: tokens of the model's context.
    """
    if most_tokens < context_length:
        return f"{most_tokens:,} tokens, by memory"
    return f"{context_length:,} tokens, the context"


def late_mark(seconds: float, goal: float | None) -> str:
    """Returns " !" if a time exceeds its goal, both in seconds; "" if it doesn't, or if the goal is None."""
    return "" if goal is None or seconds <= goal else " !"


def plain_table(*headings: str) -> Table:
    """Returns a table without lines, whose first column is aligned to the left."""
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


def _memory(plans: list[DevicePlan], result: PlanResult) -> Table:
    goals = any(result.options[name] is not None for name in ("tpot", "ttft"))
    states = any(plan.states_per_request for plan in plans)
    columns = ["recipe", "weights", "KV a token", *(["states a request"] if states else []), "most requests"]
    columns.append("longest request")
    table = plain_table(*columns, "largest batch" if not goals else "largest batch within the goals", "limited by")
    for plan in plans:
        most = f"{plan.most_requests:,}" if plan.fits else "too big"
        largest = (
            f"{plan.largest.batch:,}, {rate(plan.largest.tokens_per_second or 0)} tokens/s" if plan.largest else ""
        )
        if plan.fits and plan.largest is None:
            largest = "none"
        table.add_row(
            ", ".join(plan.recipes),
            format_bytes(plan.weights),
            format_bytes(plan.kv_per_token) if plan.kv_per_token else "no KV cache",
            *([format_bytes(plan.states_per_request)] if states else []),
            most,
            longest_request(plan.most_tokens, result.context_length),
            largest,
            limit_of(plan.largest_limit),
        )
    return table


def _speeds(plans: list[DevicePlan], result: PlanResult) -> Table:
    table = plain_table("recipe", "requests", "TTFT", "TPOT", "tokens/s", "waits for")
    for plan in plans:
        for i, speed in enumerate(plan.speeds):
            name = "" if i else ", ".join(plan.recipes)
            table.add_row(name, *speed_cells(speed, result.options))
    return table


def speed_cells(speed: BatchSpeed, options: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a number of requests: the number, times, and tokens per second; "too big" without a time."""
    if speed.tpot is None or speed.ttft is None or speed.tokens_per_second is None:
        return [f"{speed.batch:,}", "too big"]
    pairs = (speed.ttft, options["ttft"]), (speed.tpot, options["tpot"])
    times = [f"{duration(seconds)}{late_mark(seconds, goal)}" for seconds, goal in pairs]
    return [f"{speed.batch:,}", *times, rate(speed.tokens_per_second), speed.bound]
