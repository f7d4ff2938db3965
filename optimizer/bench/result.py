"""The result of a benchmark as dataclasses, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Spread:
    """Statistics of repeated measurements.

    Attributes:
        median: the median.
        low, high: the first and the third quartile.
        least, most: the smallest and the largest value.
        count: number of values.
    """

    median: float
    low: float
    high: float
    least: float
    most: float
    count: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """Returns the statistics of ``values``. Raises ValueError if there are none."""
        if not values:
            raise ValueError("there is nothing to take a median of")
        ordered = sorted(values)
        quarter = (len(ordered) - 1) // 4
        low, high = ordered[quarter], ordered[len(ordered) - 1 - quarter]
        return cls(median(ordered), low, high, ordered[0], ordered[-1], len(ordered))


@dataclass(frozen=True)
class PromptSpeed:
    """The speed of one request with a prompt of ``tokens`` tokens, through the whole engine.

    Attributes:
        ttft: seconds from the request to its first token.
        tpot: seconds for each further token.
        tokens_per_second: speed of the prompt, tokens / ttft.
        limit_seconds: least seconds for the prompt by the machine's limits; None if they aren't known.
        share: share of that limit that was reached.
        omitted: the reason why the prompt wasn't measured; the other fields are None then.
    """

    tokens: int
    ttft: Spread | None = None
    tpot: Spread | None = None
    tokens_per_second: float | None = None
    limit_seconds: float | None = None
    share: float | None = None
    omitted: str | None = None


@dataclass(frozen=True)
class DecodeSpeed:
    """The speed of steps with one new token for each of ``batch`` requests, after ``context`` tokens each.

    Attributes:
        step: seconds of a step of the engine, which are also the time per output token of each request.
        tokens_per_second: new tokens of all requests together.
        bytes_per_second: bytes of weights and KV cache that were read, per second; None if they aren't known.
        limit_seconds, share: as in `PromptSpeed`.
        omitted: the reason why the step wasn't measured, as in `PromptSpeed`.
    """

    batch: int
    context: int
    step: Spread | None = None
    tokens_per_second: float | None = None
    bytes_per_second: float | None = None
    limit_seconds: float | None = None
    share: float | None = None
    omitted: str | None = None


@dataclass(frozen=True)
class Limits:
    """The machine's peak speeds, measured in the same run.

    Attributes:
        working_set: bytes read to measure the bandwidth: as many as a decode step reads of weights.
        bandwidth: bytes per second.
        peaks: multiply-adds per second from registers alone, by the type of the factors.
    """

    working_set: int
    bandwidth: Spread
    peaks: dict[str, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """The memory of the process, in bytes.

    Attributes:
        before: the process before the bundle was opened.
        peak: the process after the first round.
        weights: the weights that the target's programs read; 0 if unknown.
        kv_cache: the KV blocks of the largest sizes that were measured.
    """

    before: int
    peak: int
    weights: int
    kv_cache: int


@dataclass(frozen=True)
class ProfileLine:
    """The steps of a program that have one op, or that are of one kind of module.

    Attributes:
        calls, seconds: the number and the time of these steps, in the whole prompt or in a decode step.
        part: their share of the time of all steps of the program.
        weights, kv, activations: the bytes that they move.
        products: their multiply-adds.
        limit_seconds, share: as in ``PromptSpeed``; None for steps that move nothing from or to memory.
    """

    name: str
    calls: int
    seconds: float
    part: float
    weights: int
    kv: int
    activations: int
    products: int
    limit_seconds: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Profile:
    """The time of one size (a whole prompt, or a decode step), divided by op and by module.

    Attributes:
        runs: timed runs of the program.
        seconds: time inside the executor.
        around: the part of ``seconds`` outside kernels: checks, sampling, copies.
    """

    name: str
    runs: int
    seconds: float
    around: float
    by_op: tuple[ProfileLine, ...]
    by_module: tuple[ProfileLine, ...]


@dataclass(frozen=True)
class SpeculationSpeed:
    """The speed of one greedy request for a text, with and without speculation.

    Attributes:
        plain, ahead: tokens per second after the first one, without and with speculation.
        ratio: ``ahead`` divided by ``plain`` in each round.
        drafted, accepted: the numbers of drafted and of accepted tokens in all rounds.
    """

    task: str
    plain: Spread
    ahead: Spread
    ratio: Spread
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Speculation:
    """The speed of speculative decoding: the proposer's name, the speed on each text, and ``LLM.info`` at the end."""

    guessed_by: str
    tasks: tuple[SpeculationSpeed, ...]
    info: dict[str, Any]


@dataclass(frozen=True)
class BenchResult:
    """The result of ``bench``. ``machine``: processor, cores and memory; ``engine``: the executor's notes."""

    model: str
    recipe: str
    target: str
    engine: dict[str, str | int]
    machine: dict[str, str | int]
    options: dict[str, Any]
    seconds: float
    memory: Memory
    limits: Limits | None
    prompts: tuple[PromptSpeed, ...]
    decodes: tuple[DecodeSpeed, ...]
    profiles: tuple[Profile, ...] = ()
    speculation: Speculation | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON values: seconds, bytes, tokens per second."""
        return {"format_version": FORMAT_VERSION} | asdict(self)
