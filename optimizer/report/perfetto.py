"""Records a trace of a prompt and decode steps, in the Trace Event Format that Perfetto and chrome://tracing open.

The format: "Trace Event Format", Google, 2016; times are in microseconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.optimizer.shared.files import write_output
from enginewright.optimizer.shared.storage import layer_of
from enginewright.plugins.cpu.compile.step_runner import open_ranks
from enginewright.plugins.native.step_profile import StepProfile
from enginewright.plugins.steps.timed_steps import random_step
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.lowered_program import LoweredProgram, Operand, Step
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

UI = "https://ui.perfetto.dev"
_MOST_TOKENS = 8192
_PROCESS, _THREAD = 1, 1

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A trace of a program's steps.

    Attributes:
        document: the trace in the file's format.
        steps: the number of steps of the model.
        seconds: the time from the start of the first step to the end of the last.
        slices: the number of traced steps of the program.
    """

    document: dict[str, Any]
    steps: int
    seconds: float
    slices: int

    def write(self, path: Path) -> None:
        """Writes the trace to a file. Raises BundleError if it can't be written."""
        write_output(path, json.dumps(self.document, separators=(",", ":")))


class _Times(StepProfile):
    """The times of the program's steps, for each run."""

    def __init__(self) -> None:
        super().__init__()
        self.each: list[tuple[LoweredProgram, list[float], float]] = []

    def add(
        self, lowered: LoweredProgram, sizes: StepSizes, seconds: npt.NDArray[np.float64], whole: float | None = None
    ) -> None:
        kernels = float(seconds.sum())
        self.each.append((lowered, [float(s) for s in seconds], max(kernels, whole or 0.0)))


def trace(
    bundle: Bundle,
    *,
    prompt: int = 64,
    decode: int = 8,
    batch: int = 1,
    threads: int = 0,
    partition: Partition = Partition(),
    progress: Progress = silent,
) -> Trace:
    """Runs a prompt of random tokens and decode steps, each once untraced before, and times every step of the program.

    Args:
        bundle: a bundle whose target cpu is ready.
        prompt: tokens of each request's prompt.
        decode: decode steps after the prompt, with one token of each request.
        batch: the number of requests.
        threads: threads of the kernels; 0 for one per core.
        partition: the ranks that run the model. The trace has the steps of rank 0, and its waiting times.
        progress: called with the stage "trace".

    Raises:
        RequestError: a size is out of range, or longer than the bundle's context.
        BundleError, CapacityError: as for a program that is opened to be served.
    """
    _check(bundle, prompt, decode, batch)
    plan = [(f"prompt of {prompt}", StepSizes((prompt,) * batch, (prompt,) * batch))]
    plan += [(f"decode {i + 1}", StepSizes((1,) * batch, (prompt + i + 1,) * batch)) for i in range(decode)]
    executor = open_ranks(bundle, [sizes for _, sizes in plan], threads=threads, partition=partition)
    with contextlib.closing(executor):
        groups = executor.cache_groups
        for _, sizes in plan[:2]:  # weights come into memory, results find their places
            executor.submit(random_step(groups, bundle.model.vocab_size, sizes, ports=executor.caps.ports)).result()
        executor.profile = times = _Times()
        for done, (name, sizes) in enumerate(plan):
            progress(ProgressEvent("trace", done, len(plan), name))
            executor.submit(random_step(groups, bundle.model.vocab_size, sizes, ports=executor.caps.ports)).result()
        program = executor.program
    progress(ProgressEvent("trace", len(plan), len(plan)))
    events: list[Event] = []
    start = 0.0
    for (name, sizes), (lowered, seconds, whole) in zip(plan, times.each, strict=True):
        events += step_events(lowered, sizes, name, start, seconds)
        start += whole
    of_rank = "" if partition.ranks == 1 else f", rank 0 of {partition}"
    title = f"{bundle.model.name} ({program.isa}, {program.threads} threads{of_rank})"
    names: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": title}},
        {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": _THREAD, "args": {"name": "steps of the program"}},
    ]
    other = {
        "model": bundle.model.name,
        "recipe": str(bundle.manifest.recipe.get("name", "")),
        "isa": program.isa,
        "threads": program.threads,
        "partition": str(partition),
        "requests": batch,
    }
    document = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": names + events}
    return Trace(document, len(plan), start, sum(len(seconds) for _, seconds, _ in times.each))


