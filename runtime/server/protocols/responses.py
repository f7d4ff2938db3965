"""OpenAI's responses: ``/v1/responses``, stored responses, and their cancelling.

A body is converted to a body of chat completions: items become messages, and an answer's parts become items. The fields
are those of https://platform.openai.com/docs/api-reference/responses; each is used, refused or ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...shared.errors import RequestError, shown
from ...shared.shares import Shares
from ...tasks.generate import Finished
from ...text.chat_format import Delta
from ..engines.engine_client import Model
from ..engines.records import Ended
from ..http.errors import NO_RESPONSE, ApiError, encoded, json_response
from ..http.front import Front
from ..http.routes import Routes, from_query
from .answers import DONE, Given, News, Shape, event
from .bodies import ChatBody
from .conversations import counted
from .jobs import Job, Order, answer
from .response_items import (
    NAMESPACE_SEPARATOR,
    InputTokensBody,
    ResponseFields,
    ResponsesBody,
    chat_of,
    items_of,
    new_id,
)

MOST_BYTES = 64 << 20
"""The most bytes of stored responses, of all tenants together."""
_INDEX_BYTES = 256
"""The approximate size of an item's entry in the index of items."""


@dataclass
class _Kept:
    """A response that is stored or in progress.

    Attributes:
        items: items of the conversation, including its own input.
        response: returns the response as last sent.
        job: its work; None once it is done.
    """

    tenant: str
    items: list[dict[str, Any]]
    response: Callable[[], dict[str, Any]]
    job: Job | None
    stored: bool

    @property
    def all_items(self) -> list[dict[str, Any]]:
        """The items of the conversation up to the response's end."""
        return [*self.items, *self.response().get("output", ())]


class Stored:
    """Stored responses by their ids, which can't be guessed. A tenant can read only its own.

    Args:
        most_bytes: maximum bytes of finished responses. Beyond it, the tenant with the most bytes loses its least
            recently used response.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._done: Shares[str, _Kept] = Shares(most_bytes, self._forget_items)
        self._begun: dict[str, _Kept] = {}
        self._items: dict[tuple[str, str], tuple[Mapping[str, Any], int]] = {}
        """(tenant, id) -> the item, and the number of stored responses that contain it."""

    def __len__(self) -> int:
        return len(self._done) + len(self._begun)

    @property
    def bytes(self) -> int:
        """The bytes of finished responses."""
        return self._done.bytes

    def begin(self, name: str, kept: _Kept) -> None:
        """Registers a response in progress under the id ``name``."""
        self._begun[name] = kept

    def end(self, name: str, response: dict[str, Any] | None) -> None:
        """Ends the response ``name`` in progress: stores ``response`` if the body asks for that, otherwise removes the
        entry.
        """
        entry = self._begun.pop(name, None)
        if entry is None or response is None or not entry.stored:
            return
        done = _Kept(entry.tenant, entry.items, lambda: response, None, True)
        size = len(encoded((response, entry.items))) + _INDEX_BYTES * len(done.all_items)
        for item in done.all_items:
            key = entry.tenant, item["id"]
            self._items[key] = item, self._items.get(key, (item, 0))[1] + 1
        if not self._done.put(name, done, entry.tenant, size):
            self._forget_items(done)

    def item(self, tenant: str, name: str) -> Mapping[str, Any] | None:
        """Returns the item with the id ``name`` of a tenant's stored responses; None if there is none."""
        return self._items.get((tenant, name), (None, 0))[0]

    def _forget_items(self, kept: _Kept) -> None:
        for item in kept.all_items:
            key = kept.tenant, item["id"]
            last, count = self._items[key]
            if count > 1:
                self._items[key] = last, count - 1
            else:
                del self._items[key]

    def find(self, tenant: str, name: str) -> _Kept:
        """Returns a tenant's response, in progress or stored. Raises ApiError if there is none."""
        entry = self._begun.get(name) or self._done.get(name)
        if entry is None or entry.tenant != tenant:
            raise ApiError(404, f"there is no response {shown(name[:80])}", param="response_id")
        return entry

    def delete(self, tenant: str, name: str) -> None:
        """Deletes a finished response. Raises ApiError if there is none, or if it is in progress."""
        if self.find(tenant, name).job is not None:
            raise ApiError(400, f"response {shown(name)} isn't done yet; cancel it first", param="response_id")
        self._done.pop(name)


