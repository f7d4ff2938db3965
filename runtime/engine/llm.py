"""``LLM``: a bundle, ready to answer."""

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
from ..requests.outputs import BeamSearchOutput, RequestOutput, StreamPiece
from ..requests.request_options import RequestArguments, RequestOptions
from ..requests.sampling import BeamSearchParams, SamplingParams, check_seed
from ..requests.vllm_names import OF_CHAT, OF_GENERATE, OF_LLM, check_nothing, one_of, takes_vllm_names
from ..scheduler.options import Scheduling
from ..shared.contracts import FloatArray, ModelInfo
from ..shared.memory import parse_size, return_freed_memory
from ..tasks import arguments
from ..tasks.arguments import Params, Prompt, check_int
from ..tasks.base import Prepared, Result, Task
from ..tasks.context import TaskContext
from ..tasks.hidden_states import HiddenStates
from ..tasks.score import Score
from ..text.tokenizer import Tokenizer
from .engine import Engine
from .engine_loop import EngineLoop, Listener
from .exported import exported
from .info import check_options, check_ray, describe, offload_of, partition_of, scheduler_config
from .prefixes import DEFAULT_DAYS, DEFAULT_SIZE, load_prefix, open_tier, opened_tier, save_prefix
from .proposer_setup import ProposerSetup
from .proposers import open_proposers
from .pulse import Pulse
from .request_maker import Options, of_chat, of_chats, of_prompt, of_prompts
from .run_requests import answers, answers_async, astream, stream, wanted

if TYPE_CHECKING:
    from ..text.chat_template import Message

MOST_THREADS = 1024
_OF_PARAMS = frozenset(field.name for field in fields(SamplingParams))


