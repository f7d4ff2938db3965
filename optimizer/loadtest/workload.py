"""The requests of a load test: prompts, times, and the clients that leave, all determined by the seed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import Any

from enginewright.runtime.bundle.regular_file import read_regular
from enginewright.runtime.shared.errors import RequestError

from .options import MOST_LENGTH, LoadOptions, RequestClass

REQUESTS = 100
"""Requests to send if no option says how many."""

_MOST_TRACE_BYTES = 1 << 30
_HASH_BLOCK = 512
"""The tokens of a block that one entry of ``hash_ids`` stands for, in Mooncake's traces."""

_WORDS = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by not word
but what some we can out other were all there when up use your how said an each she which do their time if will
way about many then them write would like so these her long make thing see him two has look more day could go
come did number sound no most people my over know water than call first who may down side been now find any new
work part take get place made live where after back little only round man year came show every good me give our
under name very through just form great think say help low line before turn cause same mean move right boy old
too does tell set three want air well also play small end put home read hand port large spell add even land here
must big high such follow act why ask men change went light kind off need house picture try us again animal
point mother world near build self earth father head stand own page should country found answer school grow
study still learn plant cover food sun four thought let keep eye never last door between city tree cross since
hard start might story saw
"""

WORDS = tuple(_WORDS.split())
"""Common words. In most tokenizers each is one token, so that n words are about n tokens."""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        prompt: a text, the messages of a trace, or the texts of a request for embeddings.
        words: the intended length of the prompt, in tokens.
        answer: the most tokens of the answer.
        leave_after: the number of pieces of the answer after which the client disconnects; None if it stays.
    """

    prompt: str | tuple[Mapping[str, Any], ...] | tuple[str, ...]
    words: int
    answer: int
    leave_after: int | None = None


@dataclass(frozen=True)
class Conversation:
    """A conversation of one client.

    Attributes:
        index: its number.
        of_class: the class of its requests.
        turns: its turns, in order.
        prefix: the text before the first prompt, which other conversations share.
        at: the time at which the first turn is to be sent, in seconds from the start.
    """

    index: int
    of_class: RequestClass
    turns: tuple[Turn, ...]
    prefix: str = ""
    at: float = 0.0


@dataclass(frozen=True)
class Row:
    """A line of a trace; a field is None if the line hasn't it.

    Attributes:
        at: the time, in seconds.
        prompt: a text, messages, or a number of tokens.
        answer: maximum tokens of the answer.
        of_class: the name of the request's class.
        blocks: ids of the prompt's leading blocks of 512 tokens; rows with equal ids share these tokens.
    """

    at: float | None
    prompt: str | int | tuple[Mapping[str, Any], ...] | None
    answer: int | None
    of_class: str | None
    blocks: tuple[int, ...] = ()