class ResponsesShape(Shape):
    """The answer of ``/v1/responses``. A whole answer and a streamed one have the same items.

    Args:
        asked: the body.
        about: fields of the response that repeat the request.
        stored: the store for the response.
        items: items of the conversation before the response.
        tenant: name of the response's tenant.
    """

    prefix, call_prefix = "resp_", "call_"

    def __init__(
        self,
        asked: ResponsesBody,
        about: Mapping[str, Any],
        stored: Stored,
        items: list[dict[str, Any]],
        tenant: str,
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._asked, self._about, self._stored = asked, about, stored
        self._items, self._tenant = items, tenant
        self._created = time.time()
        names = [tool.get("name") for tool in asked.tools or () if tool.get("type") == "namespace"]
        self._spaces = {name for name in names if isinstance(name, str)}
        self._output: list[dict[str, Any]] = []
        self._open = False
        self._finish: str | None = None
        self._pending: list[dict[str, Any]] = []  # log-probabilities of tokens whose text isn't out
        self._sequence = 0
        self.cancelled = False

    def begin(self, job: Job) -> None:
        """Stores the response as one in progress, so that clients can look it up and cancel its ``job``."""
        entry = _Kept(
            self._tenant, self._items, partial(self._response, "in_progress"), job, self._asked.store is not False
        )
        self._stored.begin(self.id, entry)

    def forget(self) -> None:
        """Removes a response in progress that failed, or whose client has left."""
        self._stored.end(self.id, None)

    def _response(self, status: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        done = status != "in_progress"
        response: dict[str, Any] = {"id": self.id, "object": "response", "created_at": int(self._created)}
        response |= {"completed_at": int(time.time()) if status == "completed" else None, "status": status}
        response |= {"model": self._model, **self._about, "error": None}
        response["incomplete_details"] = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response["output"] = [dict(item) for item in self._output] if done else []
        response["usage"] = None if usage is None else self._usage(usage)
        return response | {"enginewright": {"seed": self._seed, "spliced_tokens": self._spliced}}

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }

    def _take(self, news: News) -> list[dict[str, Any]]:
        """Adds new deltas to the items, and returns the events of the changes."""
        events: list[dict[str, Any]] = []
        self._pending += [self._scored(*one) for one in news.piece.logprobs or ()]
        for delta in news.deltas:
            kind = self._kind(delta)
            if not self._open or self._output[-1]["type"] != kind or delta.name is not None:
                events += self._closed("completed")
                events += self._begun(kind, delta)
            item, at = self._output[-1], len(self._output) - 1
            where = {"item_id": item["id"], "output_index": at}
            if kind in ("message", "reasoning"):
                text = delta.content or delta.reasoning
                item["content"][0]["text"] += text
                change = {**where, "content_index": 0, "delta": text}
                scores, self._pending = self._pending, []
                if kind == "message":
                    item["content"][0]["logprobs"] += scores
                    change["logprobs"] = scores
                name = "output_text" if kind == "message" else "reasoning_text"
                events.append({"type": f"response.{name}.delta", **change})
            else:
                self._pending = []
                field, name = _CALLS[kind]
                item[field] += delta.arguments
                if delta.arguments:
                    events.append({"type": f"response.{name}.delta", **where, "delta": delta.arguments})
        if news.finish_reason is not None:
            self._finish = news.finish_reason
            if self._open and self._output[-1]["type"] == "message":
                self._output[-1]["content"][0]["logprobs"] += self._pending
            events += self._closed("incomplete" if self._finish == "length" else "completed")
        return events

    def _kind(self, delta: Delta) -> str:
        if delta.call is None:
            return "reasoning" if delta.reasoning else "message"
        if delta.name is None:
            return str(self._output[-1]["type"])
        return "custom_tool_call" if delta.name in self._tools.custom else "function_call"

    def _scored(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, Any]:
        return self.entry(token, logprob) | {"top_logprobs": [self.entry(*one) for one in top]}

    def _begun(self, kind: str, delta: Delta) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"id": new_id(kind), "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": delta.id, "name": delta.name, _CALLS[kind][0]: ""}
            space, _, name = (delta.name or "").partition(NAMESPACE_SEPARATOR)
            if name and space in self._spaces:
                item |= {"namespace": space, "name": name}
        self._output.append(item)
        self._open, at = True, len(self._output) - 1
        events = [{"type": "response.output_item.added", "output_index": at, "item": dict(item)}]
        if "content" in item:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            part = part if kind == "message" else {"type": "reasoning_text", "text": ""}
            item["content"] = [part]
            where = {"item_id": item["id"], "output_index": at, "content_index": 0}
            events.append({"type": "response.content_part.added", **where, "part": _copy(part)})
        return events

    def _closed(self, status: str) -> list[dict[str, Any]]:
        """Ends the open item, if any, and returns the events for that."""
        if not self._open:
            return []
        self._open = False
        item, at = self._output[-1], len(self._output) - 1
        item["status"] = status
        where = {"item_id": item["id"], "output_index": at}
        events: list[dict[str, Any]] = []
        if "content" in item:
            (part,) = item["content"]
            where["content_index"] = 0
            done = {"type": f"response.{part['type']}.done", **where, "text": part["text"]}
            events.append(done | ({"logprobs": part["logprobs"]} if "logprobs" in part else {}))
            events.append({"type": "response.content_part.done", **where, "part": _copy(part)})
        else:
            field, name = _CALLS[item["type"]]
            more = {"name": item["name"]} if field == "arguments" else {}
            events.append({"type": f"response.{name}.done", **where, field: item[field], **more})
        return [*events, {"type": "response.output_item.done", "output_index": at, "item": _copy(item)}]

    def _done(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Stores and returns the finished response."""
        response = self._response("incomplete" if self._finish == "length" else "completed", usage)
        self._stored.end(self.id, response)
        return response

    def _events(self, events: Sequence[dict[str, Any]]) -> bytes:
        lines = []
        for one in events:
            lines.append(event({**one, "sequence_number": self._sequence}, one["type"]))
            self._sequence += 1
        return b"".join(lines)

    def add(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> None:
        """Sets the only answer. The arguments are those of `Shape.add`."""
        self._take(news)

    def response(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""
        return self._done(usage)

    def start(self, prompt: int) -> bytes:
        """Returns a stream's first events."""
        response = self._response("in_progress")
        return self._events([{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")])

    def news(self, index: int, news: News, usage: dict[str, Any] | None) -> bytes:
        """Returns the events of new deltas."""
        return self._events(self._take(news))

    def end(self, usage: dict[str, Any], ended: Sequence[Ended]) -> bytes:
        """Returns the last events of a stream. The arguments are those of `Shape.end`."""
        response = self._done(usage)
        return self._events([{"type": f"response.{response['status']}", "response": response}]) + DONE

    def failed(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that fails, or was cancelled."""
        events = self._closed("incomplete")
        response = self._response("cancelled" if self.cancelled else "failed")
        if self.cancelled:
            self._stored.end(self.id, response)
            return self._events([*events, {"type": "response.incomplete", "response": response}]) + DONE
        self.forget()
        problem = error.body_for("/v1/responses")["error"]
        response["error"] = {"code": problem["code"] or "server_error", "message": problem["message"]}
        return self._events([*events, {"type": "response.failed", "response": response}]) + DONE


_CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Type of a call's item -> (the field with the call's input, the part of event types that names it)."""


def _copy(value: Any) -> Any:
    """Returns a copy of a value of JSON, because items change later."""
    return msgspec.json.decode(msgspec.json.encode(value))


def add_responses(routes: Routes, front: Front) -> None:
    """Adds the endpoints of OpenAI's responses API to ``routes``; ``front`` has the models."""
    stored = Stored()

    def earlier(tenant: str, body: ResponseFields) -> list[dict[str, Any]]:
        """Returns the items of the conversation before this body: those of the response that it continues.

        Raises ApiError if that response isn't stored, and RequestError.
        """
        if body.previous_response_id is not None:
            try:
                entry = stored.find(tenant, body.previous_response_id)
            except ApiError as e:
                message = f"previous_response_id: {e}"
                raise ApiError(404, message, param="previous_response_id", problem=NO_RESPONSE) from None
            if entry.job is not None:
                raise RequestError("previous_response_id: that response isn't done yet", hint="Wait for its end.")
            return entry.all_items
        return []

    def about(body: ResponsesBody, chat: ChatBody, model: Model) -> dict[str, Any]:
        """Returns the fields of a response that repeat the request, with defaults for missing ones."""
        params = chat.params(model.model)
        tools = [({"strict": None} if tool.get("type") == "function" else {}) | tool for tool in body.tools or ()]
        reasoning = {"effort": None, "summary": None} | (body.reasoning or {})
        text_format: Any = (body.text or {}).get("format")
        schema = isinstance(text_format, dict) and text_format.get("type") == "json_schema"
        form = {"format": {"description": None, "strict": True, **text_format}} if schema else {}
        return {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": reasoning,
            "safety_identifier": None,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params["temperature"],
            "text": {"format": {"type": "text"}} | (body.text or {}) | form,
            "tool_choice": body.tool_choice or "auto",
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.get("top_p", 1.0),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "truncation": "disabled",
        }

    @routes.post("/v1/responses")
    async def create(request: Request) -> Response:
        """Answers a conversation, in the format of OpenAI's Responses API."""
        body, ignored, charge = await front.body(request, ResponsesBody)
        tenant = charge.tenant.name
        try:
            before = earlier(tenant, body)
        except BaseException:
            charge.end()
            raise

        def order(model: Model) -> Order:
            items = [*before, *items_of(body.input, partial(stored.item, tenant))]
            chat, more = chat_of(body, items)
            kind = partial(ResponsesShape, body, about(body, chat, model), stored, items, tenant)
            return Order(chat, kind, [*ignored, *more])

        response = await answer(front, request, charge, body.model, order)
        assert isinstance(response.job.shape, ResponsesShape)
        response.job.shape.begin(response.job)
        response.at_end = response.job.shape.forget
        return response

    @routes.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request) -> Response:
        """Counts the prompt tokens of a request to ``/v1/responses`` with the same body."""
        before: list[dict[str, Any]] = []

        def find(body: InputTokensBody) -> None:
            before.extend(earlier(request.state.tenant.name, body))

        def chat(body: InputTokensBody) -> ChatBody:
            items = items_of(body.input, partial(stored.item, request.state.tenant.name))
            return chat_of(body, [*before, *items])[0]

        count = await counted(front, request, InputTokensBody, chat, find)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    @routes.get("/v1/responses/{name}")
    async def retrieve(request: Request) -> Response:
        """Returns a response that is stored or in progress."""
        if from_query(request, "stream", False):
            raise RequestError("stream: an answer is streamed once", hint="Leave it out.")
        return json_response(stored.find(request.state.tenant.name, request.path_params["name"]).response())

    @routes.delete("/v1/responses/{name}")
    async def delete(request: Request) -> Response:
        """Deletes a stored response."""
        name = request.path_params["name"]
        stored.delete(request.state.tenant.name, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    @routes.post("/v1/responses/{name}/cancel")
    async def cancel(request: Request) -> Response:
        """Cancels a response in progress."""
        name = request.path_params["name"]
        entry = stored.find(request.state.tenant.name, name)
        if entry.job is None:
            raise ApiError(400, f"response {shown(name)} is done already", param="response_id")
        shape = entry.job.shape
        assert isinstance(shape, ResponsesShape)
        shape.cancelled = True
        entry.job.cancel(RequestError("the response was cancelled", hint="Ask again."))
        return json_response(entry.response() | {"status": "cancelled"})

    @routes.get("/v1/responses/{name}/input_items")
    async def input_items(request: Request) -> Response:
        """Returns the earlier conversation and the input of a response, as items."""
        items = stored.find(request.state.tenant.name, request.path_params["name"]).items
        limit, order = from_query(request, "limit", 20), from_query(request, "order", "desc")
        after = request.query_params.get("after")
        if order not in ("asc", "desc") or not 1 <= limit <= 100:
            raise RequestError("order or limit is out of range", hint='Order is "asc" or "desc", limit from 1 to 100.')
        rows = items if order == "asc" else items[::-1]
        if after is not None:
            at = next((i for i, item in enumerate(rows) if item["id"] == after), None)
            if at is None:
                raise RequestError(f"after: there is no item {shown(after)}", hint="Pass the last_id of a page.")
            rows = rows[at + 1 :]
        page = rows[:limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(rows) > limit})
