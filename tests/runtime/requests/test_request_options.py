"""The options of a request: one record, from a caller's arguments to the request."""

from __future__ import annotations

import msgspec
import pytest

from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.request_options import RequestArguments, RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.server.engines import records
from enginewright.runtime.server.protocols.bodies import Body, ChatBody
from enginewright.runtime.shared.errors import RequestError

NAMES = RequestOptions.__struct_fields__


def test_every_option_is_an_argument_and_a_field_of_bodies_but_the_tenant() -> None:
    assert set(RequestArguments.__annotations__) == set(NAMES)
    assert set(NAMES) - set(Body.__struct_fields__) == {"tenant"}


def test_the_record_crosses_the_socket_whole() -> None:
    options = RequestOptions("a", -2, "chat")
    data = records.packed(records.Submit(1, None, options))[records.LENGTH_BYTES :]
    submit = msgspec.msgpack.Decoder(records.ToEngine).decode(data)
    assert isinstance(submit, records.Submit) and submit.options == options


def test_a_body_has_the_options_of_its_requests() -> None:
    body = ChatBody(messages=[], priority=3, request_class="batch")
    assert body.request_options("me\0salt") == RequestOptions("me\0salt", 3, "batch")
    assert ChatBody(messages=[]).request_options("") == RequestOptions()


def test_a_request_has_them() -> None:
    options = RequestOptions("a", 4)
    request = Generation([1, 2], SamplingParams(max_tokens=1), options=options, adapter="d")
    assert (request.options, request.tenant, request.priority) == (options, "a", 4)
    assert request.branch().options == options
    again = Generation([1, 2], SamplingParams(max_tokens=1), **request.identity)
    assert (again.namespace, again.priority) == (request.namespace, 0)


def test_a_priority_for_each_prompt() -> None:
    arguments: RequestArguments = {"tenant": "a", "priority": [2, 1]}
    assert RequestOptions.for_prompts(arguments, 2) == [RequestOptions("a", 2), RequestOptions("a", 1)]
    assert RequestOptions.for_prompts({}, 2) == [RequestOptions()] * 2
    with pytest.raises(RequestError, match="priority: 2 of them for 3 prompts"):
        RequestOptions.for_prompts(arguments, 3)


def test_options_among_the_variables_of_a_chat() -> None:
    variables = {"tenant": "a", "tools": [], "request_class": None}
    assert RequestOptions.taken_from(variables) == {"tenant": "a", "request_class": None}
    assert variables == {"tools": []}
