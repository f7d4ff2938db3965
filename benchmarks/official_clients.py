"""Clients by OpenAI's package that compare each answer with the one that the request gets alone, for
``serve_endurance.py``.

Questions are greedy, drawn with a seed, or beam searches. Many begin alike and diverge at odd places, and a greedy one
has a second turn: its prompt is the first one, its answer, and some more tokens. Half of the answers are streams, and
a client leaves one in ten of these in the middle.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

LEAVES = 0.1
"""The share of streams that a client leaves."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "beams": {"num_beams": 3, "temperature": 0.0},
}
ORDER = ("greedy", "drawn", "greedy", "beams", "greedy", "greedy", "greedy")
"""The kinds of consecutive conversations, repeated."""


@dataclass(frozen=True)
class Question:
    """A request, and the tokens of its answer when nothing else runs.

    Attributes:
        kind: one of ``KINDS``.
        prompt: token ids.
        fields: parameters, by the names that ``SamplingParams`` and the server's bodies share.
        answer: token ids.
    """

    kind: str
    prompt: tuple[int, ...]
    fields: dict[str, Any]
    answer: tuple[int, ...]


@dataclass
class Tally:
    """The outcome of all clients.

    Attributes:
        answers: complete answers by kind.
        left: streams that a client left.
        tokens: tokens of complete answers.
        prompts: tokens of the prompts of answers that aren't streams.
        cached: those of ``prompts`` that the prefix cache had.
        seconds: the time that each complete answer took.
        wrong: answers that differ from the one alone, and errors.
    """

    answers: Counter[str] = field(default_factory=Counter)
    left: int = 0
    tokens: int = 0
    prompts: int = 0
    cached: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def questions(bundle: Path, count: int, seed: int = 0) -> list[list[Question]]:
    """Makes ``count`` conversations of one or two turns, and has each turn answered alone: one request at a time,
    without a prefix cache and without drafts.
    """
    from enginewright import LLM, SamplingParams
    from enginewright.runtime.bundle.reader import Bundle

    model = Bundle.open(bundle).model
    rng, longest = random.Random(seed), min(model.context_length // 2, 400)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, model.vocab_size) for _ in range(rng.randint(least, most)))

    beginnings = [tokens(longest // 2, longest) for _ in range(4)]
    conversations = []
    with LLM(bundle, prefix_cache=False, speculate=None) as llm:
        for _, kind in zip(range(count), itertools.cycle(ORDER), strict=False):
            beginning = rng.choice(beginnings)
            prompt = (*beginning[: rng.randint(1, len(beginning))], *tokens(1, 24))
            turns: list[Question] = []
            while len(turns) < (2 if kind == "greedy" else 1):
                fields = KINDS[kind] | {"max_tokens": rng.randint(1, 32), "ignore_eos": True}
                fields |= {"seed": rng.randrange(1 << 31)} if kind == "drawn" else {}
                (output,) = llm.generate([list(prompt)], SamplingParams(**fields))
                turns.append(Question(kind, prompt, fields, tuple(output.token_ids)))
                prompt = (*prompt, *output.token_ids, *tokens(1, 24))
            conversations.append(turns)
    return conversations


def run(url: str, model: str, conversations: Sequence[Sequence[Question]], clients: int, seconds: float) -> Tally:
    """Has clients ask for some seconds, each one conversation after the other, and at least one question each."""
    return asyncio.run(_run(url, model, conversations, clients, seconds))


async def _run(
    url: str, model: str, conversations: Sequence[Sequence[Question]], clients: int, seconds: float
) -> Tally:
    tally, end = Tally(), time.monotonic() + seconds
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600.0) as client:

        async def one(number: int) -> None:
            rng = random.Random(number)
            for at in itertools.count(number * 7):
                for question in conversations[at % len(conversations)]:
                    await _ask(client, model, question, tally, rng)
                    if time.monotonic() > end:
                        return

        await asyncio.gather(*map(one, range(clients)))
    return tally


async def _ask(client: openai.AsyncOpenAI, model: str, question: Question, tally: Tally, rng: random.Random) -> None:
    """Asks a question, and compares the answer."""
    stream, began = question.kind != "beams" and rng.random() < 0.5, time.monotonic()
    more = {name: question.fields[name] for name in ("ignore_eos", "num_beams") if name in question.fields}
    body: dict[str, Any] = {name: value for name, value in question.fields.items() if name not in more}
    body |= {"model": model, "prompt": list(question.prompt), "extra_body": more | {"return_token_ids": True}}
    try:
        if stream:
            tokens = list[int]()
            leaves = rng.random() < LEAVES
            async with await client.completions.create(stream=True, **body) as pieces:
                async for piece in pieces:
                    tokens += _tokens(piece)
                    if leaves:
                        tally.left += 1
                        return
        else:
            whole = await client.completions.create(**body)
            tokens = _tokens(whole)
            if (usage := whole.usage) is not None and usage.prompt_tokens_details is not None:
                tally.prompts += usage.prompt_tokens
                tally.cached += usage.prompt_tokens_details.cached_tokens or 0
    except openai.OpenAIError as e:
        tally.wrong.append(f"{question.kind}: {type(e).__name__}: {e}"[:300])
        return
    if tuple(tokens) != question.answer:
        tally.wrong.append(f"{question.kind}: {len(question.prompt)} tokens, then {tokens}, alone {question.answer}")
    tally.answers[question.kind] += 1
    tally.tokens += len(tokens)
    tally.seconds.append(time.monotonic() - began)


def _tokens(completion: Any) -> list[int]:
    """Returns the token ids of an answer's first choice, or of a piece of it."""
    return [token for choice in completion.choices[:1] for token in choice.model_extra.get("token_ids") or ()]
