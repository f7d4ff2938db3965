"""instructor: answers as objects, by tools and by a schema, and a prompt that is too long."""

import instructor
from cases import JOKE, LONG, QUESTION, check, main
from instructor.exceptions import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


def client(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def ask(one: instructor.Instructor, form: type[BaseModel], text: str) -> BaseModel:
    messages = [{"role": "user", "content": text}]
    return one.chat.completions.create(model="scripted", messages=messages, response_model=form, max_retries=1)


def tools(url: str) -> None:
    one = client(url, instructor.Mode.TOOLS)
    check(ask(one, GetWeather, QUESTION).city == "Paris")
    check(ask(one, Joke, JOKE).setup.startswith("Why"))


def structured(url: str) -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        check(ask(client(url, mode), Joke, JOKE).setup.startswith("Why"))


def overflow(url: str) -> None:
    try:
        ask(client(url, instructor.Mode.TOOLS), Joke, LONG)
    except InstructorRetryException as e:
        check("maximum context length" in str(e))
        return
    raise SystemExit("no error")


main(tools=tools, structured=structured, overflow=overflow)
