"""vLLM's arguments that don't exist here: code written for vLLM runs, or gets an error that says what to write instead.

An argument is one of three kinds: renamed here; without effect on results, so that any value is accepted; or accepted
only at values that change nothing, and otherwise refused with a reason. docs/use/vllm-reference.md is generated from
these rules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec

from ..shared.errors import RequestError, meant, shown

P = ParamSpec("P")
R = TypeVar("R")


class Renamed(msgspec.Struct, frozen=True):
    """A rule: the argument has another name here."""

    ours: str


class Idle(msgspec.Struct, frozen=True):
    """A rule: no result depends on the argument, so that any value is accepted."""


class Only(msgspec.Struct, frozen=True):
    """A rule: only some values are accepted. The error for other values says ``why``, and has the ``hint``."""

    values: tuple[object, ...]
    why: str
    hint: str

    def takes(self, value: object) -> bool:
        """Returns True if the value is accepted. True and 1 are different values."""
        return any(value is one or (type(value) is type(one) and value == one) for one in self.values)


Rule = Renamed | Idle | Only

_EMPTY: tuple[object, ...] = (None, {}, [], ())
_NO_IMAGES = Only((*_EMPTY, ""), "models read only text", "Leave it out.")
_NO_LORA = Only(
    (None, False), "adapters can't be loaded yet", "Merge the adapter into the model, and export the merged model."
)
_GUIDE = Only(
    (None, {}),
    "structured output is a sampling parameter here",
    "Pass SamplingParams(structured_outputs=StructuredOutputsParams(json=...)).",
)
_AT_EXPORT = Only(
    (None, "auto"),
    "the export fixes a bundle's formats",
    'To choose formats, pass a model instead of a bundle, with recipe="int8".',
)
_ONE_VERSION = Only((None,), "the revision is part of the model's name", "Pass the model as ORG/NAME@REVISION.")
_AS_EXPORTED = Only(
    (None, "auto", "generate", "none", "pooling", "embed", "score", "classify"),
    "the export fixes a bundle's task, which info()['kind'] shows",
    "Leave it out.",
)
_NO_PROCESSORS = Only(_EMPTY, "functions can't change logits", "Use logit_bias, bad_words or allowed_token_ids.")

OF_LLM: Mapping[str, Rule] = {
    "max_model_len": Renamed("context"),
    "max_num_seqs": Renamed("max_requests"),
    "max_num_batched_tokens": Renamed("prefill_chunk"),
    "enable_prefix_caching": Renamed("prefix_cache"),
    "kv_cache_memory_bytes": Renamed("memory"),
    "scheduling_policy": Renamed("scheduling"),
    "tensor_parallel_size": Renamed("ranks"),
    **dict.fromkeys(
        (
            *("gpu_memory_utilization", "swap_space", "cpu_offload_gb", "enforce_eager", "max_seq_len_to_capture"),
            *("trust_remote_code", "disable_custom_all_reduce", "disable_async_output_proc", "disable_log_stats"),
            *("disable_log_requests", "enable_chunked_prefill", "compilation_config", "download_dir", "hf_token"),
            *("distributed_executor_backend", "block_size", "max_logprobs", "served_model_name", "async_scheduling"),
            *("use_v2_block_manager", "num_gpu_blocks_override", "allowed_media_domains", "profiler_config"),
            *("attention_config", "attention_backend", "guided_decoding_backend", "max_lora_rank", "max_loras"),
        ),
        Idle(),
    ),
    "pipeline_parallel_size": Only((None, 1), "its name here is partition", 'Pass partition="pipeline=N".'),
    "data_parallel_size": Only(
        (None, 1), "an LLM runs one copy of the model", "Use several LLMs, or `optimize serve --replicas N`."
    ),
    **dict.fromkeys(("dtype", "kv_cache_dtype", "quantization", "load_format"), _AT_EXPORT),
    **dict.fromkeys(("revision", "tokenizer_revision", "code_revision"), _ONE_VERSION),
    **dict.fromkeys(("task", "runner", "convert"), _AS_EXPORTED),
    **dict.fromkeys(("enable_lora", "lora_modules"), _NO_LORA),
    **dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path"), _NO_IMAGES),
    "structured_outputs_config": _GUIDE,
    "logits_processors": _NO_PROCESSORS,
    "tokenizer": Only((None,), "a bundle contains a tokenizer", "Export the model with another tokenizer."),
    "tokenizer_mode": Only(
        (None, "auto", "hf"), "a bundle contains a tokenizer", "Export the model with another tokenizer."
    ),
    "skip_tokenizer_init": Only(
        (False,),
        "a bundle contains a tokenizer",
        "For results without text, pass SamplingParams(detokenize=False).",
    ),
    "chat_template": Only((None,), "a bundle contains chat templates", "Pass chat_template to llm.chat."),
    "hf_overrides": Only(
        _EMPTY, "the export fixes the configuration", "Change the model's config.json, and export the model again."
    ),
    "device": Only(
        (None, "auto"), "the argument target selects the device", 'Use target="cpu", or another target of the bundle.'
    ),
    "speculative_config": Only(
        (None,), "its name here is speculate", 'Use speculate="lookup", or the path of a draft model\'s bundle.'
    ),
    "generation_config": Only(
        (None, "vllm"),
        "a model's recommended parameters are never applied by default",
        "To apply the recommended parameters, pass llm.default_params() to generate or chat.",
    ),
    "override_generation_config": Only(
        _EMPTY,
        "a model's recommended parameters are never applied by default",
        "Pass llm.default_params(temperature=...) to generate or chat.",
    ),
    "logprobs_mode": Only(
        (None, "raw_logprobs"), "log-probabilities are computed before penalties and temperature", "Leave it out."
    ),
    "disable_sliding_window": Only((False, None), "the export fixes a model's sliding windows", "Leave it out."),
    "enable_return_routed_experts": Only((False, None), "results don't contain the chosen experts", "Leave it out."),
    **dict.fromkeys(("pooler_config", "override_pooler_config"), _AS_EXPORTED),
}
OF_GENERATE: Mapping[str, Rule] = {
    "lora_request": Only(_EMPTY, _NO_LORA.why, _NO_LORA.hint),
    "prompt_adapter_request": Only((None,), _NO_LORA.why, "Leave it out."),
    "guided_options_request": _GUIDE,
    "tokenization_kwargs": Only(
        _EMPTY, "the tokenizer has no options here", "Encode the text yourself, and pass the token ids."
    ),
    "mm_processor_kwargs": _NO_IMAGES,
    "prompt_token_ids": Only(
        (None,), "a prompt may be a list of token ids", 'Pass the ids as the prompt, or {"prompt_token_ids": ids}.'
    ),
}
OF_CHAT: Mapping[str, Rule] = {
    **{name: rule for name, rule in OF_GENERATE.items() if name != "prompt_token_ids"},
    "chat_template_content_format": Only(
        (None, "auto"), "the format of messages is chosen to fit the template", "Leave it out."
    ),
}
OF_SAMPLING: Mapping[str, Rule] = {
    **dict.fromkeys(("spaces_between_special_tokens", "output_kind", "skip_clone", "stream_interval"), Idle()),
    **dict.fromkeys(("guided_decoding", "response_format"), _GUIDE),
    "logits_processors": _NO_PROCESSORS,
    "use_beam_search": Only((False, None), "its name here is num_beams", "Use num_beams, or llm.beam_search."),
    "truncate_prompt_tokens": Only(
        (None,), "prompts aren't truncated", "Pass llm.tokenizer.encode(text)[-n:] as the prompt."
    ),
    "flat_logprobs": Only((False, None), "log-probabilities have only one format", "Read result.logprobs."),
    "skip_reading_prefix_cache": Only(
        (False, None),
        "a request can't bypass the prefix cache",
        "Use LLM(prefix_cache=False), or another tenant for this request.",
    ),
    "extra_args": Only(_EMPTY, "no code reads this argument", "Leave it out."),
    **dict.fromkeys(
        ("logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
        Only(
            (None,),
            "log-probabilities are returned only for the most probable tokens",
            "Use logprobs=k, or llm.logits(ids).",
        ),
    ),
    "thinking_token_budget": Only((None, -1), "reasoning has no separate limit", "Use max_tokens."),
    "repetition_detection": Only((None,), "repetitions aren't detected", "Use repetition_penalty or max_tokens."),
    "trace_decode_token_ids": Only(
        (None,), "the tokens of an answer can't be prescribed", "To score given tokens, use llm.logits(ids)."
    ),
    "routed_experts_prompt_start": Only((0, None), "results don't contain the chosen experts", "Leave it out."),
}


def takes_vllm_names(
    rules: Mapping[str, Rule],
    *,
    of_params: Collection[str] = (),
    further: Collection[str] = (),
    open_ended: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that makes a function accept the arguments in ``rules`` too.

    Args:
        rules: the rule of each argument of vLLM.
        of_params: names of fields of SamplingParams. The error for one of these points to SamplingParams.
        further: names of arguments that the function takes by ``**``.
        open_ended: True if any other name is accepted; False raises RequestError, which suggests a similar name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        named = {name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD}
        parameter_names = frozenset(named.union(further))
        most = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values())

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > most:
                what = function.__qualname__.removesuffix(".__init__")
                raise RequestError(
                    f"{what}: {len(args) - 1} arguments without a name, and it takes {most - 1}",
                    hint="Pass the others by their names.",
                )
            if not parameter_names.issuperset(kwargs):
                others = {name: kwargs.pop(name) for name in list(kwargs) if name not in parameter_names}
                kwargs.update(
                    _translated(function.__qualname__, others, rules, parameter_names, of_params, open_ended, kwargs)
                )
            return function(*args, **kwargs)

        return call

    return decorate


def _translated(
    called: str,
    others: Mapping[str, object],
    rules: Mapping[str, Rule],
    own: Collection[str],
    of_params: Collection[str],
    open_ended: bool,
    given: Mapping[str, object],
) -> dict[str, Any]:
    """Converts arguments with vLLM's names to ours. Raises RequestError naming the first one that isn't accepted.

    Args:
        called: the name of the called function, for messages.
        others: the arguments that the function doesn't have.
        rules: the rule of each argument of vLLM.
        own: the names of the function's own arguments.
        of_params: names of fields of SamplingParams.
        open_ended: True if names without a rule are accepted, and passed on.
        given: the function's own arguments in this call.
    """
    arguments: dict[str, Any] = {}
    for name, value in others.items():
        rule = rules.get(name)
        if rule is None:
            if not open_ended:
                raise _unknown(called, name, {*own, *rules} - {"self"}, of_params)
            arguments[name] = value
        elif isinstance(rule, Renamed):
            if value is not None:  # which is the default there
                arguments[rule.ours] = one_of(**{rule.ours: given.get(rule.ours), name: value})
        else:
            check_nothing(name, value, rules)
    return arguments


def check_nothing(name: str, value: object, rules: Mapping[str, Rule]) -> None:
    """Raises RequestError if the value of vLLM's argument ``name`` isn't one that its rule in ``rules`` allows."""
    rule = rules[name]
    if isinstance(rule, Only) and not rule.takes(value):
        raise RequestError(f"{name}: {shown(value)} is refused: {rule.why}", hint=rule.hint)


def one_of(**names: Any) -> Any:
    """Returns the value of an argument with two names; None if it isn't set. Raises RequestError if both are set."""
    values = [value for value in names.values() if value is not None]
    if len(values) > 1:
        raise RequestError(f"{', '.join(names)}: these are two names of one argument", hint="Pass one of them.")
    return values[0] if values else None


def _unknown(called: str, name: str, known: Collection[str], of_params: Collection[str]) -> RequestError:
    what = called.removesuffix(".__init__")
    if name in of_params:
        hint = f"Pass SamplingParams({name}=...)."
    else:
        hint = meant(name, sorted(known)).rstrip() or f"See help({what.removeprefix('SamplingParams.') or what})."
    return RequestError(f"{name}: {what} has no such argument", hint=hint)
