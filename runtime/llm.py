"""``LLM``: a bundle, ready to answer."""

from __future__ import annotations

import contextlib
import operator
import os
import queue
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from enginewright.plugins.contracts import ExecutorCaps, FloatArray, ModelInfo
from enginewright.plugins.errors import BundleError, EnginewrightError, RequestError

from .bundle.reader import Bundle, Load
from .engine import Engine
from .engine_loop import EngineLoop
from .executors.base import Executor
from .executors.open import Placement, choose_target, context_of, open_executor
from .executors.static_shapes import StaticShapes
from .freed_memory import return_freed_memory
from .kv_cache.cache_groups import PoolPlan, parse_size
from .output_text import OutputText
from .outputs import RequestOutput, StreamPiece
from .request import Request
from .sampling import SamplingParams
from .scheduler.continuous import SchedulerConfig
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .chat_template import Message

Prompt = str | Sequence[int]
Event = StreamPiece | EnginewrightError

MOST_THREADS = 1024


class LLM:
    """Serves a bundle. Safe to use from any number of threads and coroutines: their requests share the steps.

    On the cpu target a request's tokens are batch-invariant; docs/numerics.md says what holds on others.

    A process may end with an LLM open, and with streams of it. A forked child has none of its parent's threads: there
    every request of this LLM is an EnginewrightError, and the bundle is to be opened again.

    Args:
        path: the bundle.
        target: which of its targets to run; None takes the first of "cpu", "onnx", "tensorrt-rtx" and "tensorrt".
        threads: of the kernels, at most 1024; 0 takes as many as there are cores.
        isa: instruction set of the cpu target, such as "avx2" (see ``CpuExecutor``); None takes the best there is.
        provider: onnxruntime's execution provider for the onnx target ("cpu", "cuda", "tensorrt-rtx", "directml",
            "openvino"); None takes "cpu".
        context: most tokens of a request, its answer included; None takes the model's. On the onnx target every request
            has a slot of so many tokens, whatever it needs.
        memory: budget of the KV cache, in bytes or as "512MiB"; None takes a quarter of the free memory. Never more
            than ``max_requests`` requests of full context need.
        max_requests: most requests that run at a time; more wait.
        prefill_chunk: most prompt tokens of a step, over all requests; None takes 512, or with ``buckets`` the largest.
        buckets: where the bundle has static-shape buckets, steps have their sizes; False runs any size.
        verify: check the hashes of all files first (reads the whole bundle).
        load: "map" maps the cpu target's weights; a file that changes is noticed before the next step (BundleError),
            but cut off during a step it ends the process (SIGBUS). "read" copies the weights into memory.

    Attributes:
        model: what the bundle says of the model.
        engine: for a look at pools and counters; its thread is the only one that may call it.

    Raises:
        BundleError: the bundle is missing, damaged, too new, or has no such target; names file and field.
        CapacityError: ``memory`` holds no KV block, or ``context`` is more than the model has.
        MissingDependencyError: what the target runs on is not installed, or too old.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        target: str | None = None,
        threads: int = 0,
        isa: str | None = None,
        provider: str | None = None,
        context: int | None = None,
        memory: int | str | None = None,
        max_requests: int = 64,
        prefill_chunk: int | None = None,
        buckets: bool = True,
        verify: bool = False,
        load: Load = "map",
    ) -> None:
        _scheduler_config(max_requests, prefill_chunk)  # raises before anything is opened
        _check_int("threads", threads, 0, MOST_THREADS)
        bundle = Bundle.open(path)
        if verify:
            bundle.verify_hashes()
        target = choose_target(bundle, target)
        model = replace(bundle.model, context_length=context_of(bundle, context, target))
        files = bundle.tokenizer_files()
        tokenizer = Tokenizer(files) if files.tokenizer_json else None  # may raise: before threads are started
        placement = Placement(threads, isa, provider, load=load)
        budget = None if memory is None else parse_size(memory)
        executor = open_executor(
            bundle, target, model.context_length, placement, memory=budget, max_requests=max_requests, buckets=buckets
        )
        if isinstance(executor, StaticShapes):
            prefill_chunk = prefill_chunk or executor.caps.max_tokens
        del files
        return_freed_memory()
        self._start(executor, model, tokenizer, _scheduler_config(max_requests, prefill_chunk))

    @classmethod
    def from_executor(
        cls,
        executor: Executor,
        model: ModelInfo,
        tokenizer: Tokenizer | None = None,
        *,
        max_requests: int = 64,
        prefill_chunk: int | None = None,
    ) -> LLM:
        """Serves an executor that you made yourself; it is closed with the LLM."""
        llm = cls.__new__(cls)
        llm._start(executor, model, tokenizer, _scheduler_config(max_requests, prefill_chunk))
        return llm

    def _start(
        self, executor: Executor, model: ModelInfo, tokenizer: Tokenizer | None, config: SchedulerConfig
    ) -> None:
        self.model = model
        self._executor = executor
        self._tokenizer = tokenizer
        self.engine = Engine(executor, config)
        self._loop = EngineLoop(self.engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises BundleError if the bundle has none; then prompts are token ids."""
        if self._tokenizer is None:
            raise BundleError(
                "the bundle has no tokenizer/tokenizer.json",
                hint="Export the model from a folder with its tokenizer; from Python, pass token ids instead of text.",
            )
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat`` and ``stream_chat`` work."""
        return self._tokenizer is not None and bool(self._tokenizer.chat_templates)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or several, together.

        Args:
            prompts: text or token ids; or a list of either.
            params: for all, or one for each; None is ``SamplingParams()``: greedy.

        Returns:
            One output a prompt, in their order; a list for a single prompt too.

        Raises:
            RequestError: a prompt is empty, too long, or has a token that isn't there; no request has run then.
            CapacityError: a request that the KV cache can't hold, with the memory that would.
        """
        return self._run_all([self._encode(p) for p in _listed(prompts)], params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several.

        ``variables`` go to the chat template: ``tools`` (JSON schemas or functions), ``documents``,
        ``continue_final_message``, and what else it reads (enable_thinking, ...); ``chat_template`` chooses one of
        several. See ``Tokenizer.encode_chat`` and ``ChatTemplate.render``.

        Raises what ``generate`` raises, and RequestError where the template refuses the messages.
        """
        several = bool(messages) and not isinstance(messages, Mapping) and not hasattr(messages[0], "keys")
        chats = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        return self._run_all([self.tokenizer.encode_chat(chat, **variables) for chat in chats], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamPiece, None, None]:
        """Completes one prompt piece by piece. Closing the generator aborts the request.

        A wrong prompt raises at once, and not at the first piece.
        """
        return self._stream(self._request(self._encode(prompt), params or SamplingParams()))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> Generator[StreamPiece, None, None]:
        """Answers a conversation piece by piece; see ``stream`` and ``chat``."""
        ids = self.tokenizer.encode_chat(messages, **variables)
        return self._stream(self._request(ids, params or SamplingParams()))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[StreamPiece, None]:
        """``stream`` for coroutines. Cancelling the task, or ``aclose``, aborts the request and frees its blocks."""
        return self._astream(self._request(self._encode(prompt), params or SamplingParams()))

    def astream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> AsyncGenerator[StreamPiece, None]:
        """``stream_chat`` for coroutines; see ``astream``."""
        ids = self.tokenizer.encode_chat(messages, **variables)
        return self._astream(self._request(ids, params or SamplingParams()))

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """The logits after every token of a text: [S] -> [S, V] float32. Raises what ``generate`` raises."""
        prompt = self._checked_ids(ids, self.model.context_length)
        logits = np.empty((len(prompt), self.model.vocab_size), np.float32)
        request = Request(prompt, SamplingParams(), max_tokens=0, logits=logits)
        with contextlib.closing(self._stream(request)) as pieces:
            for _ in pieces:
                pass
        return logits

    def default_params(self, **overrides: Any) -> SamplingParams:
        """What the model's makers recommend (temperature, top_k, ...), with your own values on top."""
        return SamplingParams.from_defaults(self.model.generation_defaults, **overrides)

    def info(self) -> dict[str, Any]:
        """What is loaded: the model, how it runs, and what the KV cache holds."""
        plan = PoolPlan.of(self._executor.cache_groups, self._executor.blocks)
        return {
            "model": self.model.name,
            "architecture": self.model.architecture,
            "parameters": self.model.parameters,
            "vocab_size": self.model.vocab_size,
            "context_length": self.model.context_length,
            "executor": self._executor.describe(),
            "kv_cache": str(plan),
            "kv_cache_bytes": plan.bytes,
            "kv_cache_tokens": plan.tokens,
            "kv_blocks_free": {name: pool.free_blocks for name, pool in self.engine.pools.items()},
            "preemptions": self.engine.preemptions,
            "buckets": self._executor.statistics() if isinstance(self._executor, StaticShapes) else [],
        }

    def close(self) -> None:
        """Ends every request and frees the memory. May be called again."""
        if self._loop.close():
            self._executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return self.tokenizer.encode(prompt) if prompt else []

    def _checked_ids(self, ids: Sequence[int], most: int) -> list[int]:
        try:
            prompt = [operator.index(i) for i in ids]
        except TypeError as e:
            raise RequestError(f"prompt: {e}", hint="Pass text or a list of token ids.") from e
        if not prompt:
            raise RequestError("prompt: it is empty", hint="Pass at least one token.")
        if len(prompt) > most:
            raise RequestError(
                f"prompt: it has {len(prompt)} tokens; the context of {self.model.context_length} tokens has room for "
                f"{most}",
                hint="Shorten the prompt.",
            )
        wrong = next((i for i in prompt if not 0 <= i < self.model.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"prompt: token {wrong} is outside the vocabulary of {self.model.vocab_size}",
                hint="Use the tokenizer of this bundle.",
            )
        return prompt

    def _request(self, ids: Sequence[int], params: SamplingParams) -> Request:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: {params!r} is no SamplingParams", hint="Pass SamplingParams(max_tokens=...).")
        context = self.model.context_length
        prompt = self._checked_ids(ids, context - 1)
        text = None
        if self._tokenizer is not None:
            text = OutputText(self._tokenizer.detokenizer(prompt), params.stop)
        elif params.stop:
            raise RequestError("stop: strings need a tokenizer, and the bundle has none", hint="Use stop_token_ids.")
        request = Request(
            prompt,
            params,
            end_token_ids=self.model.eos_token_ids,
            max_tokens=min(params.max_tokens, context - len(prompt)),
            text=text,
        )
        self.engine.scheduler.check(request)
        return request

    def _run_all(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"params: {len(params)} of them for {len(prompts)} prompts", hint="Pass one, or one for each prompt."
            )
        requests = [self._request(ids, p) for ids, p in zip(prompts, params, strict=True)]
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            for request in requests:
                self._loop.submit(request, events.put)
            unfinished = len(requests)
            while unfinished:
                unfinished -= _piece(events.get()).finish_reason is not None
        finally:  # nothing to do unless interrupted
            for request in requests:
                self._loop.abort(request)
        if len(requests) == 1 and requests[0].error is not None:
            raise requests[0].error
        return [request.to_output() for request in requests]

    def _stream(self, request: Request) -> Generator[StreamPiece, None, None]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            self._loop.submit(request, events.put)
            finished = False
            while not finished:
                piece = _piece(events.get())
                finished = piece.finish_reason is not None
                if piece.finish_reason == "error":
                    raise _error_of(request)
                yield piece
        finally:
            self._loop.abort(request)

    async def _astream(self, request: Request) -> AsyncGenerator[StreamPiece, None]:
        import asyncio  # who awaits this has it; nobody else waits for it

        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            self._loop.submit(request, put)
            finished = False
            while not finished:
                piece = _piece(await events.get())
                finished = piece.finish_reason is not None
                if piece.finish_reason == "error":
                    raise _error_of(request)
                yield piece
        finally:
            self._loop.abort(request)


def _error_of(request: Request) -> EnginewrightError:
    assert request.error is not None
    return request.error


def _piece(event: Event) -> StreamPiece:
    if isinstance(event, EnginewrightError):
        raise event
    return event


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str) or (len(prompts) and hasattr(prompts[0], "__index__")):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _scheduler_config(max_requests: int, prefill_chunk: int | None) -> SchedulerConfig:
    most = ExecutorCaps().max_tokens
    chunk = SchedulerConfig().prefill_tokens if prefill_chunk is None else prefill_chunk
    _check_int("max_requests", max_requests, 1, most)
    _check_int("prefill_chunk", chunk, 1, most)
    return SchedulerConfig(max_requests=max_requests, prefill_tokens=chunk)


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name}: {value!r} is out of range", hint=f"It must be an integer from {least} to {most}.")
