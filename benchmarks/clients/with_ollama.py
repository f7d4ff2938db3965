"""Ollama's client: tools in two rounds, a structured answer, and a prompt that is too long."""

import json

import ollama
from cases import JOKE, LONG, QUESTION, SCHEMA, TOOL, WEATHER, check, main


def tools(url: str) -> None:
    client = ollama.Client(host=url)
    messages = [{"role": "user", "content": QUESTION}]
    first = client.chat(model="scripted", messages=messages, tools=[TOOL])
    (call,) = first.message.tool_calls
    check(call.function.arguments == {"city": "Paris"})
    messages += [first.message, {"role": "tool", "tool_name": "get_weather", "content": WEATHER}]
    check("18 degrees" in client.chat(model="scripted", messages=messages, tools=[TOOL]).message.content)


def structured(url: str) -> None:
    answer = ollama.Client(host=url).chat(
        model="scripted", messages=[{"role": "user", "content": JOKE}], format=SCHEMA, options={"temperature": 0}
    )
    check(set(json.loads(answer.message.content)) == {"setup", "punchline"})


def overflow(url: str) -> None:
    try:
        ollama.Client(host=url).chat(model="scripted", messages=[{"role": "user", "content": LONG}])
    except ollama.ResponseError as e:
        check(e.status_code == 400 and "exceeds the context length" in e.error)
        return
    raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
