"""Two models at the same time on a thread each: the draft guesses on while the target checks its guesses.

    python benchmarks/draft_beside_target.py TARGET DRAFT [--rounds 5] [--json FILE]

The draft goes on as if all that is being checked were right, and what doesn't follow is thrown away (a simple form of
"Mirror Speculative Decoding", Bhendawade et al. 2025, which has two devices). Against it: both alternating, with all
threads each, as ``LLM(speculate=BUNDLE)`` has it, and plain decoding. One greedy text, drafts of each length.
All tokens must be the same. Before that, what steps take: with all threads, with one, and with one beside the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peers.machine import commit, machine

from enginewright import LLM
from enginewright.optimizer.bench.speculation import TASKS
from enginewright.optimizer.report.step_runner import StepRunner
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.requests.logit_rules import PLAIN, sampling_batch
from enginewright.runtime.scheduler.row_costs import ROWS
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.step_costs import StepSizes

TOKENS, LONGEST = 128, 6
"""Of the text, and of a draft."""
CONTEXT, STEPS = 256, 25
"""Of the steps that are timed on their own, and how many: the median counts."""


def drawn(step: StepInput) -> StepInput:
    """With the most likely token drawn behind every row."""
    step.rows, step.sampling = np.arange(len(step.ids), dtype=np.int32), sampling_batch([PLAIN] * len(step.ids))
    return step


class Decoder:
    """One text of one model, as its program runs it.

    Attributes:
        tokens: the last one isn't computed, but for guesses.
    """

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self._runner = StepRunner(bundle, [StepSizes((1,), (1024,))], threads=threads)

    def after(self, tokens: Sequence[int], computed: int) -> list[int]:
        """What follows each token from ``computed`` on; those before are in the cache."""
        count = len(tokens) - computed
        step = drawn(self._runner.step(StepSizes((count,), (len(tokens),))))
        step.ids = np.array(tokens[computed:], np.int32)
        output = self._runner.program.run(step).tokens
        assert output is not None
        found: list[int] = output.tolist()
        return found


class Guessing:
    """A draft's text: what is known, and guesses behind it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._computed, self.tokens = decoder, 0, list[int]()

    def known(self, tokens: Sequence[int]) -> int:
        """These are right; guesses stay as far as they agree. How many there are still."""
        same = next((i for i, pair in enumerate(zip(self.tokens, tokens)) if pair[0] != pair[1]), None)  # noqa: B905
        if same is not None or len(self.tokens) < len(tokens):
            self._computed = min(self._computed, len(tokens) - 1 if same is None else same)
            self.tokens = list(tokens)
        return len(self.tokens) - len(tokens)

    def guess(self) -> None:
        """One more."""
        token = self._decoder.after(self.tokens, self._computed)[-1]
        self._computed = len(self.tokens)
        self.tokens.append(token)


def agreed(tokens: list[int], guesses: Sequence[int], found: Sequence[int]) -> None:
    """Adds what the target found, as far as guesses led to it."""
    for at, token in enumerate(found):
        tokens.append(token)
        if at == len(guesses) or token != guesses[at]:
            break


def alternating(target: Decoder, draft: Decoder, prompt: list[int], length: int) -> tuple[list[int], float]:
    """A text, and seconds; drafts of ``length`` tokens, or none."""
    guessing, tokens = Guessing(draft), [*prompt, target.after(prompt, 0)[-1]]
    guessing.known(prompt)
    guessing.guess()
    began = time.perf_counter()
    while len(tokens) < len(prompt) + TOKENS:
        if length:
            have = guessing.known(tokens)
            for _ in range(length - have):
                guessing.guess()
        guesses = guessing.tokens[len(tokens) :] if length else []
        agreed(tokens, guesses, target.after([*tokens, *guesses], len(tokens) - 1))
    seconds = time.perf_counter() - began
    return tokens[: len(prompt) + TOKENS], seconds * (TOKENS - 1) / (len(tokens) - len(prompt) - 1)


