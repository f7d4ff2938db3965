"""Ollama's protocol, for tools that look for a server of Ollama.

    /api/chat, /api/generate, /api/version, /api/tags, /api/show, /api/ps

Names of models may end with ":latest", which Ollama appends to each name. The formats:
https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...requests.vllm_names import Only
from ...shared.contracts import ModelInfo
from ...shared.errors import RequestError, meant, shown
from ...tasks.context import GENERATE, kind_of
from ...tasks.generate import Finished
from ..engines.engine_client import Model
from ..engines.records import Ended
from ..http.errors import OLLAMA, PROTOCOL_NAMES, ApiError, json_response
from ..http.fields import HINTS, Fields, decoded
from ..http.front import VERSION, Front
from ..http.routes import Routes
from .answers import Given, News, Shape
from .bodies import Body, ChatBody, CompletionBody
from .jobs import Order, answer
from .tools import call_arguments
from .unsupported import text_only

PROTOCOL_VERSION = "0.13.4"
"""The version of Ollama whose endpoints are served, ``/v1/responses`` among them.

Some programs require a version: codex 0.13.4, Copilot 0.6.4.
"""
_NEVER = "9999-12-31T23:59:59Z"
"""The time at which a model is unloaded, for the answers: a far one, as models stay loaded."""


class ShowBody(Fields, kw_only=True):
    """The body of ``/api/show``. ``name`` is the older name of ``model``; ``verbose`` makes no difference."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    def asked(self) -> str:
        """Returns the model's name without ":latest". Raises RequestError if the body has no name."""
        name = self.model if self.model is not None else self.name
        if name is None:
            raise RequestError("model: it is missing", hint="Name a model of /api/tags.")
        return name.removesuffix(":latest")


_TEXT_ONLY = Only((None, []), "models read only text", "Leave them out.")
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's default values of options. They apply if the model recommends no value."""
_OPTION = "options."
_SAMPLING = {
    name.removeprefix(_OPTION): field for field, name in PROTOCOL_NAMES[OLLAMA].items() if name.startswith(_OPTION)
}
"""Ollama's option -> the field of OpenAI's bodies with the same meaning."""
_OPTIONS_IGNORED = HINTS | frozenset(
    {
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram"),
        *("f16_kv", "logits_all", "vocab_only", "embedding_only", "numa", "draft_num_predict"),
        *("mirostat", "tfs_z", "penalize_newline"),  # options of older versions, which Ollama itself ignores now
    }
)


class _Asked(Fields, kw_only=True):
    """The fields that the bodies of ``/api/chat`` and ``/api/generate`` have in common."""

    model: str | None = None
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None

    harmless: ClassVar[frozenset[str]] = frozenset({"keep_alive", "shift", "truncate"})
    refused: ClassVar[Mapping[str, Only]] = {
        "images": _TEXT_ONLY,
        **dict.fromkeys(
            ("logprobs", "top_logprobs"),
            Only((None, False, 0), "this protocol doesn't return them yet", "Leave it out."),
        ),
    }

    def common(self, model: ModelInfo, ignored: list[str], ignore_unknown: bool) -> dict[str, Any]:
        """Returns the fields of OpenAI's body that both endpoints set, by name.

        Args:
            model: the model, whose recommended values come before Ollama's defaults.
            ignored: the list to which the names of ignored options are added.
            ignore_unknown: True if unknown options are ignored instead of refused.

        Raises RequestError naming the option.
        """
        fields: dict[str, Any] = {"model": self.name, "stream": self.stream}
        fields |= {name: value for name, value in _DEFAULTS.items() if name not in model.generation_defaults}
        options = self.options or {}
        for name, value in options.items():
            if value is None:
                continue
            if name == "num_predict":
                fields["max_tokens"] = -1 if isinstance(value, (int, float)) and value < 0 else value
            elif name in _SAMPLING:
                fields[_SAMPLING[name]] = value
            elif name == "repeat_last_n" and value in (-1, 0):
                continue  # -1 penalises tokens of the whole text, as the server always does; 0 is treated below
            elif name in _OPTIONS_IGNORED or ignore_unknown:
                ignored.append(f"options.{name}")
            else:
                hint = meant(name, (*_SAMPLING, "repeat_last_n"))
                hint += "Leave it out; with --unknown-fields ignore, the server leaves such options out itself."
                raise RequestError(f"options: there is no {shown(name)}", hint=hint)
        if (last := options.get("repeat_last_n")) == 0 and last is not False:  # nothing is penalised
            fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            raise RequestError(f"format: {shown(self.format)} isn't a form", hint='Pass "json" or a schema.')
        return fields

    @property
    def name(self) -> str | None:
        """Returns the model's name on this server; None for the first model."""
        return None if self.model is None else self.model.removesuffix(":latest")

    @property
    def effort(self) -> str | None:
        """Returns the effort of the reasoning: "on", "none" or a level; None if the body doesn't set ``think``."""
        if isinstance(self.think, bool):
            return "on" if self.think else "none"
        return self.think


