"""Measures mistral.rs on a GGUF file through its Python package, whose requests are texts.

Prompts are random words, about as many tokens as were asked for; rates are of the tokens that it counts, in the seconds
that it says prompts and answers took. Its wheel is made for any x86-64. No thread count can be given, and a second
request at the same time is refused ("Already borrowed").
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
from mistralrs import CompletionRequest, Runner, Which

from peers.workload import START_PROMPT, Report, Workload, first_token, memory, serve

ENGINE = f"mistral.rs {version('mistralrs')}"
SETTINGS = "its wheel for any x86-64, greedy, prompts of random words, no prefix cache"
TOKENS_A_WORD = 1.6
"""About, of the words below."""


class Served:
    """A model that answers texts."""

    def __init__(self, path: str) -> None:
        file = Path(path)
        which = Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name)
        self._runner = Runner(which=which, prefix_cache_n=0)
        self._words = sorted(set("\n".join(topics.topics.values()).split()))
        self._random = np.random.default_rng(0)

    def run(self, prompt: int, tokens: int) -> tuple[float, float]:
        """Tokens a second of a prompt of about so many, and of what comes behind the first of ``tokens`` tokens."""
        text = " ".join(self._random.choice(self._words, max(1, round(prompt / TOKENS_A_WORD))))
        request = CompletionRequest(prompt=text, model="default", max_tokens=tokens, temperature=0.0, ignore_eos=True)
        used: Any = self._runner.send_completion_request(request).usage
        if used.completion_tokens != tokens:
            raise SystemExit(f"mistral.rs gave {used.completion_tokens} tokens, where {tokens} were asked for")
        prefill = used.prompt_tokens / used.total_prompt_time_sec
        return prefill, (tokens - 1) / used.total_completion_time_sec if tokens > 1 else 0.0


def speed(path: str, work: Workload) -> Report:
    """Measures prefill and decode speeds of a single request; see ``workload``."""
    served = Served(path)
    served.run(64, 4)
    prefill, decode = served.run(work.prompt, work.steps + 1)
    return Report(ENGINE, SETTINGS, {"prefill": prefill, "decode_1": decode}, {"peak": memory("VmHWM")})


def start(path: str, work: Workload) -> Report:
    """Runs up to the first token; see ``workload``."""
    Served(path).run(START_PROMPT, 1)
    first_token()
    return Report(ENGINE)


def logits(path: str, ids: list[int]) -> None:
    """It gives none."""


if __name__ == "__main__":
    serve(sys.modules[__name__])
