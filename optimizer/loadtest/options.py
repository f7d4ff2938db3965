"""The options of a load test: from flags, and from a TOML file if there are classes of requests."""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, Literal
from urllib.parse import urlsplit

from enginewright.optimizer.plan.options import parse_seconds
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import RequestError

MOST_LENGTH = 1 << 20
_LENGTHS = "Pass 128, 20-200, lognormal:MEDIAN:SIGMA, or a file of numbers, one a line."

Api = Literal["chat", "completions", "embeddings"]
Arrivals = Literal["poisson", "constant", "bursts"]


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: one of ``values`` if there are some, else the distribution of ``kind``.

    Attributes:
        text: the option's text.
        kind: "uniform" from ``low`` to ``high``, or "lognormal" with the median ``low`` and the sigma ``high``.
    """

    text: str
    kind: Literal["uniform", "lognormal"] = "uniform"
    low: float = 1.0
    high: float = 1.0
    values: tuple[int, ...] = ()

    def draw(self, rng: Random) -> int:
        """Draws a random length from the distribution, at least 1."""
        if self.values:
            return rng.choice(self.values)
        if self.kind == "uniform":
            return rng.randint(int(self.low), int(self.high))
        return min(MOST_LENGTH, max(1, round(rng.lognormvariate(math.log(self.low), self.high))))


def parse_lengths(text: str | int, option: str) -> Lengths:
    """Parses an option: "128", "20-200", "lognormal:100:0.5" (median and sigma), or a file with a length in each line.

    Raises RequestError naming the option.
    """
    text = str(text).strip()
    number = r"(\d+(?:\.\d+)?)"
    if (match := re.fullmatch(r"(\d+)(?:-(\d+))?", text)) is not None:
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high <= MOST_LENGTH:
            raise RequestError(f"{option}: {text} is out of range", hint=f"It must be from 1 to {MOST_LENGTH:,}.")
        return Lengths(text, "uniform", low, high)
    if (match := re.fullmatch(rf"lognormal:{number}:{number}", text)) is not None:
        median, sigma = float(match[1]), float(match[2])
        if not 1 <= median <= MOST_LENGTH or sigma > 5:
            raise RequestError(f"{option}: {text} is out of range", hint="The median is 1 or more, sigma 5 at most.")
        return Lengths(text, "lognormal", median, sigma)
    try:
        data = read_regular(Path(text), most=MOST_JSON_BYTES).decode()
        values = tuple(int(line) for line in data.splitlines() if line.strip())
    except (OSError, ValueError) as e:
        raise RequestError(f"{option}: {text!r} isn't a length: {e}", hint=_LENGTHS) from e
    if not values or not all(1 <= value <= MOST_LENGTH for value in values):
        raise RequestError(f"{option}: {text}: not all lines are lengths from 1 to {MOST_LENGTH:,}", hint=_LENGTHS)
    return Lengths(text, values=values)


@dataclass(frozen=True)
class Goals:
    """Goals for a request's times: the most seconds to the first token, for each further token, and to the end.

    None means no goal.
    """

    ttft: float | None = None
    tpot: float | None = None
    end_to_end: float | None = None

    @property
    def some(self) -> bool:
        """Returns True if there is at least one goal."""
        return any(value is not None for value in vars(self).values())


@dataclass(frozen=True)
class RequestClass:
    """A kind of requests.

    Attributes:
        name: its name.
        share: its share of all requests.
        prompt, answer, turns: the lengths of prompts, of answers, and of conversations in turns.
        texts: the number of texts of a request for embeddings, each as long as a prompt.
        leave: the share of its clients that leave before the end.
        goals: the goals for its times.
        body: further fields of its requests' bodies.
    """

    name: str = ""
    share: float = 1.0
    prompt: Lengths = field(default_factory=lambda: parse_lengths("128", "prompt"))
    answer: Lengths = field(default_factory=lambda: parse_lengths("64", "answer"))
    turns: Lengths = field(default_factory=lambda: parse_lengths("1", "turns"))
    texts: Lengths = field(default_factory=lambda: parse_lengths("1", "texts"))
    leave: float = 0.0
    goals: Goals = Goals()
    body: Mapping[str, Any] = field(default_factory=dict)


def read_classes(path: Path, default: RequestClass) -> tuple[RequestClass, ...]:
    """Returns the classes of a TOML file, one for each table; ``default`` has missing values. Raises RequestError."""
    try:
        document = tomllib.loads(read_regular(path, most=MOST_JSON_BYTES).decode())
    except (OSError, ValueError) as e:
        raise RequestError(f"classes: {path}: {getattr(e, 'strerror', None) or e}") from e
    classes = []
    known = {one.name for one in fields(RequestClass)} - {"name", "goals"} | {one.name for one in fields(Goals)}
    for name, table in document.items():
        where = f"classes: {path}: {name}"
        if not isinstance(table, dict):
            raise RequestError(f"{where} isn't a table", hint=f"Write [{name}], and its options below.")
        if (unknown := next((key for key in table if key not in known), None)) is not None:
            raise RequestError(
                f"{where}: there is no option {unknown!r}", hint=f"There are {', '.join(sorted(known))}."
            )
        options: dict[str, Any] = vars(default) | {"name": name}
        times = {key: parse_seconds(str(table[key]), f"{where}: {key}") for key in vars(default.goals) if key in table}
        options["goals"] = Goals(**(vars(default.goals) | times))
        for key in ("prompt", "answer", "turns", "texts"):
            if key in table:
                options[key] = parse_lengths(table[key], f"{where}: {key}")
        for key in ("share", "leave"):
            if key in table:
                options[key] = table[key]
        if not isinstance(table.get("body", {}), dict):
            raise RequestError(f"{where}: body isn't a table", hint=f"Write [{name}.body], and its fields below.")
        options["body"] = {**default.body, **table.get("body", {})}
        classes.append(_checked(RequestClass(**options), f"{where}: "))
    if not classes or sum(one.share for one in classes) <= 0:
        raise RequestError(f"classes: {path}: there is no class with a share", hint="Write [chat] and share = 1.")
    return tuple(classes)


def _checked(one: RequestClass, where: str) -> RequestClass:
    for name, most in (("share", math.inf), ("leave", 1.0)):
        value = getattr(one, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise RequestError(f"{where}{name}: {value!r} is out of range", hint="It must be a share, such as 0.1.")
    return one


@dataclass(frozen=True)
class Burst:
    """Bursts of requests: ``factor`` times the mean rate for ``on`` of every ``every`` seconds.

    Between bursts the rate is lower, so that the mean stays the same.
    """

    factor: float = 5.0
    on: float = 4.0
    every: float = 20.0


def parse_burst(text: str) -> Burst:
    """Parses a burst: 5x4s/20s is five times the rate for 4 of every 20 seconds. Raises RequestError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x([^/]+)/([^/]+)", text.strip())
    if match is None:
        raise RequestError(f"burst: {text!r} isn't a burst", hint="Pass 5x4s/20s: 5 times the rate for 4 of 20 s.")
    burst = Burst(float(match[1]), parse_seconds(match[2], "burst"), parse_seconds(match[3], "burst"))
    if burst.factor < 1 or max(1.0, burst.factor) * burst.on > burst.every:
        raise RequestError(
            f"burst: {text} is out of range",
            hint="The factor is 1 or more, and 1 at most times the burst's share of the time.",
        )
    return burst


