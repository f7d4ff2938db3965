"""Measures CTranslate2 on a folder of its converter: a call generates all requests of a batch, timed token by token."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import numpy.typing as npt

from peers.workload import START_PROMPT, Report, Workload, first_token, serve

ENGINE = f"CTranslate2 {ctranslate2.__version__}"
SETTINGS = "compute type int8, a scale for each row, greedy"


class Served:
    """A model, and its words, which it takes for tokens."""

    def __init__(self, path: str, threads: int) -> None:
        self._generator = ctranslate2.Generator(path, "cpu", compute_type="int8", intra_threads=threads)
        self._words: list[str] = json.loads((Path(path) / "vocabulary.json").read_text(encoding="utf-8"))

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        """Seconds of the prompts and their first tokens, and of the ``steps`` steps after that."""
        stamps: list[float] = []

        def step(result: Any) -> bool:
            if result.batch_id == 0:
                stamps.append(time.perf_counter())
            return False

        start = time.perf_counter()
        self._generator.generate_batch(
            [[self._words[i] for i in prompt] for prompt in prompts],
            max_length=steps + 1,
            min_length=steps + 1,
            include_prompt_in_result=False,
            callback=step,
        )
        if len(stamps) != steps + 1:
            raise SystemExit(f"CTranslate2 gave {len(stamps)} tokens, where {steps + 1} were asked for")
        return stamps[0] - start, stamps[-1] - stamps[0]

    def logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """[T, V]."""
        return np.asarray(self._generator.forward_batch([ids]), np.float32)[0]


def speed(path: str, work: Workload) -> Report:
    """Measures prefill and decode speeds; see ``workload``."""
    served = Served(path, work.threads)
    served.run(work.prompts(1, 64, stream=1), 4)
    prefill, decode = served.run(work.prompts(1, work.prompt), work.steps)
    figures = {"prefill": work.prompt / prefill, "decode_1": work.steps / decode}
    for batch in work.batches:
        _, decode = served.run(work.prompts(batch, work.short_prompt, stream=batch), work.steps)
        figures[f"decode_{batch}"] = batch * work.steps / decode
    return Report(ENGINE, SETTINGS, figures)


def long(path: str, work: Workload) -> Report:
    """Measures a long prompt; see ``workload``."""
    served = Served(path, work.threads)
    served.run(work.prompts(1, 64, stream=1), 4)
    prefill, decode = served.run(work.prompts(1, work.long_prompt), work.long_steps)
    figures = {"prefill_long": work.long_prompt / prefill, "decode_long": work.long_steps / decode}
    return Report(ENGINE, SETTINGS, figures)


def start(path: str, work: Workload) -> Report:
    """Runs up to the first token; see ``workload``."""
    Served(path, work.threads).run(work.prompts(1, START_PROMPT), 0)
    first_token()
    return Report(ENGINE)


def logits(path: str, ids: list[int]) -> npt.NDArray[np.float32]:
    """[T, V]."""
    return Served(path, 2).logits(ids)


if __name__ == "__main__":
    serve(sys.modules[__name__])
