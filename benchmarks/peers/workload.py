"""The tasks that every engine is measured by, and the command line of the workers.

- ``speed``: prefill of one prompt (logits or a token of its last), then ``steps`` tokens behind it; then requests with
  prompts of ``short_prompt`` tokens, ``steps`` tokens each, as many in one batch as ``batches`` says; and the most
  memory that the process had. Caches have room for that and no more, where an engine can be told;
- ``long``: the same for one long prompt;
- ``far``: the same for one of ``far_prompt`` tokens, and steps behind a cache of twice as many, however it was filled;
  a model may be made for fewer positions: what a step computes there is as fast as if it made sense;
- ``start``: from nothing to the first token of a short prompt;
- ``logits``: of each token of a text, for the KL divergence from float32;
- ``answers``: the first greedy tokens behind some prompts;
- ``agent``: a conversation with the engine's prefix cache and without, see ``peers.agent``;
- ``ahead``: texts with its speculation and without, see ``peers.ahead``;
- ``roofline``, ours alone: what the machine reads and multiplies at most, and what the program makes of it.

Prompts are random and never repeated, since prefix caches would hide the prefill, and nothing ends early.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

Task = Literal["speed", "long", "far", "start", "logits", "answers", "agent", "ahead", "roofline"]
TASKS: tuple[Task, ...] = get_args(Task)
START_PROMPT = 16
SPARE = 16
"""Tokens that a request may get while others of its batch are still in prefill."""

FIRST_TOKEN = "first token"
"""The line that a worker prints as soon as it has its first token."""


@dataclass(frozen=True)
class Workload:
    """Sizes of a run, in tokens.

    ``batches``: requests that are decoded at a time, the most first. ``seed`` chooses the prompts, of tokens below
    ``vocabulary``; ``target`` is what runs a bundle of ours, ``variant`` which of its files and ``provider`` by what,
    if there are several; ``isa`` is the instruction set of our kernels, None for the best one. ``conversation``: the
    file of an agent's; ``context``: of a start, None for the model's. ``texts``: the file of those of ``ahead``,
    ``draft`` the tokens that a peer computes ahead, and ``draft_model`` what guesses them, in place of a prompt lookup.
    """

    prompt: int = 512
    long_prompt: int = 4096
    far_prompt: int = 16_384
    short_prompt: int = 64
    steps: int = 48
    long_steps: int = 24
    batches: tuple[int, ...] = (16, 8)
    threads: int = 2
    seed: int = 0
    vocabulary: int = 20_000
    target: str = "cpu"
    variant: str | None = None
    isa: str | None = None
    provider: str | None = None
    conversation: str = ""
    context: int | None = None
    texts: str = ""
    draft: int = 0
    draft_model: str = ""

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Reads JSON. Raises TypeError for a field that there is not."""
        fields = json.loads(text)
        if "batches" in fields:
            fields["batches"] = tuple(fields["batches"])
        return cls(**fields)

    def to_json(self) -> str:
        """The text that ``parse`` reads."""
        return json.dumps(asdict(self))

    @property
    def short_context(self) -> int:
        """Tokens of a request of a batch at its end, with some to spare: those of the smallest were in every batch."""
        return self.short_prompt + self.steps * len(self.batches) + SPARE

    def prompts(self, count: int, size: int, *, stream: int = 0) -> list[list[int]]:
        """Random prompts, others for each seed and stream."""
        random = np.random.default_rng([self.seed, stream])
        return [[int(i) for i in random.integers(3, self.vocabulary, size)] for _ in range(count)]


@dataclass(frozen=True)
class Report:
    """The result of a worker.

    Attributes:
        engine: name and version.
        settings: the engine's settings, for the reader.
        figures: tokens a second (``prefill``, ``decode_1``, ``decode_16``, ``prefill_long``, ``decode_long``,
            ``prefill_far``, ``decode_far``, ``decode_farther``).
        bytes: known sizes: ``peak`` of the process, ``weights`` and ``kv`` that it needs, ``import`` that the
            process had before the model.
        answers: token ids of the answer to each prompt.
    """

    engine: str
    settings: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    answers: Sequence[Sequence[int]] = ()


class Worker(Protocol):
    """A module that measures an engine. ``model`` is a file or folder that the engine loads."""

    def speed(self, model: str, work: Workload) -> Report: ...

    def long(self, model: str, work: Workload) -> Report: ...

    def far(self, model: str, work: Workload) -> Report:
        """Runs behind the longest contexts; some workers lack this."""

    def start(self, model: str, work: Workload) -> Report:
        """Calls ``first_token`` when it has it."""

    def agent(self, model: str, work: Workload) -> Report:
        """Runs an agent with and without the prefix cache; an engine without one lacks this."""

    def ahead(self, model: str, work: Workload) -> Report:
        """Runs with and without speculation; an engine without any lacks this."""

    def logits(self, model: str, ids: list[int]) -> npt.NDArray[np.float32] | None:
        """[T, V]; None from an engine that gives none."""

    def answers(self, model: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Generates ``tokens`` greedy tokens for each prompt, without an early end; few engines have this task."""


def first_token() -> None:
    """Tells who waits for it."""
    print(FIRST_TOKEN, flush=True)


def memory(name: Literal["VmRSS", "VmHWM"]) -> int:
    """Bytes of this process now, or the most that it had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}: peak memory needs Linux")


def serve(worker: Worker, arguments: list[str] | None = None) -> None:
    """The command line of a worker: ``python -m peers.workers.NAME TASK MODEL '{"prompt": 512, ...}'`` prints a Report
    as JSON. For ``logits`` there is one option more: the .npz with tokens and logits to compare with; for ``answers``
    the JSON file with ``prompts`` and how many ``tokens``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("model")
    parser.add_argument("workload", type=Workload.parse)
    parser.add_argument("--reference", type=Path)
    options = parser.parse_args(arguments)
    if options.task == "logits":
        report = _logits(worker, options.model, options.reference)
    elif options.task == "answers":
        report = Report("", answers=worker.answers(options.model, **json.loads(options.reference.read_text())))
    else:
        base = memory("VmRSS")
        run: Any = getattr(worker, options.task)
        measured = run(options.model, options.workload)
        sizes = {"peak": memory("VmHWM"), "import": base, **measured.bytes}
        report = Report(measured.engine, measured.settings, measured.figures, sizes)
    print(json.dumps(asdict(report)), flush=True)


def _logits(worker: Worker, model: str, reference: Path) -> Report:
    """Mean KL divergence of the engine's distributions from the reference's, in nats, how often the top agrees, and
    its perplexity on the text."""
    with np.load(reference) as arrays:
        ids, expected = [int(i) for i in arrays["ids"]], arrays["logits"]
    logits = worker.logits(model, ids)
    if logits is None:
        return Report("", figures={})
    same = float((logits.argmax(axis=1) == expected.argmax(axis=1)).mean())
    loss = -np.mean([float(_log_softmax(row)[token]) for row, token in zip(logits, ids[1:], strict=False)])
    figures = {"kl": kl_divergence(expected, logits), "top_1": same, "perplexity": float(np.exp(loss))}
    return Report("", figures=figures)


def kl_divergence(wanted: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> float:
    """Mean over tokens of KL(wanted || found), in nats; both are logits [T, V]."""
    if wanted.shape != found.shape:
        raise ValueError(f"logits of {found.shape}, where {wanted.shape} were expected")
    total = 0.0
    for p, q in zip(wanted, found, strict=True):
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        total += float(np.sum(np.exp(log_p) * (log_p - log_q)))
    return total / len(wanted)


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())  # type: ignore[no-any-return]
