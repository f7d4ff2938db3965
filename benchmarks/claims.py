"""What papers claim of serving, measured here beside it; ``docs/inside/claims.md`` and its charts are made of it.

    python benchmarks/claims.py BUNDLE [--rounds 3] [--json FILE] [--page docs/inside/claims.md]

reservation: memory of the KV cache that is reserved and not used, with blocks of 32 tokens and with the whole context
reserved for each request; and tokens a second of both in the same memory. The load: prompts as the default "chat" of
``optimize buckets`` has them, and answers of the same lengths, all there from the beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from enginewright.optimizer.buckets.histogram import default_histogram
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine import Engine
from enginewright.runtime.executors.cpu_blocks import CpuExecutor
from enginewright.runtime.requests.request import Request
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.continuous import SchedulerConfig

CONTEXT = 2048
RESERVED = 6
"""Requests whose whole context fits into the memory of both."""
BLOCK = 32
WIDTH, BAR, LABEL = 760, 20, 230


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--page", type=Path, help="where the page goes; its charts lie beside it")
    options = parser.parse_args(arguments)
    figures = {"reservation": reservation(options)}
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"workload": sys.argv[1:], **figures}, indent=1) + "\n")
    if options.page:
        options.page.write_text(page(figures, options), encoding="utf-8")
        options.page.with_name("claims-reservation.svg").write_text(waste_chart(figures["reservation"]))
    return 0


def load(requests: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts of random tokens, and how many tokens each answer has."""
    rng = np.random.default_rng(seed)
    counts = np.array(default_histogram("chat", CONTEXT // 2 - 1).counts)
    lengths = np.repeat(counts[:, 0], counts[:, 1])
    spread = lengths[(np.arange(requests) * len(lengths)) // requests]  # the whole distribution, each time
    prompts, answers = rng.permutation(spread), rng.permutation(spread)
    return [(rng.integers(10, 49000, n).tolist(), int(m)) for n, m in zip(prompts, answers, strict=True)]


def reservation(options: argparse.Namespace) -> dict[str, Any]:
    """Waste and tokens a second, with blocks and with reserved contexts, round by round in turn."""
    rounds: dict[str, list[dict[str, float]]] = {"blocks": [], "contexts": []}
    work = load(options.requests, 0)
    for _ in range(options.rounds):
        for name, most in (("blocks", 64), ("contexts", RESERVED)):
            rounds[name].append(serve(options, work, most, contiguous=name == "contexts"))
    found: dict[str, Any] = {name: {key: median(r[key] for r in of) for key in of[0]} for name, of in rounds.items()}
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(*rounds.values(), strict=True)]
    found |= {"speedup": median(ratios), "speedup_least": min(ratios), "speedup_most": max(ratios)}
    found["mean_prompt"] = sum(len(prompt) for prompt, _ in work) / len(work)
    found["mean_answer"] = sum(answer for _, answer in work) / len(work)
    found |= {"requests": options.requests, "memory_tokens": RESERVED * CONTEXT, "context": CONTEXT}
    return found


def serve(
    options: argparse.Namespace, work: Sequence[tuple[list[int], int]], most: int, *, contiguous: bool
) -> dict[str, float]:
    """All requests, ``most`` at a time at most."""
    bundle = Bundle.open(options.bundle)
    groups = [group.name for group in bundle.program("cpu").cache_groups]
    executor = CpuExecutor(bundle, dict.fromkeys(groups, RESERVED * CONTEXT // BLOCK), threads=options.threads)
    engine = Engine(executor, SchedulerConfig(max_requests=most))
    for prompt, answer in work:
        engine.add_request(Request(prompt, SamplingParams(max_tokens=answer, ignore_eos=True)))
    reserved = used = steps = running = 0
    start = time.perf_counter()
    while engine.has_work():
        engine.step()
        requests = engine.scheduler.running
        steps, running = steps + 1, running + len(requests)
        used += sum(request.computed for request in requests)
        if contiguous:
            reserved += len(requests) * CONTEXT
        else:
            reserved += sum(pool.total_blocks - pool.free_blocks for pool in engine.pools.values()) * BLOCK
    seconds = time.perf_counter() - start
    executor.close()
    return {
        "tokens_per_second": sum(answer for _, answer in work) / seconds,
        "seconds": seconds,
        "waste": 1 - used / reserved,
        "mean_running": running / steps,
        "mean_tokens": used / max(running, 1),
        "preemptions": float(engine.preemptions),
    }


def page(figures: Mapping[str, Any], options: argparse.Namespace) -> str:
    """docs/inside/claims.md."""
    found = figures["reservation"]
    blocks, contexts = found["blocks"], found["contexts"]
    prompt, answer, held = (f"{n:.0f}" for n in (found["mean_prompt"], found["mean_answer"], blocks["mean_tokens"]))
    speedup, least, most = (f"{found[key]:.2f}" for key in ("speedup", "speedup_least", "speedup_most"))
    return f"""# Claims, measured

What papers claim of serving language models, beside what was measured here: `python benchmarks/claims.py BUNDLE --page
docs/inside/claims.md` makes this page. SmolLM2-135M in int8, two cores, medians of {options.rounds} rounds in turn.

## Memory that is reserved and not used

PagedAttention (SOSP 2023): systems that reserve a request's context use 20 to 40 % of their KV cache; with blocks
less than 4 % is waste, and the same memory serves 2 to 4 times as much.

![Waste](claims-reservation.svg)

| | blocks of {BLOCK} | contexts of {found["context"]:,} |
| --- | --- | --- |
| reserved and not used, over all steps | {blocks["waste"]:.1%} | {contexts["waste"]:.1%} |
| requests that run, on average | {blocks["mean_running"]:.1f} | {contexts["mean_running"]:.1f} |
| tokens a second | {blocks["tokens_per_second"]:,.0f} | {contexts["tokens_per_second"]:,.0f} |

{found["requests"]} requests, all there from the beginning, in memory for {found["memory_tokens"]:,} tokens. Prompts
have {prompt} tokens on average and answers {answer} (the default "chat" of `optimize buckets`, for both), so a running
request holds {held} on average, and half a block of it is empty. Requests with reserved contexts run in the same
engine, {RESERVED} at a time: what differs is the memory alone. Blocks give **{speedup} times** the tokens
a second ({least} to {most}). The 2 to 4 times are of GPUs, on which a step of sixty requests takes about as long as
one of six; on two cores it takes longer.
"""


def waste_chart(found: Mapping[str, Any]) -> str:
    """Bars of waste as SVG, with a line at the 4 % that is claimed."""
    rows = [(f"blocks of {BLOCK} tokens", found["blocks"]["waste"])]
    rows.append((f"contexts of {found['context']:,} tokens", found["contexts"]["waste"]))
    scale, parts = WIDTH - LABEL - 80, []
    for i, (name, waste) in enumerate(rows):
        y = 10 + i * (BAR + 10)
        parts.append(f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{waste * scale:.1f}" height="{BAR}" fill="#1b7f5c"/>')
        parts.append(f'<text x="{LABEL + waste * scale + 6:.1f}" y="{y + 14}">{waste:.1%}</text>')
    x, height = LABEL + 0.04 * scale, 10 + len(rows) * (BAR + 10)
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height}" stroke="#8c959f" stroke-dasharray="3 3"/>')
    parts.append(f'<text x="{x + 4:.1f}" y="{height + 14}">4 % (claimed for blocks)</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height + 24}" font-family="sans-serif" '
    return "\n".join([head + 'font-size="12" fill="#57606a">', *parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
