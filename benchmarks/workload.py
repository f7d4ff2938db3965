"""What is measured, the same for every engine.

- prefill: one prompt of ``prompt`` random tokens, logits of its last;
- decode of 1: ``steps`` tokens one after the other behind that prompt;
- decode of B: B requests with prompts of ``short_prompt`` tokens, ``steps`` tokens each, all in one batch a step.

Prompts are never repeated, since prefix caches would hide the prefill, and nothing ends early.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Sizes of a run.

    ``seed`` chooses the prompts, of tokens below ``vocabulary``; ``target`` is what runs a bundle of ours.
    """

    prompt: int = 512
    short_prompt: int = 128
    steps: int = 64
    batch: int = 8
    threads: int = 2
    seed: int = 0
    vocabulary: int = 20_000
    target: str = "cpu"

    @property
    def context(self) -> int:
        """Tokens of the longest request, which caches of a fixed length need."""
        return max(self.prompt, self.short_prompt) + self.steps + 1

    def prompts(self) -> tuple[list[int], list[list[int]]]:
        """The long prompt, and one short prompt a request of the batch."""
        random = np.random.default_rng(self.seed)
        sizes = [self.prompt, *[self.short_prompt] * self.batch]
        long, *short = ([int(i) for i in random.integers(3, self.vocabulary, size)] for size in sizes)
        return long, short


@dataclass(frozen=True)
class Speeds:
    """Tokens a second."""

    prefill: float
    decode_1: float
    decode_batch: float
    engine: str


def serve(measure: Callable[[str, Workload], Speeds]) -> None:
    """The command line of a worker: ``python WORKER.py MODEL '{"prompt": 512, ...}'`` prints the speeds as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("workload", type=json.loads)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.model, Workload(**arguments.workload)))))