def together(target: Decoder, draft: Decoder, prompt: list[int], least: int) -> tuple[list[int], float]:
    """As ``alternating``, with both at once. Behind a wrong guess the target waits for ``least`` guesses."""
    guessing, tokens = Guessing(draft), [*prompt, target.after(prompt, 0)[-1]]
    guessing.known(prompt)
    guessing.guess()
    with ThreadPoolExecutor(1) as other:
        began = time.perf_counter()
        while len(tokens) < len(prompt) + TOKENS:
            for _ in range(least - guessing.known(tokens)):
                guessing.guess()
            guesses = guessing.tokens[len(tokens) : len(tokens) + ROWS - 1]
            checked = other.submit(target.after, [*tokens, *guesses], len(tokens) - 1)
            while not checked.done() and len(guessing.tokens) < len(tokens) + len(guesses) + ROWS:
                guessing.guess()
            agreed(tokens, guesses, checked.result())
        seconds = time.perf_counter() - began
    return tokens[: len(prompt) + TOKENS], seconds * (TOKENS - 1) / (len(tokens) - len(prompt) - 1)


def step_seconds(decoder: Decoder, rows: int, beside: Decoder | None = None) -> float:
    """The median of some steps; the other one computes steps of one row all the time."""
    tokens, ended, times = [1] * CONTEXT, threading.Event(), list[float]()

    def run() -> None:
        while beside is not None and not ended.is_set():
            beside.after(tokens, CONTEXT - 1)

    for one in (decoder, beside):
        if one is not None:
            one.after(tokens, 0)  # writes the cache
    with ThreadPoolExecutor(1) as other:
        running = other.submit(run)
        for _ in range(STEPS):
            began = time.perf_counter()
            decoder.after(tokens, CONTEXT - rows)
            times.append(time.perf_counter() - began)
        ended.set()
        running.result()
    return median(times[2:])


def against(options: argparse.Namespace) -> dict[str, Any]:
    """See the module. Prints milliseconds and tokens a second."""
    bundles = Bundle.open(options.target), Bundle.open(options.draft)
    with LLM(options.target, memory="64MiB") as llm:
        prompt = llm.tokenizer.encode(TASKS["chat"])
    all_threads, one = ((Decoder(bundles[0], threads), Decoder(bundles[1], threads)) for threads in (0, 1))
    steps: dict[str, dict[int, float]] = {}
    for name, models, beside in (("all threads", all_threads, False), ("one", one, False), ("one, both", one, True)):
        for i, kind in enumerate(("target", "draft")):
            other = models[1 - i] if beside else None
            rows = range(1, 9) if kind == "target" else (1,)
            steps[f"{kind}, {name}"] = found = {n: step_seconds(models[i], n, other) for n in rows}
            print(f"{kind}, {name}:", *(f"{1e3 * took:.2f}" for took in found.values()), flush=True)
    ways: dict[str, Any] = {
        f"alternating, {n}": partial(alternating, *all_threads, prompt, n) for n in range(1, LONGEST + 1)
    }
    ways |= {f"together, {n}": partial(together, *one, prompt, n) for n in range(LONGEST)}
    ways = {"plain": partial(alternating, *all_threads, prompt, 0)} | ways
    rates: dict[str, list[float]] = {name: [] for name in ways}
    wanted = ways["plain"]()[0]
    for number in range(options.rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            time.sleep(0.1)  # threads of the others sleep by then
            tokens, seconds = ways[name]()
            assert tokens == wanted, f"{name}: other tokens"
            rates[name].append((TOKENS - 1) / seconds)
    speeds = {name: median(of) for name, of in rates.items()}
    print(", ".join(f"{name}: {speed:.1f}" for name, speed in speeds.items()))
    return {f"{options.target.stem} with {options.draft.stem}": {"step_seconds": steps, "tokens_per_second": speeds}}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    found = against(options)
    if options.json:
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        results |= {"machine": machine(), "commit": commit()} | found
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
