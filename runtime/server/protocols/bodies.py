"""The fields of the bodies of chat completions and completions, in the three tables of ``http.fields``.

They are OpenAI's fields (https://platform.openai.com/docs/api-reference), vLLM's besides, those that clients of other
servers send (llama.cpp, Ollama, LM Studio, SGLang, OpenRouter, Open WebUI), and a few of ours.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec

from ...requests.request_options import RequestOptions
from ...requests.sampling import (
    DEFAULTS_ALWAYS,
    DEFAULTS_OF_SAMPLING,
    SamplingParams,
    fitting_defaults,
)
from ...requests.structured import StructuredOutputsParams
from ...requests.vllm_names import Only
from ...shared.contracts import ModelInfo
from ...shared.errors import RequestError, meant, meant_in, shown
from ...shared.json_schema import hold_schema
from ..http.fields import HINTS, Fields, check_parts, whole

MOST_PROMPTS = 128
MOST_TOP_LOGPROBS = 20
_LARGEST = 2**31 - 1
_DIGITS = len(str(_LARGEST))
"""The most digits of an integer that is passed on to an engine: it must fit 32 bits."""

_LATER = "it isn't supported yet"
_NONE: tuple[object, ...] = (None, [], {}, "")
_TEXT_ONLY = Only((None, ["text"]), "models answer only with text", "Leave it out.")

REFUSED: Mapping[str, Only] = {
    "functions": Only((None, []), "it is the older name of tools", "Use tools."),
    "function_call": Only((None, "none", "auto"), "it is the older name of tool_choice", "Use tool_choice."),
    "grammar": Only(
        _NONE, "grammars in GBNF aren't supported", 'Use structured_outputs: {"grammar": ...} with a grammar in Lark.'
    ),
    "modalities": _TEXT_ONLY,
    "audio": Only((None,), _TEXT_ONLY.why, "Leave it out."),
    "web_search_options": Only((None,), "the server doesn't search or fetch anything", "Leave it out."),
    "chat_template": Only(
        (None,), "the model's template is used", "Leave it out, and set variables with chat_template_kwargs."
    ),
    "use_beam_search": Only((None, False), "its name here is num_beams", "Use num_beams."),
    "logits_processors": Only(_NONE, "the server runs no code of clients", "Use logit_bias."),
    "lora_request": Only(_NONE, "adapters can't be loaded yet", "Leave it out."),
    "mm_processor_kwargs": Only(_NONE, "models read only text", "Leave it out."),
    "prompt_embeds": Only(_NONE, "a prompt must be text or token ids", "Leave it out."),
    "truncate_prompt_tokens": Only((None,), "prompts are never truncated", "Shorten the prompt."),
    "background": Only((None, False), _LATER, "Leave it out."),
    **dict.fromkeys(
        ("dynatemp_range", "top_a", "mirostat"),
        Only((None, False, 0, 0.0), "this kind of sampling isn't supported", "Use temperature, top_p, top_k or min_p."),
    ),
    "tfs_z": Only((None, 1, 1.0), "this kind of sampling isn't supported", "Use top_p or typical_p."),
    **dict.fromkeys(
        ("regex", "ebnf"),
        Only((None, ""), "the field for structured output has another name here", "Use structured_outputs."),
    ),
    "stop_regex": Only(
        (None, "", []), "only strings and token ids can end an answer, not regular expressions", "Use stop."
    ),
    **dict.fromkeys(("lora", "lora_path"), Only(_NONE, "adapters can't be loaded yet", "Leave it out.")),
    "n_probs": Only(
        (None, False, 0), "the fields for log-probabilities have other names here", "Use logprobs and top_logprobs."
    ),
    **dict.fromkeys(
        ("documents", "files", "data_sources", "plugins", "enable_search", "search_parameters"),
        Only((*_NONE, False), "the server doesn't search or fetch anything", "Put the text into a message."),
    ),
    "safe_prompt": Only(
        (None, False), "the server adds no safety instructions", "Write the instructions into a system message."
    ),
    "extra_body": Only(
        _NONE, "it is a parameter of Python clients, not a field of a body", "Put its fields into the body itself."
    ),
}

HARMLESS = HINTS | frozenset(
    {
        *(
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
        ),
        *("prediction", "verbosity", "moderation", "guided_decoding_backend"),
        *(
            "spaces_between_special_tokens",
            "request_id",
            "chat_template_content_format",
            "documents_format",
            "vllm_xargs",
        ),
        *("prompt_cache_options",),
    }
)
"""Fields that don't change the result: they name the caller, or control what is stored and how fast it runs."""