class Workload:
    """All conversations, in the order in which they begin.

    Args:
        options: the checked options of the test.

    Attributes:
        rows: the lines of the trace; empty without one.
        is_open: True in an open loop, where conversations begin at planned times; False in a closed one, where each of
            ``clients`` clients begins one after the other.
        clients: the number of clients of a closed loop; 0 in an open one.
        total: the number of conversations; None for as many as the time of the test allows.

    Raises:
        RequestError: the trace can't be read, or has no times where they are needed.
    """

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        self.rows = () if options.trace is None else read_trace(options.trace)
        timed = bool(self.rows) and all(row.at is not None for row in self.rows)
        self.is_open = options.rate is not None or (options.clients is None and timed)
        self.clients = 0 if self.is_open else options.clients or 4
        self.total = self._total()
        self._classes = {one.name: one for one in options.classes}
        if len(self._classes) > 1:
            for unknown in (row.of_class for row in self.rows if row.of_class not in (None, *self._classes)):
                raise RequestError(f"trace: {options.trace}: there is no class {unknown!r}")
        self._shares = list(accumulate(one.share for one in options.classes))
        self._prefixes = [
            _text(Random(f"{options.seed}/prefix/{i}"), options.shared_prefix) for i in range(options.prefixes)
        ]

    def _total(self) -> int | None:
        """Returns the number of conversations; None for as many as the time of the test allows."""
        options = self.options
        total = options.requests
        if total is None and options.seconds is None:
            total = len(self.rows) or REQUESTS
        if self.rows and self.is_open and options.rate is None:  # a trace has the time of each of its rows once
            return len(self.rows) if total is None else min(len(self.rows), total)
        return total

    def __iter__(self) -> Iterator[Conversation]:
        times = self.times() if self.is_open else _zeros()
        for index, at in islice(enumerate(times), self.total):
            if self.is_open and self.options.seconds is not None and at > self.options.seconds:
                return
            yield self.conversation(index, at)

    def times(self) -> Iterator[float]:
        """Yields the times at which conversations begin, in seconds from the start, in an open loop."""
        options = self.options
        if options.rate is None:
            first = self.rows[0].at or 0.0
            yield from (((row.at or 0.0) - first) / options.speed for row in self.rows)
            return
        rng, at = Random(f"{options.seed}/arrivals"), 0.0
        while True:
            yield at
            if options.arrivals == "constant":
                at += 1 / options.rate
            elif options.arrivals == "poisson":
                at += rng.expovariate(options.rate)
            else:
                at = self._after(at, rng.expovariate(1.0))

    def _after(self, at: float, due: float) -> float:
        """Returns the time at which the integral of the rate, from the time ``at`` on, reaches ``due``.

        With exponential values of ``due`` the times are a Poisson process with a varying rate.
        """
        rate, burst = self.options.rate or 0.0, self.options.burst
        fast = burst.factor * rate
        calm = burst.every - burst.on
        slow = rate * (burst.every - burst.factor * burst.on) / calm if calm > 0 else 0.0
        while True:
            place = at % burst.every
            now, end = (fast, burst.on) if place < burst.on else (slow, burst.every)
            left = end - place
            if now * left >= due and now > 0:
                return at + due / now
            due -= now * left
            at += max(left, 1e-9)  # never stuck where a place rounds to the end

    def conversation(self, index: int, at: float = 0.0) -> Conversation:
        """Returns conversation number ``index``, which starts at time ``at``, in seconds. Its content depends on the
        seed and ``index`` alone.
        """
        options = self.options
        rng = Random(f"{options.seed}/{index}")
        row = self.rows[index % len(self.rows)] if self.rows else Row(None, None, None, None)
        drawn = rng.random() * self._shares[-1]
        chosen = next(one for one, share in zip(options.classes, self._shares, strict=True) if drawn <= share)
        of_class = self._classes.get(row.of_class or chosen.name, chosen)
        turns = []
        embeds = options.api == "embeddings"
        for _ in range(1 if embeds else of_class.turns.draw(rng)):
            words, answer = of_class.prompt.draw(rng), of_class.answer.draw(rng)
            answer = answer if row.answer is None else row.answer
            leaves, after = rng.random() < of_class.leave, rng.random()
            prompt: str | tuple[Mapping[str, Any], ...] | tuple[str, ...]
            if row.prompt is None or isinstance(row.prompt, int):
                words = words if row.prompt is None else row.prompt
                prompt = self._prompt(rng, words, row.blocks)
            else:
                prompt, words = row.prompt, 0
            if embeds:
                more = [self._prompt(rng, of_class.prompt.draw(rng), ()) for _ in range(1, of_class.texts.draw(rng))]
                prompt = (*((prompt,) if isinstance(prompt, str) else map(_said, prompt)), *more)
            turns.append(Turn(prompt, words, answer, 1 + int(after * max(1, answer - 1)) if leaves else None))
        prefix = self._prefixes[rng.randrange(len(self._prefixes))]
        return Conversation(index, of_class, tuple(turns), prefix, at)

    def _prompt(self, rng: Random, words: int, blocks: tuple[int, ...]) -> str:
        """Returns a prompt of random words.

        Args:
            rng: draws the words.
            words: the length of the prompt.
            blocks: the ids of the blocks of 512 words with which it begins. An id always stands for the same words.
        """
        seed = self.options.seed
        shared = [_text(Random(f"{seed}/block/{block}"), _HASH_BLOCK) for block in blocks[: words // _HASH_BLOCK]]
        return " ".join([*shared, _text(rng, words - _HASH_BLOCK * len(shared))]).strip()

    def describe(self) -> dict[str, Any]:
        """Describes the load that was sent, as JSON values for a result."""
        options = self.options
        facts: dict[str, Any] = {"loop": "open" if self.is_open else "closed", "seed": options.seed}
        if not self.is_open:
            facts["clients"] = self.clients
        elif options.rate is not None:
            facts |= {"rate": options.rate, "arrivals": options.arrivals}
            if options.arrivals == "bursts":
                facts["burst"] = vars(options.burst)
        if options.trace is not None:
            facts |= {"trace": str(options.trace), "speed": options.speed}
        facts |= {"requests": self.total, "seconds": options.seconds, "think": options.think}
        facts |= {"shared_prefix": options.shared_prefix, "prefixes": options.prefixes}
        facts["classes"] = [
            {
                "name": one.name,
                "share": one.share,
                **{name: getattr(one, name).text for name in ("prompt", "answer", "turns", "texts")},
                "leave": one.leave,
                "goals": vars(one.goals),
                "body": dict(one.body),
            }
            for one in options.classes
        ]
        return facts


def _said(message: Any) -> str:
    """Returns the text of a trace's message, for a request for embeddings; empty if it has none."""
    content = message.get("content") if isinstance(message, Mapping) else message
    return content if isinstance(content, str) else ""


def _zeros() -> Iterator[float]:
    while True:
        yield 0.0


def _text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(0, words)))


