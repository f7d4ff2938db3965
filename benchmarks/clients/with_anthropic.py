"""Anthropic's client: tools in two rounds, a structured answer, and a prompt that is too long."""

import json

import anthropic
from cases import JOKE, LONG, PARAMETERS, QUESTION, SCHEMA, WEATHER, check, main

TOOLS = [{"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}]


def tools(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    first = client.messages.create(model="scripted", max_tokens=256, messages=messages, tools=TOOLS)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    check(first.stop_reason == "tool_use" and use.input == {"city": "Paris"})
    messages.append({"role": "assistant", "content": first.content})
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": WEATHER}]})
    second = client.messages.create(model="scripted", max_tokens=256, messages=messages, tools=TOOLS)
    check("18 degrees" in second.content[0].text)


def structured(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    answer = client.messages.create(
        model="scripted",
        max_tokens=256,
        messages=[{"role": "user", "content": JOKE}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    check(set(json.loads(answer.content[0].text)) == {"setup", "punchline"})


def overflow(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    try:
        client.messages.create(model="scripted", max_tokens=256, messages=[{"role": "user", "content": LONG}])
    except anthropic.BadRequestError as e:
        check("prompt is too long" in str(e))
        return
    raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