_BUDGETS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget")
"""Names of the field of a chat that limits the tokens of an answer's reasoning."""

RENAMED: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    "typ_p": "typical_p",
    "random_seed": "seed",
}
"""Other servers' names of fields -> their names here."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream: the token counts at its end, or in every event. ``include_obfuscation`` has no effect:
    events are never padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Body(Fields, kw_only=True):
    """The fields that chat completions and completions share. None means the protocol's default, or the model's own."""

    refused: ClassVar[Mapping[str, Only]] = REFUSED
    harmless: ClassVar[frozenset[str]] = HARMLESS
    renamed: ClassVar[Mapping[str, str]] = RENAMED
    needed: ClassVar[frozenset[str]] = frozenset({"messages", "prompt"})

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    n: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | None = None
    request_class: str | None = None
    cache_salt: str | None = None
    speculate: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | bool | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    def params(self, model: ModelInfo) -> dict[str, Any]:
        """Returns fields of SamplingParams for this body.

        The body's values replace the model's recommended values, and these replace the protocol's defaults.
        """
        recommended = model.generation_defaults
        names = (*DEFAULTS_OF_SAMPLING, *DEFAULTS_ALWAYS)
        fields: dict[str, Any] = {"temperature": 1.0} | {k: recommended[k] for k in names if k in recommended}
        overrides = {name: value for name in _sampling_fields(type(self)) if (value := getattr(self, name)) is not None}
        name, most = self.most_tokens()
        if most is not None:
            if most < 1 and most != -1 and not self.scores_alone:
                hint = "It must be 1 or more, or -1 for the rest of the context."
                raise RequestError(f"{name}: {shown(most)} is out of range", hint=hint)
            overrides["max_tokens"] = None if most == -1 else most  # -1: as many as there is room for
        fields = fitting_defaults(fields, overrides)
        if fields.get("num_beams", 1) > 1:
            fields |= {"temperature": self.temperature or 0.0}
        if self.logit_bias:
            fields["logit_bias"] = {_token(key): value for key, value in self.logit_bias.items()}
        if self.stop == [] or self.stop == "":
            del fields["stop"]
        # Two's complement of 64 bits: clients send negative ones.
        fields["seed"] = secrets.randbits(63) if self.seed is None else self.seed % (1 << 64)
        if (form := self.form()) is not None:
            fields["structured_outputs"] = form
        return fields

    def sampling(self, model: ModelInfo) -> SamplingParams:
        """Returns the sampling parameters of the body. Raises RequestError naming the field that is wrong.

        Decoding the body doesn't check these values.
        """
        fields = self.params(model)
        if fields.get("temperature", 0) == 0 and fields.get("n", 1) > 1 and fields.get("num_beams", 1) == 1:
            hint = "Give a temperature above 0."
            raise RequestError("n: several answers of temperature 0 are the same one", hint=hint)
        return SamplingParams(**fields)

    def request_options(self, tenant: str) -> RequestOptions:
        """Returns the options of the body's requests: its fields of the same names, and the tenant."""
        names = set(self.__struct_fields__).intersection(RequestOptions.__struct_fields__)
        stated = {name: value for name in names if (value := getattr(self, name)) is not None}
        return RequestOptions(**stated | {"tenant": tenant})

    def most_tokens(self) -> tuple[str, int | None]:
        """Returns the field that limits the new tokens, and the limit; None if the body has none."""
        return "max_tokens", self.max_tokens

    @property
    def scores_alone(self) -> bool:
        """Returns True if the prompt is scored and no token is generated."""
        return False

    def form(self) -> dict[str, Any] | None:
        """Returns the form that the answer must have, as fields of StructuredOutputsParams; None for any text.

        Raises RequestError if the body names several forms.
        """
        forms: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and (response_form := form_of(self.response_format)) is not None:
            forms["response_format"] = response_form
        if self.structured_outputs:
            forms["structured_outputs"] = self.structured_outputs
        if self.json_schema is not None:
            forms["json_schema"] = {"json": self.json_schema}
        for name in ("json", "regex", "choice", "grammar", "json_object"):
            if (value := getattr(self, f"guided_{name}")) not in (None, False, "", []):
                forms[f"guided_{name}"] = {name: value}
        if len(forms) > 1:
            raise RequestError(f"{' and '.join(forms)} are both given", hint="An answer has one form: give one.")
        form = next(iter(forms.values()), None)
        if form is not None and isinstance(form.get("json"), dict):
            # A schema goes to the engine as text: it may have numbers of any size.
            form = form | {"json": json.dumps(form["json"])}
        return form

    @property
    def streamed(self) -> bool:
        return bool(self.stream)


