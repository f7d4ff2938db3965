"""Measures Enginewright on a bundle: the whole engine (scheduler, kernels, sampling), a step at a time."""

from __future__ import annotations

import time

from workload import Speeds, Workload, serve

from enginewright import SamplingParams
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine import Engine
from enginewright.runtime.executors.open import Placement, make_executor, target_groups
from enginewright.runtime.request import Request
from enginewright.runtime.scheduler.continuous import SchedulerConfig


def measure(path: str, work: Workload) -> Speeds:
    """Prefill and decode speeds, after a short warm-up."""
    bundle = Bundle.open(path)
    groups = target_groups(bundle, work.target, work.context)
    tokens = work.prompt + work.steps + work.batch * (work.short_prompt + work.steps + 32) + 256
    blocks = {group.name: tokens // group.block_size + 2 * work.batch for group in groups}
    if work.target != "cpu":  # a slot for each request
        blocks = {group.name: work.batch for group in groups}
    executor = make_executor(bundle, work.target, blocks, work.context, Placement(threads=work.threads))
    engine = Engine(executor, SchedulerConfig(prefill_tokens=max(512, work.prompt)))
    long, short = work.prompts()

    _run(engine, [long[::-1][:64]], 4)  # maps the weights, starts the threads
    prefill, decode = _run(engine, [long], work.steps)
    _, decode_batch = _run(engine, short, work.steps)
    info = ", ".join(f"{key} {value}" for key, value in executor.describe().items())
    executor.close()
    return Speeds(
        prefill=work.prompt / prefill,
        decode_1=work.steps / decode,
        decode_batch=work.batch * work.steps / decode_batch,
        engine=f"enginewright ({info})",
    )


def _run(engine: Engine, prompts: list[list[int]], steps: int) -> tuple[float, float]:
    """Seconds until every request has its first token, and seconds of the ``steps`` steps after that."""
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    requests = [Request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.add_request(request)
    start = time.perf_counter()
    while any(request.output_length == 0 for request in requests):
        engine.step()
    prefilled = time.perf_counter()
    ahead = sum(request.output_length - 1 for request in requests)  # decoded while others were still in prefill
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - prefilled
    share = (len(requests) * steps - ahead) / (len(requests) * steps)
    return prefilled - start, seconds / share


if __name__ == "__main__":
    serve(measure)
