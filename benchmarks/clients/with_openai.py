"""OpenAI's client: tools in two rounds, a structured answer, and a prompt that is too long."""

import json

import openai
from cases import LONG, QUESTION, SCHEMA, TOOL, WEATHER, check, main
from openai import OpenAI


def tools(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    (call,) = first.choices[0].message.tool_calls
    check(first.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"city": "Paris"})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    second = client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    check("18 degrees" in second.choices[0].message.content)


def structured(url: str) -> None:
    from pydantic import BaseModel

    class Joke(BaseModel):
        setup: str
        punchline: str

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": "Tell me a joke about cats."}]
    answer = client.chat.completions.parse(model="scripted", messages=messages, response_format=Joke)
    check(answer.choices[0].message.parsed.setup.startswith("Why"))
    form = {"type": "json_schema", "json_schema": {"name": "joke", "schema": SCHEMA, "strict": True}}
    plain = client.chat.completions.create(model="scripted", messages=messages, response_format=form)
    check(set(json.loads(plain.choices[0].message.content)) == {"setup", "punchline"})


def overflow(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": LONG}])
    except openai.BadRequestError as e:
        check(e.code == "context_length_exceeded")
        return
    raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