_OTHER_FORMS = frozenset({"max_tokens", "logit_bias", "seed", "structured_outputs", "logprobs", "best_of"})
"""Fields of SamplingParams that bodies have in another form; ``Body.params`` converts them."""


@cache
def _sampling_fields(kind: type[Body]) -> tuple[str, ...]:
    """Returns the names of the fields that a body and SamplingParams share."""
    return tuple(name for name in _PARAMETERS if name in kind.__struct_fields__ and name not in _OTHER_FORMS)


_PARAMETERS = tuple(field.name for field in dataclasses.fields(SamplingParams))

_REASONING = (
    ("thinking", ("type", "budget_tokens"), ("clear_thinking", "display", "keep")),
    ("reasoning", ("effort", "enabled", "exclude", "max_tokens"), ("summary", "generate_summary")),
)
"""Other servers' fields that switch reasoning -> the parts that are used, and the parts that are ignored."""


class ChatBody(Body, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    renamed: ClassVar[Mapping[str, str]] = {**RENAMED, **dict.fromkeys(_BUDGETS[1:], _BUDGETS[0])}

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    splice: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    reasoning: dict[str, Any] | None = None

    def reasoning_budget(self) -> tuple[str, int] | None:
        """Returns the field that limits the tokens of the reasoning, and the limit; None if there is none.

        Raises RequestError for a limit that isn't a number of tokens.
        """
        limits = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking.budget_tokens": (self.thinking or {}).get("budget_tokens"),
            "reasoning.max_tokens": (self.reasoning or {}).get("max_tokens"),
        }
        for name, value in limits.items():
            limit = whole(value)
            if limit is None or limit == -1:
                continue
            if not _is_id(limit) or limit < 0:
                place, colon, part = name.partition(".")
                place = f"{place}: {part}" if colon else place
                raise RequestError(f"{place}: {shown(limit)} isn't a number of tokens", hint="Pass 0 or more.")
            return name, limit
        return None

    def effort(self) -> tuple[str, str] | None:
        """Returns the name of the field that sets the reasoning effort, and the effort; None if the body has no such
        field.

        Raises RequestError for a value that the field doesn't allow.
        """
        if self.reasoning_effort is not None:
            return "reasoning_effort", self.reasoning_effort
        for name, switch in (("enable_thinking", self.enable_thinking), ("think", self.think)):
            if switch is not None:
                return name, switch if isinstance(switch, str) else "on" if switch else "none"
        if self.thinking is not None and (kind := self.thinking.get("type")) is not None:
            if kind not in ("enabled", "disabled", "auto", "adaptive"):
                raise RequestError(f"thinking: {shown(kind)} isn't a type", hint='It is "enabled" or "disabled".')
            return None if kind == "auto" else ("thinking", "none" if kind == "disabled" else "on")
        if self.reasoning is not None:
            effort, enabled = self.reasoning.get("effort"), self.reasoning.get("enabled")
            if not isinstance(effort, str | None) or not isinstance(enabled, bool | None):
                hint = 'Write {"effort": "low"}, or {"enabled": false}.'
                raise RequestError(f"reasoning: {shown(self.reasoning)} isn't an effort", hint=hint)
            if effort is not None or enabled is not None:
                return "reasoning", "none" if enabled is False else effort or "on"
        return None

    def ignored_parts(self) -> list[str]:
        """Returns the names of the parts of fields that change no answer. Raises RequestError for unknown parts."""
        ignored = []
        for name, honoured, harmless in _REASONING:
            parts = getattr(self, name) or {}
            check_parts(name, parts, (*honoured, *harmless))
            ignored += [f"{name}.{part}" for part, value in parts.items() if part in harmless and value is not None]
        return ignored

    @property
    def shows_reasoning(self) -> bool:
        """Returns True if the answer has the reasoning."""
        return self.include_reasoning is not False and (self.reasoning or {}).get("exclude") is not True

    def params(self, model: ModelInfo) -> dict[str, Any]:
        fields = super().params(model)
        fields.setdefault("max_tokens", None)
        if self.top_logprobs is not None and not self.logprobs and self.top_logprobs:
            raise RequestError("top_logprobs: it needs logprobs", hint='Set "logprobs": true.')
        if self.logprobs:
            fields["logprobs"] = _within("top_logprobs", self.top_logprobs or 0, MOST_TOP_LOGPROBS)
        return fields

    def most_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().most_tokens()
        return "max_completion_tokens", self.max_completion_tokens


