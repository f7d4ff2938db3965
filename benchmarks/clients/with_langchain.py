"""LangChain: an agent with a tool, a structured answer, and a prompt that is too long."""

from cases import JOKE, LONG, QUESTION, WEATHER, check, main
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none", max_retries=0)


def get_weather(city: str) -> str:
    """Gives the weather of a city."""
    return WEATHER if city == "Paris" else "unknown"


def tools(url: str) -> None:
    agent = create_agent(model(url), tools=[get_weather])
    answer = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    check("18 degrees" in answer["messages"][-1].content and len(answer["messages"]) == 4)


def structured(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        answer = model(url).with_structured_output(Joke, method=method).invoke(JOKE)
        check(answer.setup.startswith("Why"))


def overflow(url: str) -> None:
    try:
        model(url).invoke(LONG)
    except ContextOverflowError:
        return
    raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
