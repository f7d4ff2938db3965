"""litellm: tools in two rounds, a structured answer, and a prompt that is too long, by three protocols."""

import json

import litellm
from cases import JOKE, LONG, QUESTION, SCHEMA, TOOL, WEATHER, check, main

litellm.suppress_debug_info = True


def places(url: str) -> list[dict[str, str]]:
    return [
        {"model": "openai/scripted", "api_base": f"{url}/v1", "api_key": "none"},
        {"model": "anthropic/scripted", "api_base": url, "api_key": "none"},
        {"model": "ollama_chat/scripted", "api_base": url},
    ]


def tools(url: str) -> None:
    for place in places(url):
        messages = [{"role": "user", "content": QUESTION}]
        first = litellm.completion(**place, messages=messages, tools=[TOOL])
        (call,) = first.choices[0].message.tool_calls
        check(json.loads(call.function.arguments) == {"city": "Paris"})
        messages.append(first.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": WEATHER})
        second = litellm.completion(**place, messages=messages, tools=[TOOL])
        check("18 degrees" in second.choices[0].message.content)


def structured(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "joke", "schema": SCHEMA, "strict": True}}
    for place in (places(url)[0], places(url)[2]):
        answer = litellm.completion(**place, messages=[{"role": "user", "content": JOKE}], response_format=form)
        check(set(json.loads(answer.choices[0].message.content)) == {"setup", "punchline"})


def overflow(url: str) -> None:
    """litellm knows the words of OpenAI and Anthropic; an error of Ollama's is a plain BadRequestError to it."""
    for place in places(url):
        known = litellm.BadRequestError if "ollama" in place["model"] else litellm.ContextWindowExceededError
        try:
            litellm.completion(**place, messages=[{"role": "user", "content": LONG}], num_retries=0)
        except known as e:
            check("maximum context length" in str(e) or "prompt is too long" in str(e))
            continue
        raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
