"""The tvm target beside the cpu target and transformers' eager: prefill and decode steps of a bundle.

    python benchmarks/tvm_target.py BUNDLE MODEL RESULT.json [--ours BUNDLE]

BUNDLE has the targets cpu and tvm, and that of --ours the same with our kernels in the recipe's [tvm]. MODEL is their
source, a GGUF or a folder, which transformers runs in 32-bit floats. Rounds go round the engines, so that what else the
machine does falls on all of them; the best round of each counts. A step is the executor's alone: no scheduler, no
sampling. A bundle's distances from its source are its report's. RESULT.json keeps the results of other recipes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from enginewright.optimizer.report.document import REPORT_PATH
from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.tvm.serve.executor import TvmExecutor
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.contracts import CacheGroup, StepInput

PAST, PROMPT, BATCHES, BLOCKS = 128, 512, (1, 8, 16), 512
ROUND = 0.25
PAUSE = 1.0
"""Seconds after which the threads of the engine before sleep."""
EAGER, OURS = "transformers eager", "tvm, our kernels"


def step_of(groups: Sequence[CacheGroup], past: int, new: int, requests: int, vocabulary: int) -> StepInput:
    """A step of ``requests`` with ``past`` tokens each and ``new`` ones."""
    ids = np.random.default_rng(0).integers(0, vocabulary, requests * new).astype(np.int32)
    positions = np.tile(np.arange(past, past + new, dtype=np.int32), requests)
    width = -(-(past + new) // 32)
    table = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
    rows = np.repeat(np.arange(requests), new)
    slots = (table[rows, positions // 32] * 32 + positions % 32).astype(np.int32)
    starts = np.arange(requests + 1, dtype=np.int32) * new
    return StepInput(
        ids=ids,
        positions=positions,
        q_start=starts,
        kv_len=np.full(requests, past + new, np.int32),
        block_table={g.name: table for g in groups},
        slots={g.name: slots for g in groups},
        rows=(starts[1:] - 1).astype(np.int32),
        outputs=("logits",),
    )


def eager(model: Any, past: int, new: int, requests: int, vocabulary: int) -> Callable[[], object]:
    """A function that runs the same step in transformers, whose cache is cropped after each step."""
    ids = torch.randint(0, vocabulary, (requests, new))
    if past == 0:
        return lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache = model(input_ids=torch.randint(0, vocabulary, (requests, past)), use_cache=True).past_key_values

    def run() -> None:
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.crop(-new)

    return run


def measure(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of a step, the best round of each; a round is as many steps as take ``ROUND`` seconds, or one."""
    best = dict.fromkeys(runs, float("inf"))
    steps = {}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        steps[name] = max(1, round(ROUND / (time.perf_counter() - start)))
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            run()
            start = time.perf_counter()
            for _ in range(steps[name]):
                run()
            best[name] = min(best[name], (time.perf_counter() - start) / steps[name])
    return best


def load_eager(source: Path) -> Any:
    of_file = {"gguf_file": source.name} if source.is_file() else {}
    folder = str(source.parent if source.is_file() else source)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **of_file
    ).eval()


def distances(bundle: Path) -> dict[str, float]:
    """Target -> mean KL from the source on random tokens, when it was exported."""
    report = json.loads((bundle / REPORT_PATH).read_text())
    return {entry["target"]: entry["random_tokens"]["kl_mean"] for entry in report["verification"]}


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("bundle", "source", "result"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    bundle, model = Bundle.open(options.bundle, trust="code"), load_eager(options.source)
    blocks = {group.name: BLOCKS for group in bundle.program("cpu").cache_groups}
    executors: dict[str, CpuExecutor | TvmExecutor] = {
        "cpu": CpuExecutor(bundle, blocks, Placement(threads=options.threads)),
        "tvm": TvmExecutor(bundle, blocks, threads=options.threads),
    }
    kl = distances(options.bundle)
    if options.ours is not None:
        executors[OURS] = TvmExecutor(Bundle.open(options.ours, trust="code"), blocks, threads=options.threads)
        kl[OURS] = distances(options.ours)["tvm"]
    vocabulary = bundle.model.vocab_size
    cases = {f"prefill {PROMPT}": (0, PROMPT, 1), **{f"decode {batch}": (PAST, 1, batch) for batch in BATCHES}}
    seconds = {}
    for name, (past, new, requests) in cases.items():
        runs: dict[str, Callable[[], object]] = {EAGER: eager(model, past, new, requests, vocabulary)}
        for target, executor in executors.items():
            step = step_of(executor.cache_groups, past, new, requests, vocabulary)
            runs[target] = lambda executor=executor, step=step: executor.submit(step).result()
        seconds[name] = measure(runs, options.rounds)
        print(name, {run: f"{1000 * s:.1f} ms" for run, s in seconds[name].items()}, flush=True)
    about = {target: executor.describe() for target, executor in executors.items()}
    result = {"rounds": options.rounds, "past": PAST, "engines": about, "kl": kl, "seconds": seconds}
    results = json.loads(options.result.read_text()) if options.result.exists() else {}
    results[bundle.manifest.recipe["name"]] = result
    options.result.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
