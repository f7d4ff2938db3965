"""LlamaIndex: an agent with a tool, a structured answer, and a prompt that is too long."""

import asyncio

import openai
from cases import JOKE, LONG, QUESTION, WEATHER, check, main
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def model(url: str) -> OpenAILike:
    return OpenAILike(
        model="scripted",
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=65536,
        max_retries=0,
    )


def get_weather(city: str) -> str:
    """Gives the weather of a city."""
    return WEATHER if city == "Paris" else "unknown"


def tools(url: str) -> None:
    async def run() -> str:
        return str(await FunctionAgent(tools=[get_weather], llm=model(url)).run(QUESTION))

    check("18 degrees" in asyncio.run(run()))


def structured(url: str) -> None:
    answer = model(url).as_structured_llm(Joke).complete(JOKE)
    check(answer.raw.setup.startswith("Why"))


def overflow(url: str) -> None:
    try:
        model(url).complete(LONG)
    except openai.BadRequestError as e:
        check(e.code == "context_length_exceeded")
        return
    raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
