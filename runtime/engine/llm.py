"""``LLM``, which opens a bundle and serves requests."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from enginewright.runtime.executors.target import Placement

from ..bundle.reader import Bundle, Load
from ..executors.base import Executor
from ..executors.open import choose_target, context_of, open_executor
from ..executors.static_shapes import StaticShapes
from ..requests.names import checked_name
from ..requests.outputs import BeamSearchOutput, Classification, RequestOutput, StreamPiece
from ..requests.request_options import RequestArguments, RequestOptions
from ..requests.sampling import BeamSearchParams, SamplingParams, check_seed
from ..requests.vllm_names import OF_CHAT, OF_GENERATE, OF_LLM, check_nothing, one_of, takes_vllm_names
from ..scheduler.options import Scheduling
from ..shared.contracts import FloatArray, ModelInfo
from ..shared.memory import parse_size, return_freed_memory
from ..tasks import arguments
from ..tasks.arguments import Params, Prompt, check_int
from ..tasks.base import Prepared, Result, Task
from ..tasks.classify import Classify
from ..tasks.context import TaskContext
from ..tasks.embed import Embed
from ..tasks.hidden_states import HiddenStates
from ..tasks.logits import Logits
from ..tasks.rank import Rank
from ..text.tokenizer import Tokenizer
from .engine import Engine
from .engine_loop import EngineLoop, Listener
from .exported import exported
from .info import check_options, check_ray, describe, of_whole_texts, offload_of, partition_of, scheduler_config
from .prefixes import (
    DEFAULT_DAYS,
    DEFAULT_SIZE,
    close_tier,
    load_prefix,
    open_host_tier,
    open_tier,
    opened_tier,
    save_prefix,
)
from .proposer_setup import ProposerSetup
from .proposers import open_proposers
from .pulse import Pulse
from .request_maker import Options, of_chat, of_chats, of_prompt, of_prompts
from .run_requests import answers, answers_async, astream, stream, wanted
from .run_texts import TextCall, classifications

if TYPE_CHECKING:
    from ..text.chat_template import Message

MOST_THREADS = 1024
_OF_PARAMS = frozenset(field.name for field in fields(SamplingParams))


class LLM:
    """Runs the model of a bundle. If ``path`` is a model instead of a bundle, the model is exported first.

    An LLM is thread-safe. Requests of all threads and coroutines run in the same batches.

    On the cpu target, a request's tokens don't depend on the other requests of a batch. docs/inside/numerics.md
    describes the other targets.

    A process may exit while an LLM is open and streams are unfinished. In a forked child process every request raises
    EnginewrightError, because the child doesn't have its parent's threads; open the bundle again there.

    Args:
        path (in vLLM: model): a bundle; or a Hugging Face folder, a GGUF file or a Hub id ("org/name",
            "org/name:Q8_0"). Such a model is exported once into the export cache (`optimize cache`), with progress on
            stderr. This needs the extra "export", and may raise the errors of ``export``.
        recipe: the recipe for a model that is exported first. None is "gguf" for a quantized GGUF file, otherwise
            "int8".
        target: the bundle's target to run, such as "cpu" or "onnx". None is the first target that this machine can run
            and that ``trust`` allows.
        threads: the number of threads that compute, at most 1024; 0 is one per core. With several ranks, the number for
            each rank.
        ranks: the number of processes that run the model together, each with a part of it. On the cpu target the tokens
            don't depend on this number. On the cuda target each rank has a GPU. None is 1, which is this process; 2 is
            ``partition="tensor=2"``.
        partition: the way the model is divided among ranks, such as "tensor=2"; None uses ``ranks``.
        rank_timeout: the seconds without progress after which a rank counts as lost. All ranks then end.
        ray: HOST:PORT of a Ray cluster that this machine belongs to, or "auto". The ranks run on the cluster's
            machines, each of which must have the bundle at the same path. None runs the ranks on this machine.
        isa: the instruction set of the cpu target, such as "avx2"; None is the best that the processor supports.
        provider: for the onnx target, onnxruntime's execution provider ("cpu", "cuda", "tensorrt-rtx", "directml",
            "openvino"). For stablehlo "cpu", "iree" or the name of a PJRT plugin. None is "cpu", or "iree" for
            stablehlo without jaxlib.
        context: the most tokens of a request and its answer; None is the model's context. On the onnx target, memory
            for this number of tokens is reserved for each request.
        memory: the most memory of the KV cache, in bytes or as text such as "512MiB"; None is a quarter of the free
            memory. Less is used if it suffices for ``max_requests`` requests with full context.
        states_memory: the part of ``memory`` for snapshots of recurrent layers' states. The least recently used
            snapshots are evicted. None is enough for ``max_requests`` snapshots.
        max_requests: the most requests that run at the same time; further requests wait.
        prefill_chunk: the most prompt tokens of a step; None is 512, or the largest bucket if steps use buckets.
        buckets: True pads steps to the fixed sizes (buckets) in the bundle, if it has any; False runs steps of any
            size.
        verify: True checks the hashes of all files first, which reads the whole bundle. None checks the weights while
            the first steps run. If a file was altered, later requests end with BundleError, but earlier requests may
            already have ended; ``check_weights`` waits for the check. False checks no hash.
        trust: the bundles whose code may run. The targets tvm, stablehlo, cuda, tensorrt-rtx and tensorrt contain code
            that can do whatever a program can. None forbids these targets. "code" allows the code of any bundle, and
            "sha256:..." only that of the bundle with this hash, which `optimize inspect` shows.
        prefix_cache: True keeps computed KV blocks for later requests with the same beginning. The tokens don't depend
            on it. A target that can't share blocks keeps none (``info()["prefix_cache"]`` is None then).
        speculate: the method that proposes tokens, which the model verifies; the answers don't depend on it. "lookup"
            proposes the tokens that followed an earlier occurrence of the last few tokens. The path of a faster bundle
            with the same vocabulary adds that bundle's proposals. Proposals are verified on the cpu target, and on the
            cuda target with an exact recipe. On these targets without ``buckets``, "auto" is "lookup"; otherwise None.
        scheduling: "fcfs" (first come, first served) or None, which is the same; "priority", "fair", "offline", or a
            ``Scheduling``.
        prefix_memory: pinned main memory for KV blocks that are evicted from the GPU's memory, in bytes or as text such
            as "16GiB". Only for the cuda target on one GPU.
        prefix_folder: a folder for KV blocks that are evicted from the prefix cache; later processes can read them. The
            folder is created if needed. It must belong to the user alone, because it contains conversations. None
            writes no files.
        prefix_folder_size: the most bytes of the folder's files, or text such as "8GiB"; the least recently used are
            deleted.
        prefix_folder_days: when the folder is opened, files that weren't used for this number of days are deleted.
        offload_folder: a folder for keys and values that an adaptive context doesn't need in the current step. A
            context can then be larger than ``memory``. The folder is created if needed, must belong to the user alone,
            and is empty afterwards. Only for the cpu target and bundles with an adaptive context.
        offload_size: the most bytes in ``offload_folder``, or text such as "8GiB".
        load: "map" maps the weights of the cpu target from their files. A changed file is noticed before the next step
            (BundleError), but a file that is truncated during a step ends the process (SIGBUS). "read" copies the
            weights into memory.
        seed: the seed of requests that have no seed; None is 0.

    vLLM's other arguments are accepted if they have another name here, if no result depends on them, or if their value
    changes nothing. All others raise RequestError with a hint.

    Attributes:
        model: facts about the model, from the bundle.
        engine: the engine. Only its own thread may call it; other threads may read its pools and counters.

    Raises:
        BundleError: the bundle is missing, damaged or too new, or has no such target; the message names the file and
            field.
        TrustError: the target has code that ``trust`` doesn't allow. It is a BundleError.
        CapacityError: ``memory`` is too small for a KV block, or ``context`` is more than the model's.
        OffloadError: ``offload_folder`` can't be used. It is a CapacityError.
        RequestError: an option is invalid, or the model can't be divided among this many ranks.
        MissingDependencyError: a package that the target or Ray needs is missing or too old.
    """

    _bundle: Bundle | None = None  # of from_executor's, none

    @takes_vllm_names(OF_LLM, of_params=_OF_PARAMS)
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: str | os.PathLike[str] | None = None,
        recipe: str | os.PathLike[str] | None = None,
        target: str | None = None,
        threads: int = 0,
        ranks: int | None = None,
        partition: str | None = None,
        rank_timeout: float = 30.0,
        ray: str | None = None,
        isa: str | None = None,
        provider: str | None = None,
        context: int | None = None,
        memory: int | str | None = None,
        states_memory: int | str | None = None,
        max_requests: int = 64,
        prefill_chunk: int | None = None,
        buckets: bool = True,
        prefix_cache: bool = True,
        speculate: str | os.PathLike[str] | None = "auto",
        scheduling: Scheduling | Mapping[str, Any] | str | None = None,
        prefix_memory: int | str | None = None,
        prefix_folder: str | os.PathLike[str] | None = None,
        prefix_folder_size: int | str = DEFAULT_SIZE,
        prefix_folder_days: float = DEFAULT_DAYS,
        offload_folder: str | os.PathLike[str] | None = None,
        offload_size: int | str = DEFAULT_SIZE,
        verify: bool | None = None,
        load: Load = "map",
        trust: str | None = None,
        seed: int | None = None,
    ) -> None:
        path = one_of(path=path, model=model)
        config = scheduler_config(max_requests, prefill_chunk, prefix_cache, scheduling, speculate, states_memory)
        threads = check_int("threads", threads, 0, MOST_THREADS)
        check_options(
            path=path, recipe=recipe, target=target, isa=isa, provider=provider, context=context, memory=memory
        )
        check_options(buckets=buckets, prefix_cache=prefix_cache, prefix_folder=prefix_folder)
        check_options(verify=verify, prefix_folder_days=prefix_folder_days, load=load, rank_timeout=rank_timeout)
        cut = partition_of(ranks, partition)
        check_ray(ray, cut, prefix_folder)
        parse_size(prefix_folder_size, "prefix_folder_size")
        copies = None if prefix_memory is None else parse_size(prefix_memory, "prefix_memory")
        offload = offload_of(offload_folder, offload_size, prefix_folder)
        budget = None if memory is None else parse_size(memory)
        seed = check_seed(seed)
        assert path is not None
        bundle = Bundle.open(exported(path, recipe), trust)
        if verify:
            bundle.verify_hashes()
        elif verify is None:
            bundle.hash_weights_beside()
        target = choose_target(bundle, target)
        info = replace(bundle.model, context_length=context_of(bundle, context, target))
        tokenizer = Tokenizer.of_bundle(bundle)  # may raise: before threads are started
        placement = Placement(
            threads, isa, provider, load=load, partition=cut, rank_timeout=rank_timeout, ray=ray, offload=offload
        )
        context = info.context_length
        if info.pooling is not None:
            config = of_whole_texts(config, speculate)
        setup = ProposerSetup(speculate, bundle, target, placement, context, config, budget)
        proposers, budget = open_proposers(setup)
        executor = open_executor(bundle, target, context, placement, config, memory=budget, buckets=buckets)
        if isinstance(executor, StaticShapes):
            if not prefill_chunk:
                config = replace(config, prefill_tokens=executor.caps.max_tokens)
            if config.speculate is None:  # a few rows more may need a bucket of many
                config = replace(config, speculate=False)
        return_freed_memory()
        self._start(Engine(executor, config, proposers), info, tokenizer, seed)
        self._name, self._bundle = bundle.path.name, bundle
        disk = None
        try:
            if prefix_folder is not None:
                disk = open_tier(executor, self._cache, prefix_folder, prefix_folder_size, prefix_folder_days)
                self._cache.tier = disk
            if copies is not None:
                self._cache.tier = open_host_tier(executor, self._cache, copies, disk)
        except BaseException:
            self.close()
            raise

    def check_weights(self, timeout: float | None = None) -> bool:
        """Waits until the hashes of all weights are checked, at most ``timeout`` seconds.

        Returns True if all hashes are right, and False after ``timeout`` seconds. It also returns False if ``verify``
        isn't None, because nothing is checked during the first steps then.

        Raises:
            BundleError: a file of weights was altered, so earlier answers may be wrong.
        """
        return self._bundle is not None and self._bundle.weights_hashed(timeout)

    @classmethod
    def from_executor(
        cls,
        executor: Executor,
        model: ModelInfo,
        tokenizer: Tokenizer | None = None,
        *,
        max_requests: int = 64,
        prefill_chunk: int | None = None,
        prefix_cache: bool = True,
        scheduling: Scheduling | Mapping[str, Any] | str | None = None,
    ) -> LLM:
        """Serves an executor that the caller made; it is closed with the LLM. The other arguments are those of the
        class.
        """
        llm = cls.__new__(cls)
        config = scheduler_config(max_requests, prefill_chunk, prefix_cache, scheduling)
        llm._start(Engine(executor, config), model, tokenizer)
        return llm

    def _start(self, engine: Engine, model: ModelInfo, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self.model = model
        self.engine = engine
        self._executor = engine.executor
        self._name, self._target = model.name, str(engine.executor.describe()["target"])
        self._context = TaskContext(model, tokenizer, self.engine.scheduler, engine.executor, seed)
        self._loop = EngineLoop(self.engine)
        self._cache = self.engine.scheduler.cache
        self._has_chat_template = tokenizer is not None and bool(tokenizer.chat_templates)

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError if it has none; then prompts must be token ids."""
        return self._context.tokenizer

    def get_tokenizer(self, lora_request: None = None) -> Tokenizer:
        """Returns the attribute ``tokenizer``; vLLM has this method."""
        check_nothing("lora_request", lora_request, OF_GENERATE)
        return self.tokenizer

    @property
    def target(self) -> str:
        """The name of the target that runs."""
        return self._target

    @property
    def bundle_hash(self) -> str:
        """The bundle's hash, as `optimize inspect` shows it; "" without a bundle."""
        return "" if self._bundle is None else self._bundle.hash

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template, so that ``chat`` and ``stream_chat`` work."""
        return self._has_chat_template

    @takes_vllm_names(OF_GENERATE, of_params=_OF_PARAMS, further=RequestOptions.__struct_fields__)
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> list[RequestOutput]:
        """Completes one prompt or several.

        Args:
            prompts: a prompt or several. A prompt is text, token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``.
            params (in vLLM: sampling_params): a ``SamplingParams`` for all prompts, or one for each. None is
                ``SamplingParams()``.
            progress (in vLLM: use_tqdm): True shows a progress bar on stderr. None shows it on a terminal for 8 prompts
                or more.
            raise_errors: the way an error of one request is reported, for example if its logits are NaN. False sets
                ``error`` of the request's output, and its finish_reason to "error". True raises the error after all
                requests have ended. None raises it only for a single prompt that isn't in a list.
            tenant: the owner of the prompts. A request reuses only cached prefixes of its tenant.
            priority: a number; requests with a lower number run first. As in vLLM, it may be a list with one for each
                prompt. None is the priority of the class.
            request_class: the name of one of the classes in ``scheduling``, which have latency targets.

        Returns:
            A list with one output per prompt, in order, even for a single prompt.

        Raises:
            RequestError: a prompt is empty, too long, of a wrong type, or has an unknown token. No request has run.
            CapacityError: the KV cache is too small for a request; the message has the memory that it needs.
            EnginewrightError: the engine failed, so that all requests failed; or one request failed (see
                ``raise_errors``).
        """
        call = Options(options, params, sampling_params, raise_errors)
        requests, raised = of_prompts(self._context, prompts, call)
        return answers(self._loop, requests, raised, wanted(progress, use_tqdm))

    @takes_vllm_names(OF_CHAT, open_ended=True)
    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        params: Params = None,
        *,
        sampling_params: Params = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        raise_errors: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several.

        The chat template gets ``variables`` and vLLM's ``chat_template_kwargs``: ``tools`` (JSON schemas or functions),
        ``documents``, ``continue_final_message``, and any other variable that the template uses, such as
        enable_thinking. If the model has several templates, ``chat_template`` selects one.

        An output's ``message`` has the answer's content, reasoning and tool calls. Three variables restrict answers, as
        in OpenAI's API. ``tool_choice`` is "auto", "required", "none" or a tool's name. ``parallel_tool_calls=False``
        allows at most one call. ``response_format`` is a JSON schema in OpenAI's form, or a pydantic model; it applies
        to the text after the reasoning. If a tool's ``strict`` is True, calls of the tool follow the tool's schema.

        The other arguments, including ``tenant``, ``priority`` and ``request_class``, are those of ``generate``.

        Raises the errors of ``generate``, and RequestError if the template rejects the messages.
        """
        options = RequestOptions.taken_from(variables)
        variables = arguments.template_variables(chat_template_kwargs, variables)
        call = Options(options, params, sampling_params, raise_errors)
        requests, raised = of_chats(self._context, messages, call, variables)
        return answers(self._loop, requests, raised, wanted(progress, use_tqdm))

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | None = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Completes prompts by beam search, with vLLM's arguments. ``SamplingParams.num_beams`` describes the
        algorithm.

        Args:
            prompts: as for ``generate``.
            params: a ``BeamSearchParams`` with the number of beams and the most tokens of each.
            lora_request: must be None, because a request can't choose adapters.
            use_tqdm: True shows a progress bar on stderr.
            concurrency_limit: ignored; ``LLM(max_requests=...)`` limits the requests that run at the same time.

        Returns:
            One output per prompt, with ``beam_width`` sequences.

        Raises the errors of ``generate``.
        """
        check_nothing("lora_request", lora_request, OF_GENERATE)
        arguments.check_type("params", params, (BeamSearchParams,), "BeamSearchParams(beam_width=..., max_tokens=...)")
        results = self.generate(prompts, params.sampling(), use_tqdm=use_tqdm, raise_errors=True)
        decode = partial(self.tokenizer.decode, skip_special_tokens=False) if self._context.has_tokenizer else None
        return [BeamSearchOutput.from_result(result, decode) for result in results]

    async def agenerate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> list[RequestOutput]:
        """Runs ``generate`` without blocking the event loop. Cancelling the task aborts the requests and frees their
        blocks.
        """
        call = Options(options, params, sampling_params, raise_errors)
        return await answers_async(self._loop, *of_prompts(self._context, prompts, call))

    async def achat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        params: Params = None,
        *,
        sampling_params: Params = None,
        raise_errors: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Runs ``chat`` without blocking the event loop; see ``agenerate``."""
        options = RequestOptions.taken_from(variables)
        variables = arguments.template_variables(chat_template_kwargs, variables)
        call = Options(options, params, sampling_params, raise_errors)
        return await answers_async(self._loop, *of_chats(self._context, messages, call, variables))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestArguments],
    ) -> Generator[StreamPiece, None, None]:
        """Completes one prompt and yields the answer piece by piece. Closing the generator aborts the request.

        An invalid prompt raises an error at the call, not at the first piece.
        """
        return stream(self._loop, of_prompt(self._context, prompt, Options(options, params)))

    def stream_chat(
        self,
        messages: Iterable[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> Generator[StreamPiece, None, None]:
        """Answers one conversation and yields the answer piece by piece; see ``stream`` and ``chat``."""
        call = Options(RequestOptions.taken_from(variables), params)
        return stream(self._loop, of_chat(self._context, messages, call, variables))

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestArguments],
    ) -> AsyncGenerator[StreamPiece, None]:
        """Runs ``stream`` without blocking the event loop. Cancelling the task, or ``aclose``, aborts the request."""
        return astream(self._loop, of_prompt(self._context, prompt, Options(options, params)))

    def astream_chat(
        self,
        messages: Iterable[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Runs ``stream_chat`` without blocking the event loop; see ``astream``."""
        call = Options(RequestOptions.taken_from(variables), params)
        return astream(self._loop, of_chat(self._context, messages, call, variables))

    def run(self, task: Task[Result], **options: Unpack[RequestArguments]) -> Result:
        """Runs a task and returns its result. The classes of tasks are in ``runtime.tasks``.

        The other arguments and the errors are those of ``generate``.
        """
        return answers(self._loop, [self.prepare(task, **options)], True)[0]

    async def arun(self, task: Task[Result], **options: Unpack[RequestArguments]) -> Result:
        """Runs ``run`` without blocking the event loop; see ``agenerate``."""
        return (await answers_async(self._loop, [self.prepare(task, **options)], True))[0]

    def prepare(self, task: Task[Result], **options: Unpack[RequestArguments]) -> Prepared[Result]:
        """Checks a task and makes its requests, to be started with ``submit``. Programs with their own event loop use
        it.

        ``Generate(prompt, params)`` is the task of ``generate``; arguments and errors are those of ``generate``.
        """
        return task.prepare(self._context, RequestOptions(**options))  # type: ignore[arg-type]

    def submit(self, prepared: Prepared[Any], listener: Listener) -> None:
        """Starts the requests of a task.

        Args:
            prepared: the result of ``prepare``; it can be submitted once.
            listener: called with each piece, of which the last of an answer has a finish_reason; or with an error,
                after which there are no more pieces. The engine's thread calls it between two steps, so it must be
                quick.

        Raises CapacityError or EnginewrightError if the requests can't run.
        """
        self._loop.submit(listener, *prepared.requests)

    def after_step(self, call: Callable[[], None]) -> None:
        """Sets a function that the engine's thread calls after each step, when the listeners have all pieces.

        It must be quick.
        """
        self._loop.after_step = call

    def abort(self, prepared: Prepared[Any]) -> None:
        """Ends the requests of a task before the next step, without calling their listener. Does nothing if they have
        ended.
        """
        for request in prepared.requests:
            self._loop.abort(request)

    def pulse(self) -> Pulse:
        """Returns the engine's load and the duration of the current step.

        It doesn't wait for the step, for use by watchdogs.
        """
        return Pulse.measured(self._loop)

    @property
    def lost(self) -> str:
        """The reason why no request can run any more, such as a rank that died; "" if requests can run."""
        return str(getattr(self._executor, "lost", ""))

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """Returns the logits after each of S tokens, for a vocabulary of V tokens: float32 [S, V].

        Raises the errors of ``generate``.
        """
        return self.run(Logits(ids))

    def hidden_states(self, prompt: Prompt, layers: Sequence[int] = (-1,)) -> FloatArray:
        """Returns the inputs of chosen layers for the S tokens of a prompt: float32 [layers, S, hidden size].

        The targets cpu, tvm and cuda support it, except with a pipeline, and except for several ranks on cuda.

        Args:
            prompt: text or token ids.
            layers: numbers as in transformers' ``hidden_states``: 0 is the first layer's input, -1 the final norm's
                output.

        Raises the errors of ``generate``, and RequestError if the target can't return a layer's input. In formats such
        as int8, -1 can't be returned, because the final norm rounds its output.
        """
        return self.run(HiddenStates(prompt, layers))

    @takes_vllm_names({}, further=RequestOptions.__struct_fields__)
    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        progress: bool | None = None,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> FloatArray:
        """Returns the vectors of n texts, each with E numbers: float32 [n, E]. A text outside a list gives [E].

        A vector's bits don't depend on other texts, on the batch, or on the number of threads.

        Args:
            texts: a text or several. A text may be token ids, which must then include all special tokens.
            prompt: the name of one of the model's prompts, such as "query"; ``info()["pooling"]`` lists them. The
                prompt is put before each text, but not before token ids. None is the model's default, "" is no prompt.
            dimensions: the length of the returned vectors, if the model can shorten them. None returns whole vectors.
            normalize: True divides each vector by its length, after ``dimensions``. None is the model's default.
            truncate: True cuts texts that are longer than the model's context; False refuses them.
            progress: True shows a progress bar on stderr. None shows it on a terminal for 8 texts or more.
            raise_errors: the way an error of one text is reported, for example if its numbers are NaN. False makes the
                text's row NaN. True raises the error after all texts have ended. None raises it for a text that
                isn't in a list; in a list it makes the row NaN, with a RuntimeWarning.
            tenant, priority, request_class: as for ``generate``.

        Raises:
            RequestError: the model isn't an embedding model, a text is empty or of a wrong type, or the model has no
                such prompt or dimensions. No text was computed.
            ContextError: a text is too long; the message names the text. It is a RequestError.
            EnginewrightError: the engine failed, or one text failed (see ``raise_errors``).
        """
        task = Embed(texts, truncate, prompt, dimensions, normalize)
        call = TextCall.begin(self._context, task, options, raise_errors)
        return call.run(self._loop, wanted(progress, None)).result()

    @takes_vllm_names({}, further=RequestOptions.__struct_fields__)
    def score(
        self,
        query: str | Iterable[str],
        documents: str | Iterable[str],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        progress: bool | None = None,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> FloatArray:
        """Returns a reranker's scores of n documents for a query: float32 [n].

        One document that isn't in a list gives the shape [].

        Args:
            query: a text, or one for each document.
            documents: a text, or several.
            truncate: True cuts pairs that are longer than the model's context; the longer text of a pair is cut first.
            raw_scores: True returns the scores before the model's final function, such as sigmoid.
            progress, raise_errors, tenant, priority, request_class: as for ``embed``.

        Raises the errors of ``embed``.
        """
        task = Rank(query, truncate, documents, raw_scores)
        call = TextCall.begin(self._context, task, options, raise_errors)
        return call.run(self._loop, wanted(progress, None)).result()

    @takes_vllm_names({}, further=RequestOptions.__struct_fields__)
    def classify(
        self,
        texts: Prompt | Iterable[Prompt | tuple[str, str]],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        progress: bool | None = None,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> list[Classification]:
        """Returns the classes of each text, or of each of its tokens if the model classifies tokens.

        Args:
            texts: as for ``embed``; an item of a list may be a pair of texts.
            truncate: as for ``score``.
            raw_scores: True returns the scores before the model's final function, such as softmax.
            progress, tenant, priority, request_class: as for ``embed``.
            raise_errors: as for ``embed``; if the error isn't raised, it is in ``error`` of the text's result.

        Returns:
            A list with one result per text, in order, even for a single text.

        Raises the errors of ``embed``.
        """
        task = Classify(texts, truncate, raw_scores)
        call = TextCall.begin(self._context, task, options, raise_errors)
        return classifications(call.run(self._loop, wanted(progress, None)))

    async def aembed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> FloatArray:
        """Runs ``embed`` without blocking the event loop; see ``agenerate``."""
        task = Embed(texts, truncate, prompt, dimensions, normalize)
        return (await TextCall.begin(self._context, task, options, raise_errors).arun(self._loop)).result()

    async def ascore(
        self,
        query: str | Iterable[str],
        documents: str | Iterable[str],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> FloatArray:
        """Runs ``score`` without blocking the event loop; see ``agenerate``."""
        task = Rank(query, truncate, documents, raw_scores)
        return (await TextCall.begin(self._context, task, options, raise_errors).arun(self._loop)).result()

    async def aclassify(
        self,
        texts: Prompt | Iterable[Prompt | tuple[str, str]],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        raise_errors: bool | None = None,
        **options: Unpack[RequestArguments],
    ) -> list[Classification]:
        """Runs ``classify`` without blocking the event loop; see ``agenerate``."""
        task = Classify(texts, truncate, raw_scores)
        return classifications(await TextCall.begin(self._context, task, options, raise_errors).arun(self._loop))

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the result of ``default_params``; vLLM has this method."""
        return self.default_params()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Returns the sampling parameters that the model's makers recommend, except for ``overrides``."""
        return SamplingParams.from_defaults(self.model.generation_defaults, **overrides)

    def info(self) -> dict[str, Any]:
        """Returns facts about the model, executor, scheduler and KV cache, as JSON values."""
        return describe(self.model, self._executor, self.engine)

    def save_prefix(self, prompt: Prompt, folder: str | os.PathLike[str], *, tenant: str = "") -> int:
        """Computes a prompt's keys and values, unless they are cached, and writes them to a folder for ``load_prefix``.

        The folder must belong to the user alone. Its files are authenticated by a key that is stored elsewhere.

        Returns:
            The number of tokens at the prompt's beginning that the folder now has, a multiple of 32.

        Raises the errors of ``generate``, and RequestError if the target has no prefix cache.
        """
        params = SamplingParams(max_tokens=1)
        with opened_tier(self._executor, self._cache, folder) as disk:
            self.generate([prompt], params, tenant=tenant, progress=False)
            request = of_prompt(self._context, prompt, Options({"tenant": tenant}, params)).requests[0]
            return self._loop.call(partial(save_prefix, self._cache, request, disk))

    def load_prefix(self, prompt: Prompt, folder: str | os.PathLike[str], *, tenant: str = "") -> int:
        """Reads the blocks that ``save_prefix`` wrote for this prompt, or for one with the same beginning, into the
        prefix cache.

        Returns:
            The number of tokens at the prompt's beginning that are now in the cache. Files of another model, format or
            instruction set are ignored, and damaged files too (with a RuntimeWarning).

        Raises the errors of ``save_prefix``.
        """
        with opened_tier(self._executor, self._cache, folder) as disk:
            options = Options({"tenant": tenant}, SamplingParams(max_tokens=1))
            request = of_prompt(self._context, prompt, options).requests[0]
            return self._loop.call(partial(load_prefix, self._cache, request, disk))

    def delete_prefixes(self, *, tenant: str | None = None) -> int:
        """Deletes the cached prefixes of one tenant; None deletes those of all tenants. Returns the number of deleted
        files in ``prefix_folder``.
        """
        whose = None if tenant is None else checked_name("tenant", tenant)
        return self._loop.call(partial(self.engine.scheduler.forget, whose))

    def close(self) -> None:
        """Ends all requests, writes cached blocks to ``prefix_folder``, and frees the memory.

        A second call does nothing.
        """
        if self._loop.close():
            close_tier(self._cache)
            self.engine.close()
            self._context.close()

    def __repr__(self) -> str:
        return f"LLM({self._name!r}, target={self._target!r}, context={self.model.context_length})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
