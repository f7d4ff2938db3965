"""The options of a recovery, and its report."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from enginewright.runtime.shared.errors import RequestError


@dataclass(frozen=True)
class RecoverOptions:
    """The options of a recovery's training.

    Attributes:
        steps: the optimizer steps.
        batch_tokens: the tokens of a step, rounded down to whole sequences; at least one sequence.
        sequence_length: the most tokens of a sequence, within the model's context.
        learning_rate: the highest learning rate. The rate rises during ``warmup``, then falls as a cosine to a tenth.
        warmup: the share of the steps in which the learning rate rises.
        temperature: the number by which the logits of both models are divided before they are compared.
        hidden: the loss includes this factor times the mean squared error of the layers' outputs, relative to the
            source's outputs.
        clip: the largest norm of all gradients together; larger gradients are scaled down.
        weight_decay: the decay of matrices, as in AdamW.
        sampled_tokens: the number of tokens to sample from the source if there is no text.
        validation: the share of the sequences that is used only for measurements.
        checkpoint_every: the steps between two checkpoints; each checkpoint is measured.
        accumulate: the number of parts of a step, which run one after the other to save memory.
        seed: the seed of the sampling and of the order of sequences.
        threads: torch's threads; 0 doesn't change their number.
    """

    steps: int = 300
    batch_tokens: int = 2048
    sequence_length: int = 256
    learning_rate: float = 1e-4
    warmup: float = 0.1
    temperature: float = 1.0
    hidden: float = 0.0
    clip: float = 1.0
    weight_decay: float = 0.0
    sampled_tokens: int = 65536
    validation: float = 0.05
    checkpoint_every: int = 100
    accumulate: int = 1
    seed: int = 0
    threads: int = 0

    def check(self) -> None:
        """Raises RequestError naming the first option that is out of range."""
        least = {"steps": 1, "batch_tokens": 1, "sequence_length": 8, "sampled_tokens": 256, "checkpoint_every": 1}
        least |= {"accumulate": 1, "seed": 0, "threads": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise RequestError(f"{name}: {value!r} is out of range", hint=f"It must be an integer from {low} on.")
        positive = {"learning_rate": 10.0, "temperature": 100.0, "clip": math.inf}
        for name, high in positive.items():
            if not 0 < getattr(self, name) <= high:
                raise RequestError(f"{name}: {getattr(self, name)!r} is out of range", hint="It must be above 0.")
        shares = {"warmup": (0.0, 1.0), "validation": (0.001, 0.5), "weight_decay": (0.0, 1.0), "hidden": (0.0, 1e6)}
        for name, (low_share, high_share) in shares.items():
            if not low_share <= getattr(self, name) <= high_share:
                hint = f"It must be from {low_share:g} to {high_share:g}."
                raise RequestError(f"{name}: {getattr(self, name)!r} is out of range", hint=hint)

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step; the first step is 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def what_counts(self) -> dict[str, Any]:
        """Returns the options that determine the result. A resumed run must have the same ones."""
        return {k: v for k, v in asdict(self).items() if k not in ("checkpoint_every", "threads")}


@dataclass(frozen=True)
class Measured:
    """The result on held-out sequences.

    Attributes:
        step: the number of steps so far.
        kl: the mean KL from the source, in nats per token.
        perplexity, source_perplexity: the perplexity of the program and of the source.
    """

    step: int
    kl: float
    perplexity: float
    source_perplexity: float


@dataclass(frozen=True)
class RecoveryReport:
    """The report of a recovery.

    Attributes:
        path: its folder.
        recipe: the recipe's name.
        origin: the origin of the tokens.
        steps, parameters, tokens, held_out_tokens: counts; ``tokens`` are those of the training sequences.
        losses: loss of each step, in nats per token (at the options' temperature, hidden states included).
        measured: results before the first step, at each checkpoint, and at the end.
        tokens_per_second: speed of the training.
        seconds: duration of this run.
        resumed_at: the step from which it resumed; None if it began from the start.
    """

    path: str
    recipe: str
    origin: str
    steps: int
    parameters: int
    tokens: int
    held_out_tokens: int
    losses: list[float]
    measured: list[Measured]
    tokens_per_second: float
    seconds: float
    peak_rss_bytes: int
    resumed_at: int | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON types."""
        return asdict(self)
