"""The options of a plan, and the sizes that fit into a model's context."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from enginewright.plugins.steps.planning import Shares
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.targets import PROCESSOR

from .devices import default_shares

BATCHES = (1, 4, 16, 64)
CONTEXT, PROMPT = 2048, 512
MOST_REQUESTS = 4096
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan.

    Attributes:
        devices: the names of GPUs, or "cpu".
        device_file: a TOML file with further GPUs, in the format of devices.toml.
        recipes: the recipes to plan for a model; empty for all built-in ones.
        batches: numbers of requests that run at a time.
        context: tokens of each request with its answer; None for 2,048, or the model's context if it is shorter.
        prompt: tokens of the prompt for the time to first token; None for 512, or the context if it is shorter.
        tpot, ttft: goals in seconds: for each output token, and for the first one; None for no goal.
        memory: bytes that may be used of every device's memory; None for the default of each device.
        bandwidth_share, compute_share: the share of a GPU's stated figures that programs reach; None for that of
            devices.toml.
        threads: threads of this machine; 0 for one per core.
        ranks: the numbers of ranks to divide a model into; empty if it isn't divided.
        partition: one partition, such as "tensor=4,pipeline=2"; None for all partitions into ``ranks``.
        links: the link between ranks, or two links: within a machine and between machines.
        per_machine: ranks of a machine if two links are named; None for 8.
        link_share: the share of a link's bandwidth that programs reach; None for that of links.toml.
    """

    devices: tuple[str, ...] = (PROCESSOR,)
    device_file: Path | None = None
    recipes: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES
    context: int | None = None
    prompt: int | None = None
    tpot: float | None = None
    ttft: float | None = None
    memory: int | None = None
    bandwidth_share: float | None = None
    compute_share: float | None = None
    threads: int = 0
    ranks: tuple[int, ...] = ()
    partition: str | None = None
    links: tuple[str, ...] = ()
    per_machine: int | None = None
    link_share: float | None = None


def parse_seconds(text: str, option: str) -> float:
    """Returns the seconds of a text such as "20ms", "20 ms", "0.02s" or "20000us". Raises RequestError naming
    ``option``.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)", text.strip().lower())
    if match is None or not float(match[1]):
        raise RequestError(f"{option}: {text!r} isn't a time", hint="Pass a number with its unit: 20ms, 0.5s or 800us.")
    return float(match[1]) * _UNITS[match[2]]


def shares_of(options: PlanOptions) -> Shares:
    """Returns the shares of the options, or those of devices.toml. Raises RequestError for a share out of range."""
    requested = {"bandwidth": options.bandwidth_share, "compute": options.compute_share}
    for name, share in requested.items():
        if share is not None and not 0 < share <= 1:
            raise RequestError(f"{name}_share: {share:g} is out of range", hint="It must be above 0, and 1 at most.")
    return replace(default_shares(), **{name: share for name, share in requested.items() if share is not None})


def check_range(option: str, values: Sequence[int], most: int) -> None:
    """Raises RequestError naming the option for a value below 1 or above ``most``."""
    for value in values:
        if not 1 <= value <= most:
            raise RequestError(f"{option}: {value} is out of range", hint=f"It must be from 1 to {most:,}.")


def within(options: PlanOptions, info: ModelInfo) -> PlanOptions:
    """Returns options whose sizes are set, within the model's context. Raises RequestError for larger ones."""
    context = min(CONTEXT, info.context_length) if options.context is None else options.context
    check_range("context", (context,), info.context_length)
    prompt = min(PROMPT, context) if options.prompt is None else options.prompt
    check_range("prompt", (prompt,), context)
    return replace(options, context=context, prompt=prompt, batches=tuple(sorted(set(options.batches))))
