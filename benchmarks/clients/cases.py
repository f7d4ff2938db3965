"""The parts shared by the scripts of this folder. Each is run as ``python with_NAME.py URL CASE``.

The server's engine is a script (``agents.py``): it calls ``get_weather`` for the question, answers its result with a
sentence, and tells a joke as JSON.
"""

import sys
from collections.abc import Callable

QUESTION = "What is the weather in Paris right now?"
WEATHER = "18 degrees, clear"
JOKE = "Tell me a joke about cats."
LONG = "word " * 80_000
"""More than the context of the scripted model."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "object",
    "properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}},
    "required": ["setup", "punchline"],
    "additionalProperties": False,
}


def check(holds: object) -> None:
    """Ends the script with an error where something doesn't hold."""
    if not holds:
        raise AssertionError("the answer is another one")


def main(**cases: Callable[[str], None]) -> None:
    """Runs the case that the command line names."""
    url, name = sys.argv[1:]
    if name not in cases:
        raise SystemExit(f"no case {name}")
    cases[name](url)
    print("done")