class CompletionBody(Body, kw_only=True):
    """The body of ``/v1/completions``. ``prompt``: a text or token ids, or several of these."""

    refused: ClassVar[Mapping[str, Only]] = {
        **REFUSED,
        **dict.fromkeys(
            _BUDGETS, Only((None, -1), "here, reasoning is text as any other", "Use max_tokens, or chat completions.")
        ),
    }

    prompt: Any
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool = True
    suffix: str | None = None

    def params(self, model: ModelInfo) -> dict[str, Any]:
        fields = super().params(model)
        fields.setdefault("max_tokens", 16)
        if self.echo and fields["max_tokens"] == 0:  # the prompt's log-probabilities alone
            fields["max_tokens"] = 1
        if self.logprobs is not None:
            fields["logprobs"] = _within("logprobs", self.logprobs, MOST_TOP_LOGPROBS)
            if self.echo:
                fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.best_of is not None and self.best_of != (self.n or 1):
            fields["best_of"] = self.best_of
        return fields

    @property
    def scores_alone(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, as texts or token ids. Raises RequestError for another type."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(_is_id(one) for one in prompt)):
            prompt = [prompt]
        fit = isinstance(prompt, list) and all(
            isinstance(one, str) or (isinstance(one, list) and all(_is_id(index) for index in one)) for one in prompt
        )
        if not fit or not prompt:
            raise RequestError(
                f"prompt: {shown(prompt)} isn't a prompt", hint="Pass text or token ids, or a list of either."
            )
        if len(prompt) > MOST_PROMPTS:
            raise RequestError(f"prompt: {len(prompt)} prompts", hint=f"Pass {MOST_PROMPTS} at most.")
        prompts: list[str | list[int]] = prompt
        return prompts


class InfillExtra(msgspec.Struct):
    """Another file of ``/infill``."""

    text: str = ""
    filename: str = ""


class InfillBody(CompletionBody, kw_only=True):
    """The body of llama.cpp's ``/infill``, a request for the text between two others. ``prompt``: the beginning of
    that text.
    """

    needed: ClassVar[frozenset[str]] = frozenset({"input_prefix", "input_suffix"})
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"n_indent", "response_fields"}

    input_prefix: str
    input_suffix: str
    input_extra: tuple[InfillExtra, ...] = ()
    prompt: Any = ""

    def params(self, model: ModelInfo) -> dict[str, Any]:
        if (self.n or 1) > 1 or (self.num_beams or 1) > 1:
            raise RequestError("n: there is one answer here", hint="Use /v1/completions with a suffix.")
        if self.echo:
            raise RequestError("echo: the answer here is the middle alone", hint="Leave it out.")
        fields = super().params(model)
        return fields if self.max_tokens is not None else fields | {"max_tokens": None}

    def prompts(self) -> list[str | list[int]]:
        if not isinstance(self.prompt, str):
            raise RequestError(f"prompt: {shown(self.prompt)} isn't text", hint="Pass the beginning of the middle.")
        return [self.input_prefix + self.prompt]


