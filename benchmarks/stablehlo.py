"""The stablehlo target beside the cpu target and transformers' eager, in one run: prefill 512, decode 1, 8 and 16.

``python benchmarks/stablehlo.py model.gguf model.bundle --ours ours.bundle -o result.json``; the bundle has both
targets, f32, for requests of 639 tokens or more, and that of --ours the target stablehlo with this project's kernels.
Times are medians; decode steps have a past of 512 tokens, of several requests 128.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.plugins.doctor.machine import look_at_machine
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams

PROMPT, BATCHES, CONTEXT = 512, (1, 8, 16), 639


def past(batch: int) -> int:
    return PROMPT if batch == 1 else 128


def steps(batch: int) -> int:
    return 96 if batch == 1 else 32


_numbers = itertools.count()


def prompts(count: int, length: int) -> list[list[int]]:
    """Others at each call: nothing of them is in a prefix cache."""
    ids: list[list[int]] = np.random.default_rng(next(_numbers)).integers(5, 40_000, (count, length)).tolist()
    return ids


def median(measure: Callable[[], float], times: int) -> float:
    return statistics.median(measure() for _ in range(times))


def of_target(bundle: Path, target: str, threads: int) -> dict[str, Any]:
    """Through LLM: what a caller gets, with scheduling and sampling."""
    start = time.perf_counter()
    with LLM(bundle, target=target, context=CONTEXT, max_requests=max(BATCHES), threads=threads, trust="code") as llm:
        opened = time.perf_counter() - start

        def seconds(batch: int, tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            texts = prompts(batch, past(batch))
            begun = time.perf_counter()
            llm.generate(texts, params)
            return time.perf_counter() - begun

        first = seconds(1, 1)
        result: dict[str, Any] = {"open_s": opened, "first_prompt_s": first}
        result["prefill"] = PROMPT / median(lambda: seconds(1, 1), 5)
        for batch in BATCHES:
            count = steps(batch)
            seconds(batch, count + 1)  # compiles what it needs
            long, short = (statistics.median(seconds(batch, n) for _ in range(3)) for n in (count + 1, 1))
            result[f"decode_{batch}"] = batch * count / (long - short)
        result["runs_with"] = llm.info()["executor"]
    return result


def of_transformers(model: Path, threads: int) -> dict[str, Any]:
    """Eager, with its own cache, in 32-bit floats."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(model.parent), gguf_file=model.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    result: dict[str, Any] = {}
    with torch.inference_mode():

        def prefill(texts: list[list[int]]) -> tuple[float, Any]:
            begun = time.perf_counter()
            out = loaded(input_ids=torch.tensor(texts), use_cache=True, logits_to_keep=1)
            return time.perf_counter() - begun, out

        prefill(prompts(1, PROMPT))
        result["prefill"] = PROMPT / median(lambda: prefill(prompts(1, PROMPT))[0], 5)
        for batch in BATCHES:
            _, out = prefill(prompts(batch, past(batch)))
            times = []
            for _ in range(steps(batch)):
                begun = time.perf_counter()
                best = out.logits[:, -1:].argmax(-1)
                out = loaded(input_ids=best, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
                times.append(time.perf_counter() - begun)
            result[f"decode_{batch}"] = batch / statistics.median(times)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file, which transformers reads")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--ours", type=Path, help="a bundle whose stablehlo calls our kernels")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    machine = look_at_machine()
    runs = {"stablehlo": of_target(arguments.bundle, "stablehlo", arguments.threads)}
    if arguments.ours is not None:
        runs["stablehlo, our kernels"] = of_target(arguments.ours, "stablehlo", arguments.threads)
    runs["transformers"] = of_transformers(arguments.model, arguments.threads)
    runs["cpu"] = of_target(arguments.bundle, "cpu", arguments.threads)
    result = {
        "model": arguments.model.name,
        "processor": machine.processor,
        "threads": arguments.threads,
        "versions": {name: metadata.version(name) for name in ("jaxlib", "torch", "transformers")},
        "unit": "tokens a second",
        **runs,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, run in runs.items():
        figures = {key: value for key, value in run.items() if isinstance(value, float)}
        print(name, " ".join(f"{key} {value:.1f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
