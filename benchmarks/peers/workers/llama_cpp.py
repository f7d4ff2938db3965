"""Measures llama.cpp on a GGUF file through the low-level API of llama-cpp-python: one llama_decode a step.

Flash attention is on; the KV cache is f16, its default. Weights are mapped, and repacked for the processor where that
is its default.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from peers.agent import Conversation
from peers.ahead import Answer, Texts
from peers.workload import START_PROMPT, Report, Workload, first_token, serve

ENGINE = f"llama-cpp-python {llama_cpp.__version__}"
SETTINGS = "flash attention, KV cache f16, ubatch 512, mapped"


class Context:
    """A context for so many sequences of so many tokens in all; freed with ``free``. ``unified``: sequences share one
    cache."""

    def __init__(self, model: Any, threads: int, tokens: int, sequences: int, *, unified: bool = False) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = tokens, 2048, 512, sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type, params.kv_unified = 1, unified
        self._context = llama_cpp.llama_init_from_model(model, params)
        if self._context is None:
            raise SystemExit(f"llama.cpp can't make a context of {tokens} tokens")

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], *, every: bool = False
    ) -> float:
        """Seconds of one llama_decode; logits of the last token, or of every one."""
        count = len(tokens)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = every or i == count - 1
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with {status}")
        return seconds

    def prefill(self, prompt: Sequence[int], sequence: int = 0) -> float:
        """Seconds of a prompt, in batches of 2,048, logits of its last token."""
        seconds = 0.0
        for first in range(0, len(prompt), 2048):
            part = prompt[first : first + 2048]
            seconds += self.decode(part, range(first, first + len(part)), [sequence] * len(part))
        return seconds

    def steps(self, prompts: Sequence[Sequence[int]], start: int, steps: int) -> float:
        """Tokens a second of so many steps of all sequences, from position ``start`` on."""
        every = range(len(prompts))
        seconds = 0.0
        for i in range(steps):
            tokens = [prompts[s][i % len(prompts[s])] for s in every]
            seconds += self.decode(tokens, [start + i] * len(tokens), every, every=True)
        return len(prompts) * steps / seconds

    def keep(self, tokens: int) -> None:
        """Forgets all of sequence 0 but its first tokens."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, tokens, -1)

    def double(self, tokens: int) -> None:
        """Puts the ``tokens`` of sequence 0 behind themselves once more, as sequence 1 of a unified cache copies them:
        a step reads as much as if they had been computed there."""
        context, memory = self._context, llama_cpp.llama_get_memory(self._context)
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(context, 0))()
        size = llama_cpp.llama_state_seq_get_data(context, state, len(state), 0)
        llama_cpp.llama_state_seq_set_data(context, state, size, 1)
        llama_cpp.llama_memory_seq_add(memory, 1, 0, -1, tokens)
        llama_cpp.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        if llama_cpp.llama_memory_seq_pos_max(memory, 0) != 2 * tokens - 1:
            raise SystemExit(f"{ENGINE} can't copy a sequence")

    def logits(self, rows: int, columns: int) -> npt.NDArray[np.float32]:
        """Gives those of the last decode, [T, V]."""
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (rows, columns)).copy()

    def free(self) -> None:
        """Gives its memory back."""
        llama_cpp.llama_free(self._context)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp writes pages to stderr; what matters here are the figures."""


def load(path: str) -> Any:
    """The model of a file."""
    llama_cpp.llama_log_set(_silent, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if model is None:
        raise SystemExit(f"llama.cpp can't load {path}")
    return model


def _warmed(path: str, work: Workload) -> Any:
    model = load(path)
    context = Context(model, work.threads, 256, 1)
    prompt = work.prompts(1, 64, stream=1)
    context.prefill(prompt[0])
    context.steps(prompt, 64, 4)
    context.free()
    return model


def _alone(model: Any, work: Workload, prompt_tokens: int, steps: int) -> tuple[float, float]:
    """Tokens a second of a prompt, and of the steps behind it."""
    prompts = work.prompts(1, prompt_tokens)
    context = Context(model, work.threads, prompt_tokens + steps + 64, 1)
    prefill = prompt_tokens / context.prefill(prompts[0])
    decode = context.steps(prompts, prompt_tokens, steps)
    context.free()
    return prefill, decode


def speed(path: str, work: Workload) -> Report:
    """Measures prefill and decode speeds; see ``workload``.

    A context is made and freed for each part, so that none is larger than necessary.
    """
    model = _warmed(path, work)
    prefill, decode = _alone(model, work, work.prompt, work.steps)
    figures = {"prefill": prefill, "decode_1": decode}
    if not work.batches:
        return Report(ENGINE, SETTINGS, figures)
    most = max(work.batches)
    prompts = work.prompts(most, work.short_prompt, stream=2)
    context = Context(model, work.threads, most * work.short_context, most)
    for sequence, prompt in enumerate(prompts):
        context.prefill(prompt, sequence)
    at = work.short_prompt
    for batch in work.batches:
        figures[f"decode_{batch}"] = context.steps(prompts[:batch], at, work.steps)
        at += work.steps
    context.free()
    return Report(ENGINE, SETTINGS, figures)


def long(path: str, work: Workload) -> Report:
    """Measures a long prompt; see ``workload``."""
    prefill, decode = _alone(_warmed(path, work), work, work.long_prompt, work.long_steps)
    return Report(ENGINE, SETTINGS, {"prefill_long": prefill, "decode_long": decode})


def far(path: str, work: Workload) -> Report:
    """Measures a very long prompt; see ``workload``. The longer cache has the prompt twice."""
    model, prompts, tokens = _warmed(path, work), work.prompts(1, work.far_prompt), work.far_prompt
    context = Context(model, work.threads, 2 * (tokens + work.long_steps) + 64, 2, unified=True)
    figures = {"prefill_far": tokens / context.prefill(prompts[0])}
    figures["decode_far"] = context.steps(prompts, tokens, work.long_steps)
    context.keep(tokens)
    context.double(tokens)
    context.steps(prompts, 2 * tokens, 1)  # which turns the copies to their positions
    figures["decode_farther"] = context.steps(prompts, 2 * tokens + 1, work.long_steps)
    context.free()
    return Report(ENGINE, SETTINGS, figures)


def start(path: str, work: Workload) -> Report:
    """Runs up to the first token; see ``workload``."""
    context = Context(load(path), work.threads, 256, 1)
    context.prefill(work.prompts(1, START_PROMPT)[0])
    first_token()
    return Report(ENGINE)


def agent(path: str, work: Workload) -> Report:
    """Measures a conversation; see ``workload``.

    With the cache, the sequence keeps the common part of the prompt, as llama-server's slots do (its ``cache_prompt``);
    the last token is always computed.
    """
    talk = Conversation.read(work.conversation)
    model = _warmed(path, work)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    context = Context(model, work.threads, talk.context + 64, 1)
    held: list[int] = []

    def ask(prompt: list[int], *, cached: bool) -> tuple[list[int], float]:
        same = 0
        while cached and same < min(len(held), len(prompt) - 1) and held[same] == prompt[same]:
            same += 1
        context.keep(same)
        for first in range(same, len(prompt), 2048):
            part = prompt[first : first + 2048]
            context.decode(part, range(first, first + len(part)), [0] * len(part))
        answer = [int(context.logits(1, vocabulary).argmax())]
        at = time.perf_counter()
        while len(answer) < talk.answer:
            context.decode(answer[-1:], [len(prompt) + len(answer) - 1], [0])
            answer.append(int(context.logits(1, vocabulary).argmax()))
        held[:] = prompt + answer[:-1]
        return answer, at

    figures = talk.figures(partial(ask, cached=True), partial(ask, cached=False))
    context.free()
    return Report(ENGINE, SETTINGS, figures)


class Guesser(LlamaDraftModel):  # type: ignore[misc]
    """A second model that guesses the most probable tokens; llama-cpp-python has the interface alone. What it computed
    of a text before stays in its cache, as ``held`` says."""

    def __init__(self, path: str, threads: int, tokens: int, ahead: int) -> None:
        model = load(path)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._context = Context(model, threads, tokens, 1)
        self.held: list[int] = []
        self._ahead = ahead

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        ids, same = input_ids.tolist(), 0
        while same < min(len(self.held), len(ids) - 1) and self.held[same] == ids[same]:
            same += 1
        self._context.keep(same)
        self._context.decode(ids[same:], range(same, len(ids)), [0] * (len(ids) - same))
        draft = [self._likeliest()]
        while len(draft) < self._ahead:
            self._context.decode(draft[-1:], [len(ids) + len(draft) - 1], [0])
            draft.append(self._likeliest())
        self.held[:] = ids + draft[:-1]
        return np.asarray(draft, np.intc)

    def _likeliest(self) -> int:
        return int(self._context.logits(1, self._vocabulary).argmax())


class Counted(LlamaDraftModel):  # type: ignore[misc]
    """Another's drafts; counts them, one for each step behind that of the prompt, and their tokens."""

    def __init__(self, guesser: Any) -> None:
        self.guesser, self.steps, self.drafted = guesser, 0, 0

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        draft: npt.NDArray[np.intc] = self.guesser(input_ids, **kwargs)
        self.steps, self.drafted = self.steps + 1, self.drafted + len(draft)
        return draft


