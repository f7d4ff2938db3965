"""Deadlines beside first come, first served at the same load, and tenants' shares: in a simulator, and on this machine.

    python benchmarks/scheduling.py simulate [--requests 100000] [--json FILE]
    python benchmarks/scheduling.py serve BUNDLE [--seconds 60] [--json FILE]
    python benchmarks/scheduling.py page --json FILE --page benchmarks/notes/cpu.md

Load: bursts of five times the usual rate, 4 of 20 seconds; 85 % of requests are of class "chat", the others long ones
of class "batch" (``loads.bursts``). A chat is within its targets if its first token and its time per token
are both in time; goodput is how many of these there are a second. Who is refused isn't within.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from loads import Arrival, Served, bursts, by_tenant, greedy, simulate, summary

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.scheduler.step_times import StepSize
from enginewright.runtime.shared.errors import EnginewrightError, OverloadError

TARGETS = {"chat": (1.0, 0.04)}
RATES = {"usual": 4.0, "too much": 8.0}
ENGINE_TARGETS, ENGINE_RATE = {"chat": (0.5, 0.04)}, 4.5
FAIR_RATE, ENGINE_FAIR_RATE = 14.0, 24.0
BLOCKS, WARM_UP = 4096, 24
BEGIN, END = "<!-- table: benchmarks/scheduling.py -->", "<!-- end of table -->"

Schedulers = dict[str, Scheduling | None]


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulate", "serve", "page"])
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="where the figures go; those of the other part stay")
    parser.add_argument("--page", type=Path, help="whose table is made anew")
    options = parser.parse_args(arguments)
    results = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if options.what == "simulate":
        results["simulator"] = simulated(options.requests)
    elif options.what == "serve":
        results["engine"] = {"bundle": options.bundle.name, "threads": options.threads} | served(options)
    if options.json and options.what != "page":
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(table(results) if options.what == "page" else json.dumps(results, indent=1))
    return 0


def deadlines(ttft: float = 1.0, tpot: float = 0.04) -> Schedulers:
    """First come, first served, and with the classes' targets."""
    return {"fcfs": None, "deadlines": Scheduling(classes={"chat": {"ttft": ttft, "tpot": tpot}, "batch": {}})}


def shares() -> Schedulers:
    """First come, first served, and with equal shares of the tenants."""
    return {"fcfs": None, "fair": Scheduling(fair=True)}


