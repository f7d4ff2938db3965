"""Measures Enginewright on a bundle: the whole engine (scheduler, kernels, sampling), a step at a time."""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from enginewright import LLM, SamplingParams, __version__
from enginewright.plugins.steps.linear_io import Variant
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.base import Executor, Pending
from enginewright.runtime.executors.open import make_executor, target_groups
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import CacheGroup, StepInput
from peers.agent import Conversation
from peers.ahead import Answer, Texts
from peers.workload import SPARE, START_PROMPT, Report, Workload, first_token, serve


class Served:
    """A bundle behind an engine whose caches hold so many requests of so many tokens; ``behind``: so many more may seem
    to be before them."""

    def __init__(self, path: str, work: Workload, requests: int, context: int, *, behind: int = 0) -> None:
        bundle = Bundle.open(path, "code")
        self.groups: tuple[CacheGroup, ...] = target_groups(bundle, work.target, context)
        blocks = {group.name: requests * -(-context // group.block_size) for group in self.groups}
        variant = cast(Variant | None, work.variant)
        placement = Placement(threads=work.threads, isa=work.isa, variant=variant, provider=work.provider)
        self.executor: Any = make_executor(bundle, work.target, blocks, context + behind, placement)
        self.engine = Engine(self.executor, SchedulerConfig())
        self.kv_bytes = sum(cache_block_bytes(group) * blocks[group.name] for group in self.groups)
        self.weight_bytes = sum(bundle.tensor(name).bytes for name in used_weights(bundle, work.target))
        about = ", ".join(f"{key} {value}" for key, value in self.executor.describe().items())
        self.settings = f"{about}, KV cache {'/'.join(sorted({group.dtype for group in self.groups}))}"

    def prefill(self, prompts: list[list[int]], steps: int) -> tuple[list[Request], float]:
        """The requests, and seconds until each has its first token; ``steps`` more can be decoded."""
        params = SamplingParams(max_tokens=steps + SPARE, ignore_eos=True)
        requests = [Generation(prompt, params) for prompt in prompts]
        for request in requests:
            self.engine.add_request(request)
        start = time.perf_counter()
        while any(request.output_length == 0 for request in requests):
            self.engine.step()
        return requests, time.perf_counter() - start

    def decode(self, requests: list[Request], steps: int) -> float:
        """Tokens a second of so many steps of all of them."""
        before = sum(request.output_length for request in requests)
        start = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        seconds = time.perf_counter() - start
        return (sum(request.output_length for request in requests) - before) / seconds

    def warm_up(self, work: Workload) -> None:
        """A request as long as the measured one: some targets compile a step of its size."""
        requests, _ = self.prefill(work.prompts(1, work.prompt, stream=1), 2)
        self.decode(requests, 2)
        self.drop(requests)

    def drop(self, requests: list[Request]) -> None:
        """Ends them."""
        for request in requests:
            self.engine.abort(request)

    def report(self, figures: dict[str, float]) -> Report:
        """Reports the figures with the sizes of weights and KV cache."""
        sizes = {"weights": self.weight_bytes, "kv": self.kv_bytes}
        return Report(f"enginewright {__version__}", self.settings, figures, sizes)


def used_weights(bundle: Bundle, target: str) -> set[str]:
    """Names of the weights that the steps of the program read; of none for a target without steps of ours."""
    if target != "cpu":
        return set()
    return {o.name for step in bundle.program(target).steps for o in step.inputs if o.kind == "weight"}


def speed(model: str, work: Workload) -> Report:
    """Measures prefill and decode speeds; see ``workload``.

    A first prompt warms up: it maps the weights and starts the threads.
    """
    most, every = max(work.batches), work.steps * len(work.batches)
    alone = work.prompt + work.steps + SPARE  # a paged cache has room for it in what others have
    alone = -(-alone // most) if work.target == "cpu" else alone
    served = Served(model, work, most, max(work.short_context, alone))
    served.warm_up(work)
    requests, seconds = served.prefill(work.prompts(1, work.prompt), work.steps)
    figures = {"prefill": work.prompt / seconds, "decode_1": served.decode(requests, work.steps)}
    served.drop(requests)
    requests, _ = served.prefill(work.prompts(most, work.short_prompt, stream=2), every)
    for batch in work.batches:
        served.drop(requests[batch:])
        requests = requests[:batch]
        served.decode(requests, 1)
        figures[f"decode_{batch}"] = served.decode(requests, work.steps)
    return served.report(figures)


def long(model: str, work: Workload) -> Report:
    """Measures a long prompt; see ``workload``."""
    served = Served(model, work, 1, work.long_prompt + work.long_steps + SPARE)
    served.warm_up(work)
    requests, seconds = served.prefill(work.prompts(1, work.long_prompt), work.long_steps)
    decode = served.decode(requests, work.long_steps)
    return served.report({"prefill_long": work.long_prompt / seconds, "decode_long": decode})


class Doubled:
    """An executor that adds ``tokens`` to what is behind each step: the first blocks of its tables, once more. A step
    reads as much as if they had been computed."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.tokens = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, step: StepInput) -> Pending:
        """Runs the step behind more."""
        sizes = {group.name: group.block_size for group in self.inner.cache_groups}
        tables = {n: np.concatenate((t[:, : self.tokens // sizes[n]], t), 1) for n, t in step.block_tables.items()}
        kv_len, positions = step.kv_len + np.int32(self.tokens), step.positions + np.int32(self.tokens)
        return self.inner.submit(step.changed(block_table=tables, kv_len=kv_len, positions=positions))


def far(model: str, work: Workload) -> Report:
    """Measures a very long prompt; see ``workload``. The longer cache has the prompt twice.

    It uses the engine below ``LLM``, which takes requests that are longer than the model's context.
    """
    tokens, steps = work.far_prompt, work.long_steps
    served = Served(model, work, 1, tokens + 2 * steps + SPARE, behind=tokens)
    served.executor = doubled = Doubled(served.executor)
    served.engine = Engine(doubled, SchedulerConfig())
    served.warm_up(work)
    requests, seconds = served.prefill(work.prompts(1, tokens), 2 * steps)
    figures = {"prefill_far": tokens / seconds, "decode_far": served.decode(requests, steps)}
    doubled.tokens = tokens
    figures["decode_farther"] = served.decode(requests, steps)
    return served.report(figures)


def start(model: str, work: Workload) -> Report:
    """Runs up to the first token as a Python program would: with the tokenizer, and a cache of the default size."""
    with LLM(
        model, target=work.target, context=work.context, threads=work.threads, provider=work.provider, trust="code"
    ) as llm:
        llm.generate([work.prompts(1, START_PROMPT)[0]], SamplingParams(max_tokens=1, ignore_eos=True))
        first_token()
    return Report(f"enginewright {__version__}")


def agent(model: str, work: Workload) -> Report:
    """Measures a conversation through the Python API; see ``workload``."""
    talk = Conversation.read(work.conversation)
    params = SamplingParams(max_tokens=talk.answer, ignore_eos=True)

    def asked(llm: LLM, prompt: list[int]) -> tuple[list[int], float]:
        first, ids = 0.0, []
        for piece in llm.stream(prompt, params):
            first = first or time.perf_counter()
            ids += piece.token_ids
        return ids, first

    def opened(prefix_cache: bool) -> LLM:
        llm = LLM(model, threads=work.threads, memory="1GiB", prefix_cache=prefix_cache, speculate=None, trust="code")
        asked(llm, work.prompts(1, 64)[0])
        return llm

    with opened(True) as cached, opened(False) as plain:
        figures = talk.figures(partial(asked, cached), partial(asked, plain))
    return Report(f"enginewright {__version__}", "prefix cache in memory", figures)


def ahead(model: str, work: Workload) -> Report:
    """Measures speculation through the Python API; see ``workload``."""
    texts = Texts.read(work.texts)
    params = SamplingParams(max_tokens=texts.tokens, ignore_eos=True)
    tenants = map(str, count())  # so that no answer is known from before

    def asked(llm: LLM, prompt: list[int]) -> Answer:
        (output,) = llm.generate([prompt], params, tenant=next(tenants))
        seconds = (output.metrics.last_token or 0.0) - (output.metrics.first_token or 0.0)
        steps = len(output.token_ids) - 1 - output.metrics.accepted
        return Answer(list(output.token_ids), seconds, steps, output.metrics.drafted)

    def opened(speculate: str | None) -> LLM:
        return LLM(model, threads=work.threads, memory=memory, prefix_cache=False, speculate=speculate, trust="code")

    memory = "1GiB" if work.draft_model else "256MiB"  # which has a draft model's weights too
    with opened(None) as plain, opened(work.draft_model or "lookup") as guessing:
        figures = texts.figures(partial(asked, plain), partial(asked, guessing))
    draft = "a draft model, or " if work.draft_model else ""
    settings = f"{draft}lookup of the last 8, 4, 3 or 2 tokens, up to 15 ahead"
    return Report(f"enginewright {__version__}", settings, figures)


def logits(model: str, ids: list[int]) -> npt.NDArray[np.float32]:
    """[T, V], scored as ``optimize eval`` does."""
    with LLM(model, memory="512MiB", max_requests=1, trust="code") as llm:
        return llm.logits(ids)


def answers(model: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Generates greedy answers; see ``workload``."""
    with LLM(model, memory="512MiB", max_requests=1, trust="code") as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [list(output.token_ids) for output in llm.generate(prompts, params)]


if __name__ == "__main__":
    serve(sys.modules[__name__])
