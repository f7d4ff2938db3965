"""The options of a benchmark, and the plan of sizes that fit into the bundle's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.errors import RequestError

PROMPTS, BATCHES, CONTEXTS = (128, 512, 2048), (1, 4, 8, 16), (128, 1024)
MOST_TOKENS = 1 << 20
MOST_REQUESTS = 1024
WARM_UP = 2
"""The number of decode steps before the timed ones."""


@dataclass(frozen=True)
class BenchOptions:
    """The sizes and settings that ``bench`` measures with. None takes the defaults that fit into the bundle's context.

    Attributes:
        target: the bundle's target to run; None takes the first that runs here.
        prompts: prompt lengths in tokens, each timed until its first new token; may be empty.
        batches, contexts: requests of a decode step, and tokens before each; every pair is timed; may be empty.
        steps: decode steps timed for each batch and context, and after each prompt.
        rounds: repetitions of everything. None takes 3, or 1 on targets that must run the prompts before decoding.
        threads: threads of each rank; 0 takes one for each core.
        partition: the ranks that the cpu target runs on.
        memory: bytes for the KV cache; None takes a quarter of the free memory.
        profile: True also times the program's steps one by one, in runs of their own.
        speculate: the kind of speculative decoding to measure on texts; None: not measured.
    """

    target: str | None = None
    prompts: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    steps: int = 16
    rounds: int | None = None
    threads: int = 0
    partition: Partition = field(default_factory=Partition)
    memory: int | None = None
    profile: bool = False
    speculate: str | None = None


@dataclass(frozen=True)
class BenchPlan:
    """The sizes to measure, which all fit into the context; the fields are those of `BenchOptions`."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int

    @property
    def context(self) -> int:
        """The number of tokens of the longest request that the benchmark runs."""
        return max([*self.prompts, *(self.contexts if self.batches else ())]) + new_tokens(self.steps)

    @property
    def requests(self) -> int:
        """The most requests that run at a time in the benchmark."""
        return max([1, *(self.batches if self.contexts else ())])


def new_tokens(steps: int) -> int:
    """Returns the number of tokens that a request generates: one after its prompt, and one in each of ``steps``
    steps.
    """
    return 1 + WARM_UP + steps


def plan(options: BenchOptions, context: int) -> BenchPlan:
    """Returns the sizes to measure for a bundle with a context of ``context`` tokens.

    Raises RequestError if a size is out of range or longer than the context, or if there are none.
    """
    _check("steps", (options.steps,), 4096)
    if options.rounds is not None:
        _check("rounds", (options.rounds,), 1000)
    _check("prompts", options.prompts or (), MOST_TOKENS)
    _check("contexts", options.contexts or (), MOST_TOKENS)
    _check("batches", options.batches or (), MOST_REQUESTS)
    longest = context - new_tokens(options.steps)
    if longest < 1:
        raise RequestError(
            f"steps: {options.steps:,} are more than the bundle's context of {context:,} tokens has room for",
            hint="Measure fewer of them.",
        )
    sizes = BenchPlan(
        _fitting("prompts", options.prompts, PROMPTS, longest),
        BATCHES if options.batches is None else _once(options.batches),
        _fitting("contexts", options.contexts, CONTEXTS, longest),
        options.steps,
    )
    if not sizes.prompts and not (sizes.batches and sizes.contexts):
        raise RequestError("there is nothing to measure: no prompts, and no batches with contexts")
    return sizes


def _check(name: str, values: Sequence[int], most: int) -> None:
    for value in values:
        if not 1 <= value <= most:
            raise RequestError(f"{name}: {value} is out of range", hint=f"It must be from 1 to {most:,}.")


def _once(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _fitting(name: str, given: Sequence[int] | None, default: Sequence[int], longest: int) -> tuple[int, ...]:
    """Returns the sizes to measure: the given ones; else the defaults that fit; else ``longest`` alone.

    Args:
        name: the option, for errors.
        given: the sizes that the user passed; None for the defaults.
        default: the default sizes.
        longest: the largest size that fits.

    Raises RequestError if a given size doesn't fit.
    """
    if given is None:
        return tuple(n for n in default if n <= longest) or (longest,)
    for value in given:
        if value > longest:
            raise RequestError(
                f"{name}: {value:,} tokens leave no room for the new ones: the longest here is {longest:,}",
                hint="Measure shorter ones, or fewer steps.",
            )
    return _once(given)