def ahead(path: str, work: Workload) -> Report:
    """Measures speculation; see ``workload``.

    It uses the package's ``Llama.generate``, which has the lookup and takes a draft model. So its steps sample in
    Python, with and without speculation.
    """
    texts = Texts.read(work.texts)
    about = {"n_ctx": texts.context + 64, "n_threads": work.threads, "n_threads_batch": work.threads}
    held: list[int] = []
    if work.draft_model:
        guesser = Guesser(work.draft_model, work.threads, texts.context + work.draft + 64, work.draft)
        held = guesser.held
        how = f"draft model, {work.draft} ahead, by a loop of ours in Python, as the package has none"
    else:
        guesser = LlamaPromptLookupDecoding(num_pred_tokens=work.draft)
        how = f"lookup of the last {guesser.max_ngram_size} tokens, {work.draft} ahead"
    draft = Counted(guesser)
    plain = llama_cpp.Llama(path, flash_attn=True, verbose=False, **about)
    guessing = llama_cpp.Llama(path, flash_attn=True, verbose=False, draft_model=draft, **about)

    def ask(engine: Any, prompt: list[int]) -> Answer:
        engine.reset()
        held.clear()
        draft.steps = draft.drafted = 0
        answer: list[int] = []
        first = last = 0.0
        for token in engine.generate(prompt, temp=0.0):
            last = time.perf_counter()
            first = first or last
            answer.append(int(token))
            if len(answer) == texts.tokens:
                break
        return Answer(answer, last - first, draft.steps or len(answer) - 1, draft.drafted)

    return Report(ENGINE, f"Llama.generate; {how}", texts.figures(partial(ask, plain), partial(ask, guessing)))


def logits(path: str, ids: list[int]) -> npt.NDArray[np.float32]:
    """[T, V], in one batch."""
    model = load(path)
    context = Context(model, 2, len(ids) + 64, 1)
    context.decode(ids, range(len(ids)), [0] * len(ids), every=True)
    return context.logits(len(ids), llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))


def answers(path: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Generates greedy answers; see ``workload``."""
    model = load(path)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    texts = []
    for prompt in prompts:
        context = Context(model, 2, len(prompt) + tokens + 64, 1)
        context.prefill(prompt)
        answer = [int(context.logits(1, vocabulary).argmax())]
        while len(answer) < tokens:
            context.decode(answer[-1:], [len(prompt) + len(answer) - 1], [0])
            answer.append(int(context.logits(1, vocabulary).argmax()))
        context.free()
        texts.append(answer)
    return texts


if __name__ == "__main__":
    serve(sys.modules[__name__])