def read_trace(path: Path) -> tuple[Row, ...]:
    """Reads a trace: lines of JSON objects, or a CSV file with Azure's headings.

    The keys of a JSON line are ``at`` (seconds), ``prompt`` (a text, or a number of tokens) or ``messages``,
    ``max_tokens``, and ``class`` (the name of a `RequestClass`). Mooncake's keys are ``timestamp`` (milliseconds),
    ``input_length``, ``output_length`` and ``hash_ids``. All keys are optional. Azure's headings are TIMESTAMP,
    ContextTokens and GeneratedTokens, and none may be missing. Raises RequestError naming the file and the line.
    """
    try:
        text = read_regular(path, most=_MOST_TRACE_BYTES).decode()
    except (OSError, ValueError) as e:
        raise RequestError(f"trace: {path}: {getattr(e, 'strerror', None) or e}") from e
    azure = text.startswith("TIMESTAMP,")
    lines = csv.DictReader(io.StringIO(text)) if azure else (line for line in text.splitlines() if line.strip())
    rows: list[Row] = []
    try:
        for line in lines:
            rows.append(_azure_row(line) if isinstance(line, dict) else _row(json.loads(line)))
    except (ValueError, KeyError, TypeError, csv.Error) as e:
        why = f"there is no {e}" if isinstance(e, KeyError) else e
        hint = "`optimize loadtest --help` names what a trace may be."
        raise RequestError(f"trace: {path}: request {len(rows) + 1}: {why}", hint=hint) from e
    if not rows:
        raise RequestError(f"trace: {path}: it is empty")
    return tuple(sorted(rows, key=lambda row: row.at or 0.0))


_KEYS = frozenset(
    {"at", "timestamp", "prompt", "messages", "input_length", "max_tokens", "output_length", "class", "hash_ids"}
)


def _row(given: Any) -> Row:
    """Converts a JSON value of a trace to a ``Row``. Raises ValueError if it isn't an object or has a wrong field."""
    if not isinstance(given, dict):
        raise ValueError("it isn't an object")
    if unknown := sorted(set(given) - _KEYS):
        raise ValueError(f"there is no field {unknown[0]!r}")
    at = given["timestamp"] / 1e3 if "timestamp" in given else given.get("at")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not at >= 0):
        raise ValueError("at: it isn't a time")
    prompt = given.get("prompt", given.get("input_length"))
    if "messages" in given:
        messages = given["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise ValueError("messages: it isn't a list of messages")
        prompt = tuple(messages)
    elif prompt is not None and not isinstance(prompt, str):
        prompt = _length(prompt)
    answer = given.get("max_tokens", given.get("output_length"))
    name = given.get("class")
    if name is not None and not isinstance(name, str):
        raise ValueError("class: it isn't a name")
    blocks = _numbers(given.get("hash_ids", ()))
    return Row(at, prompt, None if answer is None else _length(answer), name, blocks)


def _azure_row(line: Mapping[str, Any]) -> Row:
    """Returns the row of a line with Azure's headings. Raises ValueError, KeyError or TypeError."""
    at = datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp()
    return Row(at, _length(line["ContextTokens"]), _length(line["GeneratedTokens"]), None)


def _length(value: Any) -> int:
    length = int(value)
    if isinstance(value, bool | float) or not 0 <= length <= MOST_LENGTH:
        raise ValueError(f"{value!r} isn't a number of tokens")
    return max(1, length)


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
