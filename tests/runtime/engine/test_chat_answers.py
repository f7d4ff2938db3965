"""The constraints on a conversation's answers, and their parsing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from enginewright import LLM, RequestError, SamplingParams
from enginewright.runtime.engine.chat_answers import ChatAnswers
from enginewright.runtime.requests.structured import StructuredOutputsParams
from tests.runtime.conftest import ToyExecutor
from tests.runtime.text.chat_streams import MARKERS, TOOLS, answer, byte_tokenizer
from tests.runtime.text.test_chat_format import CALLS, call_template

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HERMES = byte_tokenizer(MARKERS["hermes"], special=False, template=call_template(CALLS["hermes"]))


class Weather(pydantic.BaseModel):
    city: str


def taken(**variables: Any) -> ChatAnswers:
    return ChatAnswers.taken_from(variables)


def test_they_are_taken_out_of_the_templates_variables() -> None:
    variables = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "enable_thinking": True}
    answers = ChatAnswers.taken_from(variables)
    assert variables == {"tools": TOOLS, "enable_thinking": True}
    assert (answers.choice, answers.parallel, answers.schema, len(answers.tools or ())) == ("required", False, None, 3)
    assert taken() == ChatAnswers() and taken().free
    named = taken(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert named.choice == "now" and not named.free


def test_forms_of_response_format() -> None:
    assert taken(response_format={"type": "text"}).schema is None
    assert taken(response_format={"type": "json_object"}).schema == {"type": "object"}
    openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert taken(response_format=openai).schema == SCHEMA
    schema = taken(response_format=Weather).schema
    assert schema is not None and schema["required"] == ["city"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"tool_choice": 3}, "tool_choice: 3 isn't taken"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: it names no tool"),
        ({"tool_choice": "required"}, "tool_choice: 'required', and no tools are offered"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: 'no' isn't True or False"),
        ({"response_format": "json"}, "response_format: 'json' isn't taken"),
        ({"response_format": {"type": "json_schema"}}, "response_format: it has no JSON schema"),
    ],
)
def test_what_is_wrong_is_named(variables: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ChatAnswers.taken_from(variables)


def test_parameters_get_the_grammar() -> None:
    params = SamplingParams(max_tokens=4)
    assert taken(tools=TOOLS).held(params, HERMES, []) is params
    held = taken(tools=TOOLS, tool_choice="required").held(params, HERMES, [])
    assert isinstance(held.structured_outputs, StructuredOutputsParams) and held.max_tokens == 4
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert taken(tools=strict).held(params, HERMES, []).structured_outputs is not None
    assert taken(tools=strict, tool_choice="none").held(params, HERMES, []) is params
    with pytest.raises(RequestError, match="said twice"):
        twice = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
        taken(response_format={"type": "json_object"}).held(twice, HERMES, [])


def test_answers_are_read_with_the_format_of_the_template_that_is_passed() -> None:
    one = answer("hermes", "Well.", "Hm.", [("now", {})])
    ids = HERMES.encode(HERMES.decode([]) + "Well.\n<tool_call>\n", add_special_tokens=False)
    ids += HERMES.encode('{"name": "now", "arguments": {}}\n</tool_call>', add_special_tokens=False)
    message = taken(tools=TOOLS).reader(HERMES, [])(ids)
    assert message.content == one.content and [call.name for call in message.calls] == ["now"]
    other = taken(tools=TOOLS, chat_template=call_template("{{ f.name }}")).reader(HERMES, [])(ids)
    assert not other.calls and other.content == HERMES.decode(ids)


def test_results_of_conversations_have_a_message(make_llm: Callable[..., LLM], toy: type[ToyExecutor]) -> None:
    llm = make_llm(toy())
    (result,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=5))
    assert result.message is not None and not result.message.calls
    assert result.message.content == result.text
    assert result.outputs[0].message == result.message
    (plain,) = llm.generate(["Hi"], SamplingParams(max_tokens=5))
    assert plain.message is None and plain.outputs[0].message is None
