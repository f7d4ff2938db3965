"""A conversation of two turns, printed as it comes; then two answers at once, with asyncio.

python examples/stream.py smollm2.bundle
"""

from __future__ import annotations

import asyncio
import sys

import enginewright as ew


def converse(llm: ew.LLM, questions: list[str], params: ew.SamplingParams) -> None:
    """Asks one question after the other, each with all that was said before."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = ""
        for piece in llm.stream_chat(messages, params):
            print(piece.text, end="", flush=True)
            answer += piece.text
        print()
        messages.append({"role": "assistant", "content": answer})


async def answer(llm: ew.LLM, question: str, params: ew.SamplingParams) -> str:
    """One answer; any number may be awaited at a time, and they share the engine's steps."""
    messages = [{"role": "user", "content": question}]
    return "".join([piece.text async for piece in llm.astream_chat(messages, params)])


async def answer_all(llm: ew.LLM, questions: list[str], params: ew.SamplingParams) -> list[str]:
    """All answers, in the order of the questions."""
    return list(await asyncio.gather(*(answer(llm, question, params) for question in questions)))


def main(bundle: str) -> None:
    """Prints the conversation, then the two answers."""
    params = ew.SamplingParams(max_tokens=32)
    with ew.LLM(bundle) as llm:
        converse(llm, ["What is the capital of Germany?", "Write one sentence about it."], params)
        for text in asyncio.run(answer_all(llm, ["Name a colour.", "Name a fruit."], params)):
            print("-", text)


if __name__ == "__main__":
    main(sys.argv[1])