class LLM:
    """Serves a bundle, or a model that it exports first.

    Safe to use from any number of threads and coroutines: their requests share the steps.

    On the cpu target a request's tokens are batch-invariant; docs/inside/numerics.md says what holds on others.

    A process may end with an LLM open, and with streams of it. A forked child has none of its parent's threads: there
    every request of this LLM is an EnginewrightError, and the bundle is to be opened again.

    Args:
        path (vLLM: model): a bundle; or a Hugging Face folder, a GGUF file or a Hub id ("org/name", "org/name:Q8_0").
            Such a model is exported first, once, into the cache of exports (`optimize cache`), with progress on stderr.
            Exporting needs the extra "export"; see ``export`` for what else it raises.
        recipe: of a model that is exported first. None takes gguf for a quantized GGUF file, else int8.
        target: which of its targets to run; None takes the first of "cpu", "onnx", "tensorrt-rtx", "tensorrt", "cuda",
            "tvm", "stablehlo" that it has and ``trust`` allows.
        threads: of the kernels, at most 1024; 0 takes as many as there are cores. With ranks: of each.
        ranks: processes that run the model together, each on a part of it; the tokens of the cpu target are the same.
            The cuda target has a GPU for each. None is 1, which is this process; 2 is ``partition="tensor=2"``.
        partition: how the model is cut, such as "tensor=2"; None: as ``ranks`` says.
        rank_timeout: seconds that a rank may make no progress, while others wait for it, before all are ended.
        ray: HOST:PORT of a Ray cluster that this machine belongs to, or "auto": ranks are on its machines, each of
            which has the bundle at the same path. None: they are processes of this machine.
        isa: instruction set of the cpu target, such as "avx2" (see ``CpuExecutor``); None takes the best there is.
        provider: onnxruntime's execution provider for the onnx target ("cpu", "cuda", "tensorrt-rtx", "directml",
            "openvino"); of stablehlo "cpu", "iree" or a PJRT plugin's name; None takes "cpu".
        context: most tokens of a request with its answer; None takes the model's. onnx has a slot so long for each.
        memory: budget of the KV cache, in bytes or as "512MiB"; None takes a quarter of the free memory. Never more
            than ``max_requests`` requests of full context need.
        max_requests: most requests that run at a time; more wait.
        prefill_chunk: most prompt tokens of a step, over all requests; None takes 512, or with ``buckets`` the largest.
        buckets: where the bundle has static-shape buckets, steps have their sizes; False runs any size.
        verify: True checks the hashes of all files first (reads the whole bundle). None hashes the weights beside the
            first steps, on a thread of the lowest priority. Where a file was altered, requests end with BundleError
            as soon as that is known. The first ones may end before; ``check_weights`` waits. False looks at no hash.
        trust: what may run of the code that bundles carry for some targets (tvm, stablehlo, cuda, tensorrt-rtx,
            tensorrt), which can do whatever a program can. None: nothing, so that those targets aren't opened. "code":
            all of it. "sha256:...": of the bundle of that hash alone, as `optimize inspect` shows it.
        prefix_cache: keep what was computed, for requests that begin alike; tokens are the same without it. Where the
            target can't share blocks, nothing is kept (``info()["prefix_cache"]`` is None).
        speculate: "lookup" computes tokens ahead that stood behind the same few before; the path of a faster bundle
            with the same vocabulary, those that it guesses too. The tokens are the same. The cpu target alone has it.
            "auto" is "lookup" there, but not with ``buckets``; elsewhere it is None, which computes none ahead.
        scheduling: None or "fcfs": first come, first served. Else "priority", "fair", "offline", or a ``Scheduling``.
        prefix_folder: where what leaves the prefix cache goes, to be read again, in a later process too. None: nowhere,
            as conversations would lie there. Made if it isn't there; it must be the user's alone.
        prefix_folder_size: of all its files, in bytes or as "8GiB"; what was used least is deleted.
        prefix_folder_days: what wasn't used for so long is deleted when the folder is opened.
        offload_folder: where keys and values wait that an adaptive context doesn't look at just now, so that a context
            larger than ``memory`` runs. None: all of them stay in memory. Made if it isn't there; it must be
            the user's alone, and nothing stays in it. The cpu target, of bundles with an adaptive context.
        offload_size: most bytes there, or a size such as "8GiB".
        load: "map" maps the cpu target's weights; a file that changes is noticed before the next step (BundleError),
            but cut off during a step it ends the process (SIGBUS). "read" copies the weights into memory.
        seed: another one draws other tokens for all requests that name no seed; None is 0.

    vLLM's other arguments are taken where they have another name here, where no result depends on them, or where they
    ask for nothing. Any other is a RequestError that says what to do instead.

    Attributes:
        model: what the bundle says of the model.
        engine: for a look at pools and counters; its thread is the only one that may call it.

    Raises:
        BundleError: the bundle is missing, damaged, too new, or has no such target; names file and field.
        TrustError: the target carries code, and ``trust`` doesn't allow it; a BundleError.
        CapacityError: ``memory`` holds no KV block, or ``context`` is more than the model has.
        OffloadError: ``offload_folder`` can't be used; a CapacityError.
        RequestError: an option is wrong, or the model can't be cut into so many ranks.
        MissingDependencyError: what the target runs on, or what joins machines, is not installed, or too old.
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
        max_requests: int = 64,
        prefill_chunk: int | None = None,
        buckets: bool = True,
        prefix_cache: bool = True,
        speculate: str | os.PathLike[str] | None = "auto",
        scheduling: Scheduling | Mapping[str, Any] | str | None = None,
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
        config = scheduler_config(max_requests, prefill_chunk, prefix_cache, scheduling, speculate)
        threads = check_int("threads", threads, 0, MOST_THREADS)
        check_options(
            path=path, recipe=recipe, target=target, isa=isa, provider=provider, context=context, memory=memory
        )
        check_options(buckets=buckets, prefix_cache=prefix_cache, prefix_folder=prefix_folder)
        check_options(verify=verify, prefix_folder_days=prefix_folder_days, load=load, rank_timeout=rank_timeout)
        cut = partition_of(ranks, partition)
        check_ray(ray, cut, prefix_folder)
        parse_size(prefix_folder_size, "prefix_folder_size")
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
        if prefix_folder is not None:
            self._cache.disk = open_tier(executor, self._cache, prefix_folder, prefix_folder_size, prefix_folder_days)

    def check_weights(self, timeout: float | None = None) -> bool:
        """Waits until the weights are hashed, or for so many seconds; False if they aren't yet, or nothing hashes them.

        Raises:
            BundleError: a file of weights isn't what was exported: answers that were made with it may be wrong.
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
        """Serves an executor that you made yourself; it is closed with the LLM."""
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
        """Raises BundleError if the bundle has none; then prompts are token ids."""
        return self._context.tokenizer

    def get_tokenizer(self, lora_request: None = None) -> Tokenizer:
        """``tokenizer``, under vLLM's name."""
        check_nothing("lora_request", lora_request, OF_GENERATE)
        return self.tokenizer

    @property
    def target(self) -> str:
        """The target that runs."""
        return self._target

    @property
    def bundle_hash(self) -> str:
        """The bundle's hash, as `optimize inspect` shows it; empty without a bundle."""
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
        """Completes one prompt or several, together.

        Args:
            prompts: text or token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; or several of these.
            params (vLLM: sampling_params): for all, or one for each; None is ``SamplingParams()``: greedy.
            progress (vLLM: use_tqdm): a bar on stderr. None: where that is a terminal and there are 8 prompts or more.
            raise_errors: what is done about a request that ends with an error of its own (its logits are NaN). False:
                its output has it as ``error``, and finish_reason "error". True: it is raised, when all have ended.
                None: raised for one prompt that isn't in a list, so that no other's result is lost.
            tenant: whose prompts these are. Only requests of the same tenant find each other's prefixes.
            priority: lower goes first; one for all, or as vLLM has it one for each prompt. None is the class's.
            request_class: one of ``scheduling``'s classes, with targets for its times.

        Returns:
            One output a prompt, in their order; a list for a single prompt too.

        Raises:
            RequestError: a prompt is empty, too long, of a wrong type, or has a token that isn't there; no request has
                run then.
            CapacityError: a request that the KV cache can't hold, with the memory that would.
            EnginewrightError: the engine failed, and with it all requests; or see ``raise_errors``.
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

        ``variables``, and vLLM's ``chat_template_kwargs``, go to the chat template: ``tools`` (JSON schemas or
        functions), ``documents``, ``continue_final_message``, and what else it reads (enable_thinking, ...);
        ``chat_template`` chooses one of several. See ``Tokenizer.render_chat`` and ``ChatTemplate.render``.

        ``message`` of a result has content, reasoning and calls. Three variables have OpenAI's names, and say what
        answers are held to. ``tool_choice`` is "auto", "required", "none" or a tool's name.
        ``parallel_tool_calls=False`` allows one call at most. ``response_format`` is a JSON schema in OpenAI's form,
        or a pydantic model; it begins behind the reasoning. A tool whose ``strict`` is True gets what its schema
        allows. See ``ChatFormat.grammar``.

        The other arguments, among them ``tenant``, ``priority`` and ``request_class``, are those of ``generate``.

        Raises what ``generate`` raises, and RequestError where the template refuses the messages.
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
        """vLLM's beam search, by ours: see ``SamplingParams.num_beams`` for what decides.

        Args:
            prompts: as ``generate`` takes them.
            params: how many beams, and how long they may be.
            lora_request: None; there are no adapters yet.
            use_tqdm: a bar on stderr.
            concurrency_limit: nothing depends on it; ``LLM(max_requests=...)`` says how many requests run at a time.

        Returns:
            One output a prompt, with ``beam_width`` sequences.

        Raises what ``generate`` raises.
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
        """``generate`` for coroutines. Cancelling the task aborts the requests and frees their blocks."""
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
        """``chat`` for coroutines; see ``agenerate``."""
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
        """Completes one prompt piece by piece. Closing the generator aborts the request.

        A wrong prompt raises at once, and not at the first piece.
        """
        return stream(self._loop, of_prompt(self._context, prompt, Options(options, params)))

    def stream_chat(
        self,
        messages: Iterable[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> Generator[StreamPiece, None, None]:
        """Answers a conversation piece by piece; see ``stream`` and ``chat``."""
        call = Options(RequestOptions.taken_from(variables), params)
        return stream(self._loop, of_chat(self._context, messages, call, variables))

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestArguments],
    ) -> AsyncGenerator[StreamPiece, None]:
        """``stream`` for coroutines. Cancelling the task, or ``aclose``, aborts the request and frees its blocks."""
        return astream(self._loop, of_prompt(self._context, prompt, Options(options, params)))

    def astream_chat(
        self,
        messages: Iterable[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> AsyncGenerator[StreamPiece, None]:
        """``stream_chat`` for coroutines; see ``astream``."""
        call = Options(RequestOptions.taken_from(variables), params)
        return astream(self._loop, of_chat(self._context, messages, call, variables))

    def run(self, task: Task[Result], **options: Unpack[RequestArguments]) -> Result:
        """Runs a task of any type, a class of ``runtime.tasks``, and returns its result.

        The other arguments are those of ``generate``; raises what that raises.
        """
        return answers(self._loop, [self.prepare(task, **options)], True)[0]

    async def arun(self, task: Task[Result], **options: Unpack[RequestArguments]) -> Result:
        """``run`` for coroutines; see ``agenerate``."""
        return (await answers_async(self._loop, [self.prepare(task, **options)], True))[0]

    def prepare(self, task: Task[Result], **options: Unpack[RequestArguments]) -> Prepared[Result]:
        """Checks a task and makes its requests, for ``submit``. For whoever has an event loop of their own, such as a
        server. ``Generate(prompt, params)`` is the task of ``generate``, whose other arguments these are; raises what
        that raises."""
        return task.prepare(self._context, RequestOptions(**options))  # type: ignore[arg-type]

    def submit(self, prepared: Prepared[Any], listener: Listener) -> None:
        """Starts the requests of a task.

        Args:
            prepared: by ``prepare``; each is submitted once.
            listener: gets their pieces, the last of each answer with its finish_reason; or an error, and then nothing
                more. The engine's thread calls it between two steps, so it must be quick.

        Raises CapacityError or EnginewrightError where they can't run.
        """
        self._loop.submit(listener, *prepared.requests)

    def after_step(self, call: Callable[[], None]) -> None:
        """Has the engine's thread call this when listeners have had all pieces of a step; it must be quick."""
        self._loop.after_step = call

    def abort(self, prepared: Prepared[Any]) -> None:
        """Ends the requests of a task before the next step; nothing happens to those that have ended. Their listener
        isn't called any more."""
        for request in prepared.requests:
            self._loop.abort(request)

    def pulse(self) -> Pulse:
        """Returns the engine's load and the duration of its step, without waiting for it: for a watchdog."""
        return Pulse.measured(self._loop)

    @property
    def lost(self) -> str:
        """Why no request can run any more, as where one of several ranks has died; "" where they can."""
        return str(getattr(self._executor, "lost", ""))

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """The logits after every token of a text: [S] -> [S, V] float32. Raises what ``generate`` raises."""
        return self.run(Score(ids))

    def hidden_states(self, prompt: Prompt, layers: Sequence[int] = (-1,)) -> FloatArray:
        """Computes what goes into chosen layers, of every token of a prompt: [S] -> [layers, S, H] float32.

        The targets cpu, tvm and cuda have it; ranks of a pipeline and of the cuda target don't.

        Args:
            prompt: text or token ids.
            layers: as in transformers' ``hidden_states``: 0 goes into the first layer, -1 comes out of the final norm.

        Raises what ``generate`` raises, and RequestError where the target hasn't one: -1 isn't there in formats where
        the final norm rounds at once, such as int8.
        """
        return self.run(HiddenStates(prompt, layers))

    def get_default_sampling_params(self) -> SamplingParams:
        """``default_params``, under vLLM's name."""
        return self.default_params()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Returns the sampling parameters that the model's makers recommend, changed by ``overrides``."""
        return SamplingParams.from_defaults(self.model.generation_defaults, **overrides)

    def info(self) -> dict[str, Any]:
        """Describes the loaded model, its executor and scheduler, and the use of the KV cache, for people and JSON."""
        return describe(self.model, self._executor, self.engine)

    def save_prefix(self, prompt: Prompt, folder: str | os.PathLike[str], *, tenant: str = "") -> int:
        """Computes a prompt's keys and values, or finds them, and writes them to a folder, for ``load_prefix``.

        The folder is as ``prefix_folder``: the user's alone, its files authenticated by a key that lies elsewhere.

        Returns:
            Tokens from the prompt's beginning that are there: whole blocks of 32.

        Raises what ``generate`` raises, and RequestError where the target keeps no prefixes.
        """
        params = SamplingParams(max_tokens=1)
        with opened_tier(self._executor, self._cache, folder) as disk:
            self.generate([prompt], params, tenant=tenant, progress=False)
            request = of_prompt(self._context, prompt, Options({"tenant": tenant}, params)).requests[0]
            return self._loop.call(partial(save_prefix, self._cache, request, disk))

    def load_prefix(self, prompt: Prompt, folder: str | os.PathLike[str], *, tenant: str = "") -> int:
        """Reads what ``save_prefix`` wrote for this prompt, or one that begins alike, so that requests find it.

        Returns:
            Tokens from the prompt's beginning that are in the cache then; 0 if nothing there can be used: it was made
            with another model, format or instruction set, or is damaged (a RuntimeWarning says so).

        Raises what ``save_prefix`` raises.
        """
        with opened_tier(self._executor, self._cache, folder) as disk:
            options = Options({"tenant": tenant}, SamplingParams(max_tokens=1))
            request = of_prompt(self._context, prompt, options).requests[0]
            return self._loop.call(partial(load_prefix, self._cache, request, disk))

    def delete_prefixes(self, *, tenant: str | None = None) -> int:
        """Forgets what is kept of one tenant or of all; returns how many files of ``prefix_folder`` that were."""
        whose = None if tenant is None else checked_name("tenant", tenant)
        return self._loop.call(partial(self.engine.scheduler.forget, whose))

    def close(self) -> None:
        """Ends every request, writes what is kept to ``prefix_folder``, and frees the memory. May be called again."""
        if self._loop.close():
            disk, self._cache.disk = self._cache.disk, None
            if disk is not None:
                self._cache.save_all(disk)
                disk.store.close()
            self.engine.close()
            self._context.close()

    def __repr__(self) -> str:
        return f"LLM({self._name!r}, target={self._target!r}, context={self.model.context_length})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