class OllamaChatBody(_Asked, kw_only=True):
    """The body of ``/api/chat``. A body without messages loads the model, and generates nothing."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def inner(self, model: ModelInfo, ignored: list[str], ignore_unknown: bool = False) -> Body:
        """Returns the body as one of OpenAI's chat completions; the arguments and errors are those of
        `_Asked.common`.
        """
        messages = []
        texts, replaced = text_only(self.messages)
        ignored += replaced
        for message in texts:
            fields = {name: value for name, value in message.items() if value is not None}
            if (thinking := fields.pop("thinking", None)) is not None:
                fields["reasoning_content"] = thinking
            if (name := fields.pop("tool_name", None)) is not None:
                fields["name"] = name
            messages.append(fields)
        return _converted(
            ChatBody,
            self.common(model, ignored, ignore_unknown)
            | {"messages": messages, "tools": self.tools, "reasoning_effort": self.effort},
        )


class GenerateBody(_Asked, kw_only=True):
    """The body of ``/api/generate``. A body without a prompt loads the model, and generates nothing."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False

    refused: ClassVar[Mapping[str, Only]] = {
        **_Asked.refused,
        "template": Only((None, ""), "the model's template is used", "Leave it out, or set raw to true."),
        "context": Only((None, []), "it is the older way to continue a conversation", "Use /api/chat."),
    }

    def inner(self, model: ModelInfo, ignored: list[str], ignore_unknown: bool = False) -> Body:
        """Returns the body in OpenAI's format: of completions if ``raw`` or ``suffix`` is set, else of chat
        completions.

        The arguments are those of `_Asked.common`. Raises RequestError if ``raw`` or ``suffix`` is combined with
        ``system`` or
        ``think``.
        """
        fields = self.common(model, ignored, ignore_unknown)
        if self.raw or self.suffix:
            if self.system or self.think:
                name = "raw" if self.raw else "suffix"
                raise RequestError(f"{name}: the prompt is all that the model gets", hint="Leave out system and think.")
            texts = {"prompt": self.prompt, "suffix": self.suffix}
            return _converted(CompletionBody, {"max_tokens": model.context_length, **fields, **texts})
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system_messages, {"role": "user", "content": self.prompt}]
        return _converted(ChatBody, fields | {"messages": messages, "reasoning_effort": self.effort})


