"""The models that engines are compared with."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_TOKENS = 256
"""Of the text that engines' logits are compared on."""


@dataclass(frozen=True)
class Sizes:
    """Of a Llama whose head is its table of tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All weights, those of norms too."""
        kv = self.hidden // self.heads * self.kv_heads
        layer = self.hidden * (2 * self.hidden + 2 * kv + 3 * self.feed_forward + 2)
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden


RANDOM_SIZES = Sizes(hidden=2048, layers=16, heads=32, kv_heads=8, feed_forward=8192, vocabulary=49152)


@dataclass(frozen=True)
class Model:
    """A model. A large one has smaller figures to measure, or a run would take an hour.

    Attributes:
        random: its weights are, and it is made here.
        long_rounds: rounds in which long prompts are measured at most.
        steps: tokens decoded behind a prompt of each request, and all of a batch.
        short_prompt: tokens of the prompts of a batch.
    """

    name: str
    title: str
    sizes: Sizes
    random: bool
    long_rounds: int
    steps: int
    short_prompt: int


MODELS = {
    model.name: model
    for model in (
        Model(
            "smollm2",
            "SmolLM2-135M-Instruct",
            Sizes(hidden=576, layers=30, heads=9, kv_heads=3, feed_forward=1536, vocabulary=49152),
            random=False,
            long_rounds=2,
            steps=48,
            short_prompt=64,
        ),
        Model(
            "llama-1b",
            "Llama of 1.04 billion random weights",
            RANDOM_SIZES,
            random=True,
            long_rounds=1,
            steps=20,
            short_prompt=32,
        ),
    )
}