def step_events(
    program: LoweredProgram, sizes: StepSizes, name: str, start: float, seconds: Sequence[float]
) -> list[Event]:
    """Returns a step of the model as nested slices: the step, its layers, and the steps of the program.

    Args:
        program: the program that ran.
        sizes: the sizes of the step.
        name: the name of the outermost slice.
        start: the start of the step, in seconds.
        seconds: the seconds of each step of the program.
    """
    costs = step_costs(program, sizes)
    inner: list[Event] = []
    layers: list[tuple[int | None, float, float]] = []  # layer, begin, end
    at = start
    for step, cost, took in zip(program.steps, costs, seconds, strict=True):
        layer = layer_of(step.where.partition(" + ")[0])
        if layers and layers[-1][0] == layer:
            layers[-1] = (layer, layers[-1][1], at + took)
        else:
            layers.append((layer, at, at + took))
        inner.append(_slice(step.op, at, took, _arguments(step, sizes, cost, took)))
        if took > 0:
            inner.append(_counter("memory, GB/s", at, cost.memory / took / 1e9))
            inner.append(_counter("products, G multiply-adds/s", at, cost.multiply_adds / took / 1e9))
        at += took
    total = sum(costs, StepCost())
    arguments = {"tokens": sum(sizes.lengths), "requests": len(sizes.lengths), "context": max(sizes.contexts)}
    outer = [_slice(name, start, at - start, arguments | _figures(total, at - start))]
    outer += [_slice(f"layer {layer}", a, b - a, {"layer": layer}) for layer, a, b in layers if layer is not None]
    ends = [_counter("memory, GB/s", at, 0.0), _counter("products, G multiply-adds/s", at, 0.0)]
    return outer + inner + ends


def _slice(name: str, start: float, seconds: float, arguments: dict[str, Any]) -> Event:
    begin, end = _microseconds(start), _microseconds(start + seconds)
    return {
        "ph": "X",
        "name": name,
        "cat": "step",
        "pid": _PROCESS,
        "tid": _THREAD,
        "ts": begin,
        "dur": round(end - begin, 3),  # ends are rounded, not lengths: a slice stays inside the one around it
        "args": arguments,
    }


def _counter(name: str, at: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": _microseconds(at), "args": {"value": round(value, 3)}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _arguments(step: Step, sizes: StepSizes, cost: StepCost, seconds: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"module": step.where}
    arguments["inputs"] = ", ".join(_shape(o, sizes) for o in step.inputs)
    arguments["outputs"] = ", ".join(_shape(o, sizes) for o in step.outputs)
    arguments |= {f"attribute {key}": value for key, value in step.attrs.items()}
    return arguments | _figures(cost, seconds)


def _figures(cost: StepCost, seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "bytes of weights": cost.weights,
        "bytes of KV cache read": cost.kv_read,
        "bytes of KV cache written": cost.kv_written,
        "bytes of activations": cost.activations_read + cost.activations_written,
    }
    figures |= {f"{kind} multiply-adds": n for kind, n in cost.products.items()}
    if seconds > 0:
        figures["GB/s of weights and KV cache"] = round(cost.memory / seconds / 1e9, 3)
    return figures


def _shape(operand: Operand, sizes: StepSizes) -> str:
    if operand.kind == "cache":
        return f"cache {operand.name}"
    shape = "x".join(str(sizes.at(n)) for n in operand.shape)
    name = f"{operand.name} " if operand.kind != "buffer" else ""
    return f"{name}{operand.dtype} {shape}"


def _check(bundle: Bundle, prompt: int, decode: int, batch: int) -> None:
    for name, value, least in (("prompt_tokens", prompt, 1), ("decode", decode, 0), ("batch", batch, 1)):
        if value < least:
            raise RequestError(f"{name}: {value} is out of range", hint=f"It must be {least} or more.")
    if prompt + decode > (most := bundle.model.context_length):
        raise RequestError(
            f"a prompt of {prompt:,} tokens and {decode:,} decode steps are longer than the bundle's {most:,} tokens",
            hint="Trace fewer of them.",
        )
    if prompt * batch > _MOST_TOKENS:
        raise RequestError(
            f"{batch:,} prompts of {prompt:,} tokens are more than the {_MOST_TOKENS:,} tokens of a step",
            hint="Trace shorter prompts, or a smaller batch.",
        )
