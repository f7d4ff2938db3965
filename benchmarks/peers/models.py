"""The models that engines are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from peers.engines import STORED, Format

TEXT_TOKENS = 256
"""The length of the text that engines' logits are compared on."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder whose head is its table of tokens, norms aside. ``head``: of one attention head, where
    that isn't hidden / heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    head: int | None = None

    @property
    def parameters(self) -> int:
        """All weights, those of a Llama's norms too."""
        head = self.head or self.hidden // self.heads
        layer = self.hidden * (2 * head * self.heads + 2 * head * self.kv_heads + 3 * self.feed_forward + 2)
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
        formats: that it is compared in.
        more: that it is compared in where they are asked for.
        stored: the type of the file that it comes as, where that is among the formats.
    """

    name: str
    title: str
    sizes: Sizes
    random: bool
    long_rounds: int
    steps: int
    short_prompt: int
    formats: tuple[Format, ...] = ("int8", "int4")
    more: tuple[Format, ...] = ()
    stored: Format | None = None


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
            more=STORED,
        ),
        Model(
            "gemma3",
            "Gemma 3 270M, a Q4_K_M file",
            Sizes(hidden=640, layers=18, heads=4, kv_heads=1, feed_forward=2048, vocabulary=262144, head=256),
            random=False,
            long_rounds=1,
            steps=48,
            short_prompt=64,
            formats=("q4_k_m",),
            stored="q4_k_m",
        ),
        Model(
            "llama-1b",
            "Llama of 1.04 billion random weights",
            RANDOM_SIZES,
            random=True,
            long_rounds=1,
            steps=20,
            short_prompt=32,
            more=STORED,
        ),
    )
}