def _converted(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Returns a body of the class ``kind`` with these fields. Raises RequestError naming a field of a wrong type."""
    return decoded(msgspec.json.encode(fields), kind)[0]


class OllamaShape(Shape):
    """The response of ``/api/chat``: a JSON object, or a stream with a JSON object in each line."""

    media_type = "application/x-ndjson"
    keep_alive = b""  # a client would parse an empty line as JSON
    chat = True

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(*args)
        self._name, self._began = name, time.monotonic()
        self._parts: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
        self._call: tuple[str, list[str]] | None = None
        self._finish: str | None = None
        self._ended: Ended | None = None

    def _line(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._name, "created_at": _time(time.time())}
        fields = {name: value for name, value in parts.items() if value}
        if self.chat:
            return line | {"message": {"role": "assistant", "content": "", **fields}}
        content = fields.pop("content", "")
        return line | {"response": content, **fields}

    def _take(self, news: News) -> list[dict[str, Any]]:
        """Adds new tokens to the answer, and returns the new parts; a tool call is a part once it is complete."""
        parts: list[dict[str, Any]] = []
        for delta in news.deltas:
            if delta.call is None:
                parts += self._called()
                parts.append({"content": delta.content} if delta.content else {"thinking": delta.reasoning})
            elif delta.name is not None:
                parts += self._called()
                self._call = delta.name, [delta.arguments]
            elif self._call is not None:
                self._call[1].append(delta.arguments)
        if news.finish_reason is not None:
            self._finish = news.finish_reason
            parts += self._called()
        for part in parts:
            for name, value in part.items():
                self._parts[name] += value
        return parts

    def _called(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        (name, texts), self._call = self._call, None
        arguments = call_arguments("".join(texts))
        if arguments is None and self._finish == "length":  # it was cut off, as done_reason says
            return []
        return [{"tool_calls": [{"function": {"name": name, "arguments": arguments or {}}}]}]

    def _end(self, parts: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        waited, read, wrote = (0.0, 0.0, 0.0) if self._ended is None else self._ended.metrics.times
        return self._line(parts) | {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": _nanoseconds(waited),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(read),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(wrote),
        }

    def add(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> None:
        """Sets the only answer. The arguments are those of `Shape.add`."""
        self._take(news)
        self._ended = ended

    def response(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole response as a JSON object."""
        return self._end(self._parts, usage)

    def news(self, index: int, news: News, usage: dict[str, Any] | None) -> bytes:
        """Returns a line for each new part of the answer."""
        return b"".join(_row_of(self._line(parts) | {"done": False}) for parts in self._take(news))

    def end(self, usage: dict[str, Any], ended: Sequence[Ended]) -> bytes:
        """Returns the last line of a stream. The arguments are those of `Shape.end`."""
        self._ended = next(iter(ended), None)
        return _row_of(self._end({}, usage))

    def failed(self, error: ApiError) -> bytes:
        """Returns the last line of a stream that fails with ``error``."""
        return _row_of(error.body_for("/api/"))


class GenerateShape(OllamaShape):
    """The response of ``/api/generate``."""

    chat = False


def _row_of(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def add_ollama(routes: Routes, front: Front) -> None:
    """Adds Ollama's endpoints to ``routes``; ``front`` has the models."""

    async def generation(request: Request, kind: type[OllamaChatBody] | type[GenerateBody]) -> Response:
        ollama_body, ignored, charge = await front.body(request, kind)
        name = ollama_body.name
        shape = OllamaShape if isinstance(ollama_body, OllamaChatBody) else GenerateShape
        if not (
            ollama_body.messages
            if isinstance(ollama_body, OllamaChatBody)
            else ollama_body.prompt or ollama_body.suffix
        ):
            with charge:
                model = await front.loaded(front.model(name))
            empty = {"message": {"role": "assistant", "content": ""}} if shape.chat else {"response": ""}
            line = {"model": ollama_body.model or model.name, "created_at": _time(time.time()), **empty}
            return json_response(line | {"done": True, "done_reason": "load"})

        def order(model: Model) -> Order:
            more: list[str] = []
            body = ollama_body.inner(model.model, more, front.options.unknown_fields == "ignore")
            return Order(body, partial(shape, ollama_body.model or model.name), [*ignored, *more])

        return await answer(front, request, charge, name, order)

    @routes.post("/api/chat")
    async def api_chat(request: Request) -> Response:
        """Answers a conversation, in Ollama's format."""
        return await generation(request, OllamaChatBody)

    @routes.post("/api/generate")
    async def api_generate(request: Request) -> Response:
        """Answers a prompt, in Ollama's format."""
        return await generation(request, GenerateBody)

    @routes.get("/api/version")
    async def api_version(request: Request) -> Response:
        """Returns the version of Ollama that clients expect, and Enginewright's version."""
        return json_response({"version": PROTOCOL_VERSION, "enginewright": VERSION})

    @routes.get("/api/tags")
    async def api_tags(request: Request) -> Response:
        """Lists the models of the server, in Ollama's format."""
        return json_response(tags(front.names))

    @routes.get("/api/ps")
    async def api_ps(request: Request) -> Response:
        """Lists the models that are loaded, in Ollama's format."""
        return json_response(running(front.names))

    @routes.post("/api/show")
    async def api_show(request: Request) -> Response:
        """Describes a model, in Ollama's format."""
        body, _, charge = await front.body(request, ShowBody)
        with charge:
            model = front.model(body.asked())
            return json_response(await front.in_thread(charge.tenant.name, partial(about, model)))


def tags(models: Mapping[str, Model]) -> dict[str, Any]:
    """Returns the response of ``/api/tags``: a row for each name of each model."""
    rows = [_row(name, model) | {"modified_at": _time(model.modified)} for name, model in models.items()]
    return {"models": rows}


def running(models: Mapping[str, Model]) -> dict[str, Any]:
    """Returns the response of ``/api/ps``: a row for each loaded model.

    The bytes in a GPU's memory aren't known, so the rows don't have them.
    """
    return {
        "models": [
            _row(name, model) | {"expires_at": _NEVER, "context_length": model.model.context_length}
            for name, model in models.items()
            if model.state == "ready"
        ]
    }


def about(model: Model) -> dict[str, Any]:
    """Returns the response of ``/api/show``. The chat template is in Jinja; a bundle contains no license."""
    info, family = model.model, _family(model)
    about: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": info.name,
        "general.parameter_count": info.parameters,
        f"{family}.context_length": info.context_length,
        f"{family}.vocab_size": info.vocab_size,
    }
    if info.bos_token_id is not None:
        about["tokenizer.ggml.bos_token_id"] = info.bos_token_id
    if info.eos_token_ids:
        about["tokenizer.ggml.eos_token_id"] = info.eos_token_ids[0]
    templates = {} if model.tokenizer is None else model.tokenizer.chat_templates
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in info.generation_defaults.items()),
        "template": templates.get("default", next(iter(templates.values()), "")),
        "details": _details(model),
        "model_info": about,
        "capabilities": _capabilities(model),
        "modified_at": _time(model.modified),
    }


def _capabilities(model: Model) -> list[str]:
    if (kind := kind_of(model.model)) != GENERATE:
        return ["embedding"] if kind == "embed" else []
    if model.tokenizer is None:
        return ["completion"]
    chat_format = model.tokenizer.chat_format
    fills = model.tokenizer.fill_in_middle is not None
    more = [("insert", fills), ("tools", chat_format.has_calls), ("thinking", chat_format.has_reasoning)]
    return ["completion", *(name for name, has in more if has)]


def _row(name: str, model: Model) -> dict[str, Any]:
    digest = model.hash.removeprefix("sha256:")
    row = {"name": name, "model": name, "size": model.bytes, "digest": digest}
    return {**row, "details": _details(model)}


def _details(model: Model) -> dict[str, Any]:
    family = _family(model)
    return {
        "parent_model": "",
        "format": "bundle",
        "family": family,
        "families": [family],
        "parameter_size": _count(model.model.parameters),
        "quantization_level": model.recipe,
    }


def _family(model: Model) -> str:
    name = model.model.architecture
    for end in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        name = name.removesuffix(end)
    return name.lower()


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f}{unit}" if unit != "B" else f"{parameters / size:.1f}B"
    return str(parameters) if parameters else ""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
