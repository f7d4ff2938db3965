"""A service that finds events in texts and answers with JSON, from a GGUF file, a model's folder, a Hub id or a bundle.

    python examples/json_service.py SmolLM2-135M-Instruct-Q4_1.gguf --port 8080
    curl http://localhost:8080/ --data "Anna meets Ben in Paris on Friday."

A model is exported once and kept. Requests that come at the same time share the engine's steps. Needs
``enginewright[serve]``, and for a model that isn't exported yet ``enginewright[export]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import enginewright as ew

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "day": {"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", None]},
        "people": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 4},
    },
    "required": ["title", "day", "people"],
}
PARAMS = ew.SamplingParams(max_tokens=400, temperature=0, structured_outputs={"json": SCHEMA})
MOST_BYTES = 4000


async def event_in(llm: ew.LLM, text: str) -> dict[str, object]:
    """Returns the event as ``SCHEMA`` describes it. Raises ValueError if the answer is cut off by ``max_tokens``."""
    question = f"{text}\n\nDescribe the event in this text as JSON with its title, its day and its people."
    (output,) = await llm.achat([{"role": "user", "content": question}], PARAMS)
    return dict(json.loads(output.text))


def application(llm: ew.LLM) -> Starlette:
    """Returns the service: it takes a text by POST."""

    async def answer(request: Request) -> JSONResponse:
        text = await request.body()
        if not 0 < len(text) <= MOST_BYTES:
            return JSONResponse({"error": f"send a text of 1 to {MOST_BYTES} bytes"}, 400)
        try:
            return JSONResponse(await event_in(llm, text.decode(errors="replace")))
        except (ew.EnginewrightError, ValueError) as e:
            return JSONResponse({"error": str(e)}, 503)

    return Starlette(routes=[Route("/", answer, methods=["POST"])])


def main() -> None:
    """Serves, or with ``--text`` prints one answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a GGUF file, a folder, a Hub id or a bundle")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--text", help="answer this text, and end")
    options = parser.parse_args()
    try:
        llm = ew.LLM(options.model)
    except ew.EnginewrightError as e:
        parser.exit(e.exit_code, f"error: {e}\n")
    with llm:
        if options.text is None:
            uvicorn.run(application(llm), port=options.port, log_level="warning")
        else:
            print(json.dumps(asyncio.run(event_in(llm, options.text)), indent=1))


if __name__ == "__main__":
    main()