@dataclass(frozen=True)
class LoadOptions:
    """The options of a load test.

    Attributes:
        url: the server's address, with or without /v1.
        remote: True allows another machine.
        api: what is asked for: chat, completions or embeddings.
        model: the model's name; None for the server's first.
        api_key: sent as a bearer token.
        seed: seed of all random choices; the same seed makes the same requests at the same times.
        clients: number of clients of a closed loop, where each sends its next request after the answer.
        rate: requests a second of an open loop, sent whether or not earlier ones were answered.
        arrivals, burst: the distribution of their times.
        trace: a file of requests, with their times unless ``clients`` or ``rate`` is set.
        speed: factor by which a trace is sent faster than recorded.
        requests: number of requests; a conversation of several turns counts once. None: all of a trace, or 100.
        seconds: time after which no request is sent.
        think: seconds between an answer and its conversation's next turn.
        shared_prefix: tokens at the beginning of all requests.
        prefixes: number of different beginnings.
        timeout: seconds without data from the server after which a request counts as failed.
        classes: kinds of requests.
    """

    url: str
    remote: bool = False
    api: Api = "chat"
    model: str | None = None
    api_key: str | None = None
    seed: int = 0
    clients: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    burst: Burst = Burst()
    trace: Path | None = None
    speed: float = 1.0
    requests: int | None = None
    seconds: float | None = None
    think: float = 0.0
    shared_prefix: int = 0
    prefixes: int = 1
    timeout: float = 120.0
    classes: tuple[RequestClass, ...] = (RequestClass(),)

    def check(self) -> None:
        """Checks that options are in range and can be combined. Raises RequestError naming the option."""
        if self.clients is not None and self.rate is not None:
            raise RequestError(
                "rate: clients of a closed loop have none", hint="Pass --clients N or --rate R, not both."
            )
        for name, low, high in (
            ("clients", 1, 100_000),
            ("rate", 1e-6, 1e6),
            ("speed", 1e-6, 1e6),
            ("requests", 1, 10**9),
            ("seconds", 1e-3, 1e9),
            ("think", 0, 1e6),
            ("shared_prefix", 0, MOST_LENGTH),
            ("prefixes", 1, 10**6),
            ("timeout", 1e-3, 1e6),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name}: {value:g} is out of range", hint=f"It must be from {low:g} to {high:g}.")
        for one in self.classes:
            _checked(one, f"class {one.name}: " if one.name else "")
        check_url(self.url, remote=self.remote)


def check_url(url: str, *, remote: bool) -> None:
    """Raises RequestError if the text isn't a server's address, or is another machine's without ``remote``."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
        raise RequestError(
            f"url: {url!r} isn't a server's address",
            hint="Pass one such as http://127.0.0.1:8000; or a bundle's folder.",
        )
    if parts.username is not None or parts.password is not None:
        raise RequestError("url: it has a name or a password in it", hint="Pass the key with --api-key.")
    if not remote and not _is_loopback(parts.hostname):
        raise RequestError(
            f"url: {parts.hostname} may be another machine",
            hint="Load on a server needs its owner's permission. Pass --remote if you have it.",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
