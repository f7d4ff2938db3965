"""Claims of papers and engines about serving, measured here; writes ``benchmarks/notes/claims.md``.

    python benchmarks/claims.py BUNDLE [--parts reservation batching ...] [--hf FOLDER] [--rounds 3] [--json FILE]
        [--page benchmarks/notes/claims.md]

- reservation: memory of the KV cache that is reserved and not used, with blocks of 32 tokens and with the whole context
  reserved for each request; and tokens a second of both in the same memory;
- batching: a trace of mixed lengths with requests that join and leave at every step, with batches that begin and end
  together in the same engine, and with transformers' padded batches (``--hf``, the model's folder);
- cache: what one more token costs at a length, with a KV cache and without;
- attention: time and memory of a prompt's attention in tiles, and with all scores written down by torch;
- formats: bytes, error and speed of KV caches (``--source``, the model to export);
- rounding: what 4 bits would do, with a Hadamard rotation and without, by torch (``--hf``).

Lengths are those of the default "chat" of ``optimize buckets``; all requests are there from the beginning. What was
measured before and isn't asked for now is taken from the file of ``--json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from claims_page import charts, page
from peers.agent import english
from peers.machine import commit, machine
from peers.workload import kl_divergence, memory

from enginewright import LLM, SamplingParams, export
from enginewright.optimizer.buckets.histogram import default_histogram
from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.native.step_profile import StepProfile
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.base import Pending
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.text.tokenizer import Tokenizer

CONTEXT = 4096
"""The context of a request whose context is reserved; prompts and answers have half of it at most, which cuts few of
them."""
BATCHED = 2048
"""The context of requests in batches, so that padded ones end some day."""
RESERVED = 6
"""Requests whose whole context fits into the memory of both."""
BLOCK = 32
BATCH = 16
LENGTHS = (64, 256, 1024, 4096)
LONG = (2048, 4096, 8000)
CACHES = ("f32", "bf16", "int8", "fp8")
STEPS = 16


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--hf", type=Path, help="the model as transformers reads it; without it that is left out")
    parser.add_argument("--source", type=Path, help="the model to export; without it cache formats are left out")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--page", type=Path, help="where the page goes; its charts lie beside it")
    parser.add_argument("--attention", nargs=2, metavar=("HOW", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.attention:
        seconds, size = ATTENTION[options.attention[0]](options, int(options.attention[1]))
        print(json.dumps({"seconds": seconds, "bytes": size}))
        return 0
    figures: dict[str, Any] = {}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text(encoding="utf-8"))
    for name in options.parts:
        start = time.perf_counter()
        if (part := PARTS[name](options)) is not None:
            figures[name] = part
            print(f"{name}: {time.perf_counter() - start:.0f} s\n{json.dumps(part, indent=1)}", flush=True)
    if set(options.parts) - UNTIMED:
        figures |= {"rounds": options.rounds, "machine": machine(), "commit": commit()}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.page:
        options.page.write_text(page(figures), encoding="utf-8")
        for name, drawing in charts(figures).items():
            options.page.with_name(name).write_text(drawing, encoding="utf-8")
    return 0


def load(requests: int, seed: int, vocabulary: int, context: int) -> list[tuple[list[int], int]]:
    """Prompts of random tokens, and how many tokens each answer has."""
    rng = np.random.default_rng(seed)
    counts = np.array(default_histogram("chat", context // 2 - 1).counts)
    lengths = np.repeat(counts[:, 0], counts[:, 1])
    middles = ((2 * np.arange(requests) + 1) * len(lengths)) // (2 * requests)
    spread = lengths[middles]  # the whole distribution, each time
    prompts, answers = rng.permutation(spread), rng.permutation(spread)
    return [(rng.integers(10, vocabulary, n).tolist(), int(m)) for n, m in zip(prompts, answers, strict=True)]


def reservation(options: argparse.Namespace) -> dict[str, Any]:
    """Waste and tokens a second, with blocks and with reserved contexts, round by round in turn."""
    rounds: dict[str, list[dict[str, float]]] = {"blocks": [], "contexts": []}
    work = load(options.requests, 0, Bundle.open(options.bundle).model.vocab_size, CONTEXT)
    for _ in range(options.rounds):
        for name, most in (("blocks", 64), ("contexts", RESERVED)):
            rounds[name].append(serve(options, work, most, contiguous=name == "contexts"))
    figures = medians(rounds, "blocks", "contexts")
    figures["mean_prompt"] = sum(len(prompt) for prompt, _ in work) / len(work)
    figures["mean_answer"] = sum(answer for _, answer in work) / len(work)
    figures |= {"requests": options.requests, "memory_tokens": RESERVED * CONTEXT, "context": CONTEXT}
    return figures


def medians(rounds: dict[str, list[dict[str, float]]], ours: str, other: str) -> dict[str, Any]:
    """Gives the median of each figure, and of the ratio of tokens a second in one round."""
    middles: dict[str, Any] = {name: {key: median(r[key] for r in of) for key in of[0]} for name, of in rounds.items()}
    pairs = zip(rounds[ours], rounds[other], strict=True)
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
    return middles | {"speedup": median(ratios), "speedup_least": min(ratios), "speedup_most": max(ratios)}


class Counted(CpuExecutor):
    """Counts, while each step runs, tokens that blocks hold, those of the step among them, and blocks that are held."""

    def count(self, engine: Engine) -> None:
        self._engine, self.used, self.held, self.steps, self.running = engine, 0, 0, 0, 0

    def submit(self, step: StepInput) -> Pending:
        running = self._engine.scheduler.running
        self.used += sum(request.computed for request in running) + len(step.ids)
        self.held += sum(pool.total_blocks - pool.free_blocks for pool in self._engine.pools.values()) * BLOCK
        self.steps, self.running = self.steps + 1, self.running + len(running)
        return super().submit(step)


def serve(
    options: argparse.Namespace, work: Sequence[tuple[list[int], int]], most: int, *, contiguous: bool
) -> dict[str, float]:
    """All requests, ``most`` at a time at most."""
    bundle = Bundle.open(options.bundle)
    groups = [group.name for group in bundle.program("cpu").cache_groups]
    blocks = dict.fromkeys(groups, RESERVED * CONTEXT // BLOCK)
    executor = Counted(bundle, blocks, Placement(threads=options.threads))
    engine = Engine(executor, SchedulerConfig(max_requests=most))
    executor.count(engine)
    seconds = finished(engine, work)
    executor.close()
    reserved = executor.running * CONTEXT if contiguous else executor.held
    return {
        "tokens_per_second": sum(answer for _, answer in work) / seconds,
        "seconds": seconds,
        "waste": 1 - executor.used / reserved,
        "mean_running": executor.running / executor.steps,
        "mean_tokens": executor.used / max(executor.running, 1),
        "preemptions": float(engine.preemptions),
    }


def finished(engine: Engine, work: Sequence[tuple[list[int], int]]) -> float:
    """Seconds until all of these requests have ended."""
    start = time.perf_counter()
    for prompt, answer in work:
        engine.add_request(Generation(prompt, SamplingParams(max_tokens=answer, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    return time.perf_counter() - start


def batching(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of a trace: requests that join and leave, batches that begin and end together, transformers'."""
    bundle = Bundle.open(options.bundle)
    work = load(options.requests // 2, 1, bundle.model.vocab_size, BATCHED)
    groups = [group.name for group in bundle.program("cpu").cache_groups]
    executor = CpuExecutor(bundle, dict.fromkeys(groups, BATCH * BATCHED // BLOCK), Placement(threads=options.threads))
    rounds: dict[str, list[dict[str, float]]] = {"continuous": [], "static": []}
    tokens = sum(answer for _, answer in work)
    for _ in range(options.rounds):
        together = finished(Engine(executor, SchedulerConfig(max_requests=BATCH)), work)
        rounds["continuous"].append({"tokens_per_second": tokens / together})
        engine = Engine(executor, SchedulerConfig(max_requests=BATCH))
        apart = sum(finished(engine, work[at : at + BATCH]) for at in range(0, len(work), BATCH))
        rounds["static"].append({"tokens_per_second": tokens / apart})
    executor.close()
    figures = medians(rounds, "continuous", "static") | {"requests": len(work), "batch": BATCH}
    figures |= {"mean_answer": tokens / len(work), "longest_answer": max(answer for _, answer in work)}
    if options.hf:
        figures["transformers"] = {"tokens_per_second": padded(options, work), "dtype": "bf16"}
    return figures


def padded(options: argparse.Namespace, work: Sequence[tuple[list[int], int]]) -> float:
    """Tokens that were asked for a second, by transformers: each batch runs until its longest answer ends."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.hf, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    start = time.perf_counter()
    for at in range(0, len(work), BATCH):
        batch = work[at : at + BATCH]
        most = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (most - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        with torch.no_grad():
            new = max(answer for _, answer in batch)
            model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return sum(answer for _, answer in work) / (time.perf_counter() - start)


def cache(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one more token behind so many: with a KV cache, and by computing all of them again."""
    times: dict[str, Any] = {}
    for length in LENGTHS:
        engine, executor = prompted(Bundle.open(options.bundle), options.threads, 1, length)
        without, with_cache = [], []
        for _ in range(options.rounds):
            without.append(timed(engine.step))
            with_cache.append(median(timed(engine.step) for _ in range(STEPS)))
            request = engine.scheduler.running[0]
            engine.abort_all()
            engine.add_request(Generation(request.tokens[:length], request.params))
        executor.close()
        times[str(length)] = {"with": 1e3 * median(with_cache), "without": 1e3 * median(without)}
    return times


def behind(bundle: Bundle, threads: int, length: int) -> float:
    """Seconds of a step of 8 requests that decode behind so many tokens."""
    engine, executor = prompted(bundle, threads, 8, length)
    while any(request.output_length < 2 for request in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    seconds = median(timed(engine.step) for _ in range(STEPS))
    executor.close()
    return seconds


def prompted(bundle: Bundle, threads: int, requests: int, length: int) -> tuple[Engine, CpuExecutor]:
    """An engine with requests whose prompts have so many tokens, and its executor."""
    groups = [group.name for group in bundle.program("cpu").cache_groups]
    blocks = requests * ((length + 8 * STEPS) // BLOCK + 1)
    executor = CpuExecutor(bundle, dict.fromkeys(groups, blocks), Placement(threads=threads))
    engine = Engine(executor, SchedulerConfig(prefill_tokens=8192))
    rng, params = np.random.default_rng(length), SamplingParams(max_tokens=6 * STEPS, ignore_eos=True)
    for _ in range(requests):
        engine.add_request(Generation(rng.integers(10, bundle.model.vocab_size, length).tolist(), params))
    return engine, executor


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def attention(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of all layers' attention over a prompt: our kernels in a prompt's step, and torch with scores
    [heads, T, T] written down. Bytes are what a process of its own has at most beyond what it had before."""
    figures: dict[str, Any] = {}
    for length in LONG:
        for name in ATTENTION:
            command = [sys.executable, __file__, str(options.bundle), "--threads", str(options.threads)]
            command += ["--attention", name, str(length)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures.setdefault(str(length), {})[name] = json.loads(done.stdout.splitlines()[-1])
    return figures


def tiles(options: argparse.Namespace, length: int) -> tuple[float, int]:
    """Measures our attention; see ``attention``. Memory is that of the prompt's step, with its KV cache and
    activations.
    """
    bundle = Bundle.open(options.bundle)
    groups = [group.name for group in bundle.program("cpu").cache_groups]
    executor = CpuExecutor(bundle, dict.fromkeys(groups, length // BLOCK + 1), Placement(threads=options.threads))
    engine = Engine(executor, SchedulerConfig(prefill_tokens=8192))
    engine.add_request(Generation([7] * 64, SamplingParams(max_tokens=1)))
    engine.step()
    before = memory("VmHWM")
    executor.profile = profile = StepProfile()
    prompt = np.random.default_rng(0).integers(10, bundle.model.vocab_size, length).tolist()
    engine.add_request(Generation(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    return sum(step.seconds for step in profile.by_op() if "attention" in step.key), memory("VmHWM") - before


def scores(options: argparse.Namespace, length: int) -> tuple[float, int]:
    """Measures attention with all scores in memory, by torch; see ``attention``. One layer is timed for each of the
    model's.
    """
    import torch

    torch.set_num_threads(options.threads)
    program = Bundle.open(options.bundle).program("cpu")
    (group,) = program.cache_groups
    step = next(step for step in program.steps if step.op == "paged_attention")
    heads = int(str(step.inputs[0].shape[-2]))
    q = torch.randn(heads, length, group.key_head_size)
    k, v = (torch.randn(heads, length, group.key_head_size) for _ in range(2))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    before = memory("VmHWM")

    def run() -> None:
        weights = (q @ k.transpose(1, 2) * group.key_head_size**-0.5).masked_fill_(~mask, float("-inf"))
        torch.softmax(weights, -1) @ v

    with torch.no_grad():
        seconds = min(timed(run) for _ in range(2))
    return seconds * len(group.layers), memory("VmHWM") - before


ATTENTION = {"tiles": tiles, "scores": scores}


def formats(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measures each KV format with the same weights: bytes a token, KL from float32's, and speed behind 2,000
    tokens."""
    if not options.source:
        return None
    figures: dict[str, Any] = {}
    exact, ids = None, ids_of_text(options)
    with tempfile.TemporaryDirectory() as folder:
        for kind in CACHES:
            path = Path(folder) / f"{kind}.bundle"
            export(options.source, path, recipe="int8", kv_cache=kind, targets=["cpu"])
            with LLM(path, threads=options.threads, memory="1GiB", prefix_cache=False) as llm:
                logits = llm.logits(ids)
                exact = logits if exact is None else exact
                info = llm.info()
            milliseconds = 1e3 * behind(Bundle.open(path), options.threads, 2000)
            figures[kind] = {
                "bytes_per_token": info["kv_cache_bytes"] / info["kv_cache_tokens"],
                "kl": kl_divergence(exact, logits),
                "top_1": float((exact.argmax(1) == logits.argmax(1)).mean()),
                "step_milliseconds": milliseconds,
            }
    return figures


def rounding(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measures the rounding of keys and values by ``kv_rounding``; None without --hf."""
    if not options.hf:
        return None
    from kv_rounding import rounded

    return rounded(options.hf, ids_of_text(options), options.threads)


def ids_of_text(options: argparse.Namespace) -> list[int]:
    """1,500 tokens of English at most."""
    return Tokenizer(Bundle.open(options.bundle).tokenizer_files()).encode(english()[:8000])[:1500]


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any] | None]] = {
    "reservation": reservation,
    "batching": batching,
    "cache": cache,
    "attention": attention,
    "formats": formats,
    "rounding": rounding,
}
UNTIMED = {"rounding"}
"""Parts whose figures are of no machine."""


if __name__ == "__main__":
    sys.exit(main())