class TokenizeBody(Fields, kw_only=True):
    """The body of ``/tokenize``: a prompt, or messages. llama.cpp's names are ``content`` for a prompt, ``add_special``
    for ``add_special_tokens``, and ``with_pieces`` for the text of each token."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Fields, kw_only=True):
    """The body of ``/detokenize``."""

    tokens: list[int]
    model: str | None = None


def form_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Converts ``response_format``, or ``text.format`` of Responses, to fields of StructuredOutputsParams; None for any
    text.
    """
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # llama.cpp's
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "json_schema":
        fields = given.get("json_schema", given)
        schema = fields.get("schema") if isinstance(fields, Mapping) else None
        if not isinstance(schema, (dict, bool)):
            there = fields if isinstance(fields, Mapping) else given
            hint = (
                meant_in(there, "schema", "json_schema")
                + 'Write {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
            )
            raise RequestError("response_format: its schema is missing", hint=hint)
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": msgspec.json.encode({k: v for k, v in given.items() if k != "type"}).decode()}
    hint = meant(kind, ("text", "json_object", "json_schema", "structural_tag"))
    hint += "Its type is text, json_object, json_schema or structural_tag."
    raise RequestError(f"response_format: {shown(kind)} isn't a type", hint=hint)


def held_form(form: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """Removes the constraints that can't be enforced from a form that is a JSON schema.

    Returns the new form, and the names of the removed constraints; (None, []) for a form of another kind.

    Args:
        form: the request's ``structured_outputs``, checked.

    Raises:
        RequestError: no answer can meet the schema.
    """
    if not isinstance(form, StructuredOutputsParams) or not isinstance(form.json, str):
        return None, []
    held = hold_schema(json.loads(form.json), "structured_outputs.json")
    text = json.dumps(held.schema) if isinstance(held.schema, dict) else "{}"
    return form.to_plain() | {"json": text}, [f"schema.{keyword}" for keyword in held.ignored]


def checked_kwargs(kwargs: Mapping[str, Any] | None, special: Sequence[str]) -> dict[str, Any]:
    """Returns a client's variables of a chat template.

    Raises RequestError for names that the template's own variables have.

    ``special``: the names of the tokenizer's special tokens.
    """
    reserved = {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    for name in kwargs or {}:
        if name in reserved or name in special or name.endswith("_token"):
            raise RequestError(f"chat_template_kwargs: {shown(name)} is the template's own", hint="Leave it out.")
    return dict(kwargs or {})


def _within(name: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise RequestError(f"{name}: {shown(value)} is out of range", hint=f"It must be from 0 to {most}.")
    return value


def _token(key: str) -> int:
    token = int(key) if key.isascii() and key.isdigit() and len(key) <= _DIGITS else -1
    if str(token) != key:  # "05" beside "5" would be the same token twice
        raise RequestError(f"logit_bias: {shown(key)} isn't a token id", hint='Pass {"15043": -100}.')
    return token


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