def simulated(requests: int) -> dict[str, Any]:
    """Simulates two rates; and with one tenant that asks for much more than its share."""
    figures: dict[str, Any] = {"requests": requests}
    for name, rate in RATES.items():
        load = bursts(requests if name == "usual" else requests // 5, rate, seed=1)
        figures[name] = {"rate": rate} | {
            key: _timed(simulate, load, scheduling, targets=TARGETS) for key, scheduling in deadlines().items()
        }
    load = greedy(requests // 50, FAIR_RATE, seed=2)
    figures["tenants"] = {key: by_tenant(simulate(load, scheduling)) for key, scheduling in shares().items()}
    return figures


def _timed(run: Any, load: Sequence[Arrival], scheduling: Scheduling | None, targets: Mapping[str, Any]) -> Any:
    start = time.perf_counter()
    figures = summary(run(load, scheduling), targets)
    return figures | {"simulated_in": time.perf_counter() - start}


def served(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the policies on this machine, with a model's tokens and answers of the requested lengths."""
    load = bursts(int(options.seconds * ENGINE_RATE), ENGINE_RATE, seed=7)
    figures: dict[str, Any] = {"seconds": load[-1].at, "rate": ENGINE_RATE, "requests": len(load)}
    for name, scheduling in deadlines(*ENGINE_TARGETS["chat"]).items():
        run, costs = serve(options, load, scheduling)
        figures[name] = summary(run, ENGINE_TARGETS) | costs
    load = greedy(int(options.seconds / 3 * ENGINE_FAIR_RATE), ENGINE_FAIR_RATE, seed=4)
    figures["tenants"] = {name: by_tenant(serve(options, load, how)[0]) for name, how in shares().items()}
    return figures


def serve(
    options: argparse.Namespace, load: Sequence[Arrival], scheduling: Scheduling | None, prefill: int = 512
) -> tuple[list[Served], dict[str, float]]:
    """Requests come when they should; also how far steps were from what they were predicted to take."""
    bundle = Bundle.open(options.bundle)
    groups = [group.name for group in bundle.program("cpu").cache_groups]
    executor = CpuExecutor(bundle, dict.fromkeys(groups, BLOCKS), Placement(threads=options.threads))
    engine = Engine(executor, SchedulerConfig(prefill_tokens=prefill, scheduling=scheduling))
    rng = np.random.default_rng(0)
    for i in range(WARM_UP):  # the costs of steps are learned, too
        engine.add_request(_request(Arrival(0.0, 20 + 10 * i, 24, ""), None, rng))
        for _ in range(3):
            engine.step()
    while engine.has_work():
        engine.step()
    errors: list[float] = []
    of: dict[Request, Arrival] = {}
    outcomes: list[Served] = []
    arrivals = list(reversed(load))
    start = time.monotonic()
    while arrivals or engine.has_work():
        now = time.monotonic() - start
        while arrivals and arrivals[-1].at <= now:
            arrival = arrivals.pop()
            request = _request(arrival, scheduling, rng)
            request.queued = start + arrival.at
            try:
                engine.add_request(request)
                of[request] = arrival
            except EnginewrightError as e:
                retry = e.retry_after if isinstance(e, OverloadError) else None
                outcomes.append(Served(arrival, None, None, now, retry))
        if engine.has_work():
            for request in _step(engine, errors):
                if request.finished:
                    outcomes.append(_served(of.pop(request), request, time.monotonic() - start))
        else:
            time.sleep(max(0.0, arrivals[-1].at - now))
    executor.close()
    return outcomes, {"step_error_p50": median(errors)} if errors else {}


def _step(engine: Engine, errors: list[float]) -> list[Request]:
    """``Engine.step``; how far its time is from the predicted one goes to ``errors``."""
    times, begin = engine.scheduler.times, time.perf_counter()
    batch = engine.scheduler.schedule()
    expected = times.seconds(StepSize.from_chunks(batch.chunks)) if times.known else None
    pending = engine.executor.submit(batch.step)
    engine.scheduler.prepare_next(batch)
    advanced = engine.scheduler.commit(batch, pending.result())
    if expected is not None:
        errors.append(abs(expected / (time.perf_counter() - begin) - 1))
    return advanced


def _request(arrival: Arrival, scheduling: Scheduling | None, rng: np.random.Generator) -> Request:
    options: dict[str, Any] = {"tenant": arrival.tenant}
    if scheduling is not None and arrival.of_class in scheduling.classes:
        options["request_class"] = scheduling.class_named(arrival.of_class)
    params = SamplingParams(max_tokens=arrival.answer, ignore_eos=True)
    return Generation(rng.integers(10, 49000, arrival.prompt).tolist(), params, **options)


def _served(arrival: Arrival, request: Request, now: float) -> Served:
    metrics = request.to_output().metrics
    return Served(arrival, metrics.ttft, metrics.tpot, now)


def table(found: Mapping[str, Any]) -> str:
    """The page's tables."""
    parts = []
    if "simulator" in found:
        of = found["simulator"]
        usual, over = of["usual"], of["too much"]
        parts += [
            f"**Simulator**: {of['requests']:,} requests, {usual['rate']:g} a second on average.",
            "",
            *_rows(usual),
        ]
        parts += ["", f"**Simulator, too many requests**: {of['requests'] // 5:,}, {over['rate']:g} a second.", ""]
        parts += _rows(over)
    if "engine" in found:
        of = found["engine"]
        error = of["deadlines"]["step_error_p50"]
        parts += ["", f"**Engine**: {of['requests']} requests in {of['seconds']:.0f} s, {of['threads']} threads;"]
        parts += ["500 ms to the first token, and 40 ms for each further one."]
        parts += [f"Half of the steps were within {error:.0%} of the time predicted for them.", "", *_rows(of)]
    parts += [
        "",
        "**One greedy tenant** sends two of three requests, and three others the rest. Time to the first token:",
        "",
    ]
    parts += ["| | tenant | requests | fcfs: p50 | p99 | fair: p50 | p99 |", "| --- | --- |" + " ---: |" * 5]
    for name in [name for name in ("simulator", "engine") if name in found]:
        tenants = found[name]["tenants"]
        for tenant, fcfs in tenants["fcfs"].items():
            times = [f"{of[key]:.2f} s" for of in (fcfs, tenants["fair"][tenant]) for key in ("p50", "p99")]
            parts.append(f"| {name} | {tenant} | {fcfs['requests']:,} | {' | '.join(times)} |")
    return "\n".join(parts) + "\n"


HEADINGS = (
    "chats within both targets",
    "goodput",
    "refused",
    "first token: p50",
    "p99",
    "time per token: p50",
    "p99",
    "batch, end to end: p50",
    "tokens/s",
)


def _rows(of: Mapping[str, Any]) -> list[str]:
    rows = [f"| | {' | '.join(HEADINGS)} |", "| --- |" + " ---: |" * len(HEADINGS)]
    for name in ("fcfs", "deadlines"):
        chat, batch = of[name]["chat"], of[name]["batch"]
        cells = [f"{chat['within']:.1%}", f"{chat['goodput']:.2f}/s", f"{chat['refused']:.1%}"]
        cells += [f"{chat['ttft_p50']:.2f} s", f"{chat['ttft_p99']:.2f} s"]
        cells += [f"{chat['tpot_p50'] * 1e3:.1f} ms", f"{chat['tpot_p99'] * 1e3:.1f} ms"]
        cells += [f"{batch['end_to_end_p50']:.1f} s", f"{of[name]['tokens_per_second']:.0f}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    sys.exit(main())
