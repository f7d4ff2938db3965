"""Measures OpenVINO GenAI on a folder that ``peers.convert`` made of a GGUF: continuous batching over a paged KV cache
of 8 bits, its defaults, with a scheduler that takes a prompt whole and a cache of the size that is needed."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import openvino_genai

from peers.agent import Conversation
from peers.ahead import LAST, Answer, Texts
from peers.workload import START_PROMPT, Report, Workload, first_token, serve

ENGINE = f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}"
SETTINGS = "continuous batching, KV cache u8, model cache"
BLOCK = 32
"""Tokens of a block of its cache on the CPU."""


class Served:
    """A pipeline whose cache has room for so many tokens, for so many requests."""

    def __init__(self, path: str, work: Workload, tokens: int, requests: int, *, prefix_cache: bool = False) -> None:
        config = openvino_genai.SchedulerConfig()
        config.num_kv_blocks = -(-tokens // BLOCK) + requests + 1
        config.max_num_batched_tokens = max(work.prompt, work.long_prompt, 512)
        config.max_num_seqs = max(requests, 1)
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = prefix_cache
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(path, config, "CPU", properties(path, work.threads))
        self._next = 0

    def prefill(self, prompts: list[list[int]], steps: int) -> tuple[list[Any], float]:
        """The requests' handles, and seconds until each has its first token."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = steps + 1
        config.ignore_eos, config.do_sample = True, False
        start = time.perf_counter()
        waiting = []
        for prompt in prompts:
            ids = openvino.Tensor(np.asarray([prompt], np.int64))
            waiting.append(self._pipeline.add_request(self._next, ids, config))
            self._next += 1
        handles = list(waiting)
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        return handles, time.perf_counter() - start

    def decode(self, requests: int, steps: int) -> float:
        """Tokens a second of so many steps of so many requests."""
        start = time.perf_counter()
        for _ in range(steps):
            self._pipeline.step()
        return requests * steps / (time.perf_counter() - start)

    def answer(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """Generates ``tokens`` tokens; also returns the time at which the first one was there."""
        (handle,), _ = self.prefill([prompt], tokens - 1)
        at = time.perf_counter()
        ids: list[int] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
        return ids, at

    def finish(self, handles: list[Any]) -> None:
        """Ends them."""
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def properties(path: str, threads: int) -> dict[str, object]:
    """For lowest latency, with compiled models kept beside the folder, which makes the next start short."""
    return {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "CACHE_DIR": f"{path}/cache"}


def _warm(served: Served, work: Workload) -> None:
    handles, _ = served.prefill(work.prompts(1, 64, stream=1), 8)
    served.decode(1, 4)
    served.finish(handles)


def speed(path: str, work: Workload) -> Report:
    """Measures prefill and decode speeds; see ``workload``. Smaller batches are larger ones with requests dropped."""
    most = max(work.batches)
    served = Served(path, work, max(most * work.short_context, work.prompt + work.steps + 64), most)
    _warm(served, work)
    handles, seconds = served.prefill(work.prompts(1, work.prompt), work.steps + 8)
    figures = {"prefill": work.prompt / seconds, "decode_1": served.decode(1, work.steps)}
    served.finish(handles)
    handles, _ = served.prefill(work.prompts(most, work.short_prompt, stream=2), work.steps * len(work.batches) + 8)
    for batch in work.batches:
        for handle in handles[batch:]:
            handle.cancel()
        handles = handles[:batch]
        figures[f"decode_{batch}"] = served.decode(batch, work.steps)
    return Report(ENGINE, SETTINGS, figures)


def _alone(path: str, work: Workload, tokens: int, name: str) -> Report:
    """A prompt of so many tokens, and steps behind it."""
    served = Served(path, work, tokens + work.long_steps + 64, 1)
    _warm(served, work)
    _, seconds = served.prefill(work.prompts(1, tokens), work.long_steps + 8)
    decode = served.decode(1, work.long_steps)
    return Report(ENGINE, SETTINGS, {f"prefill_{name}": tokens / seconds, f"decode_{name}": decode})


def long(path: str, work: Workload) -> Report:
    """Measures a long prompt; see ``workload``."""
    return _alone(path, work, work.long_prompt, "long")


def far(path: str, work: Workload) -> Report:
    """Measures a very long prompt; see ``workload``. Steps with a cache longer than the prompt are left out."""
    return _alone(path, work, work.far_prompt, "far")


def start(path: str, work: Workload) -> Report:
    """Runs up to the first token; see ``workload``."""
    Served(path, work, 256, 1).prefill(work.prompts(1, START_PROMPT), 1)
    first_token()
    return Report(ENGINE)


def agent(path: str, work: Workload) -> Report:
    """Measures a conversation; see ``workload``. The scheduler's ``enable_prefix_caching`` turns its cache on."""
    talk = Conversation.read(work.conversation)
    asks = []
    for prefix_cache in (True, False):
        served = Served(path, work, talk.context + 64, 1, prefix_cache=prefix_cache)
        _warm(served, work)
        asks.append(partial(served.answer, tokens=talk.answer))
    return Report(ENGINE, SETTINGS, talk.figures(*asks))


def ahead(path: str, work: Workload) -> Report:
    """Measures speculation; see ``workload``.

    Its lookup doesn't count the tokens that it computes ahead, but reports each step's time and accepted tokens. For a
    draft model it reports the draft's steps, each of one token.
    """
    texts = Texts.read(work.texts)

    def opened(**more: object) -> Any:
        config = openvino_genai.SchedulerConfig()
        config.num_kv_blocks = -(-texts.context // BLOCK) + 8
        config.max_num_batched_tokens = max(texts.context, 512)
        config.enable_prefix_caching = False
        return openvino_genai.LLMPipeline(
            path, "CPU", scheduler_config=config, **properties(path, work.threads), **more
        )

    def ask(pipeline: Any, prompt: list[int], *, draft: int = 0) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = texts.tokens
        config.ignore_eos, config.do_sample = True, False
        if draft:
            config.num_assistant_tokens = draft
        if draft and not work.draft_model:
            config.max_ngram_size = LAST
        result = pipeline.generate(openvino.Tensor(np.asarray([prompt], np.int64)), config)
        at = result.perf_metrics.raw_metrics.m_new_token_times  # in milliseconds
        counted = result.extended_perf_metrics
        drafted = len(counted.draft_model_metrics.raw_metrics.m_batch_sizes) if counted else None
        return Answer([int(token) for token in result.tokens[0]], (at[-1] - at[0]) / 1e3, len(at) - 1, drafted)

    plain = opened()
    if work.draft_model:
        draft_model = openvino_genai.draft_model(work.draft_model, "CPU", **properties(work.draft_model, work.threads))
        guessing, how = opened(draft_model=draft_model), "draft model"
    else:
        guessing, how = opened(prompt_lookup=True), f"prompt lookup of the last {LAST} tokens"
    figures = texts.figures(partial(ask, plain), partial(ask, guessing, draft=work.draft))
    return Report(ENGINE, f"LLMPipeline; {how}, {work.draft} ahead", figures)


def logits(path: str, ids: list[int]) -> npt.NDArray[np.float32]:
    """[T, V]: of the model on the same device with its own attention, since pipelines give none."""
    core = openvino.Core()
    compiled = core.compile_model(f"{path}/openvino_model.xml", "CPU", {"PERFORMANCE_HINT": "LATENCY"})
    tokens = np.asarray([ids], np.int64)
    inputs: dict[str, npt.NDArray[Any]] = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.arange(len(ids), dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    names = {name for port in compiled.inputs for name in port.names}
    result = compiled.create_infer_request().infer({k: v for k, v in inputs.items() if k in names})
    return np.asarray(result[0][0], np.float32)


if __name__ == "__main__":
    serve(sys.modules[__name__])
