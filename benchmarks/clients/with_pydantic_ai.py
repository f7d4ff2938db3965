"""pydantic-ai: an agent with a tool, a structured answer, and a prompt that is too long."""

from cases import JOKE, LONG, QUESTION, WEATHER, check, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def model(url: str) -> OpenAIChatModel:
    return OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def tools(url: str) -> None:
    agent = Agent(model(url))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Gives the weather of a city."""
        return WEATHER if city == "Paris" else "unknown"

    result = agent.run_sync(QUESTION)
    check("18 degrees" in result.output and len(result.all_messages()) == 4)


def structured(url: str) -> None:
    for form in (Joke, NativeOutput(Joke)):
        check(Agent(model(url), output_type=form).run_sync(JOKE).output.setup.startswith("Why"))


def overflow(url: str) -> None:
    try:
        Agent(model(url)).run_sync(LONG)
    except ModelHTTPError as e:
        check(e.status_code == 400 and "context_length_exceeded" in str(e.body))
        return
    raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
