"""The models that engines are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from peers.engines import STORED, Format
from peers.shapes import DeltaShape, LlamaShape, ScanShape, Shape

TEXT_TOKENS = 256
"""The length of the text that engines' logits are compared on."""


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
        long_prompt: tokens of the long prompt.
        reference: False compares no logits: in float32 the model doesn't fit into memory.
        max_memory: the limit of our export's memory, such as "8GiB"; None sets none.
        max_kl: the KL divergence up to which our export accepts the bundle; None for the recipe's. Random weights of a
            large model are farther away than any that were trained.
        by_default: True if it is compared where no models are requested.
    """

    name: str
    title: str
    sizes: Shape
    random: bool
    long_rounds: int
    steps: int
    short_prompt: int
    formats: tuple[Format, ...] = ("int8", "int4")
    more: tuple[Format, ...] = ()
    stored: Format | None = None
    long_prompt: int = 4096
    reference: bool = True
    max_memory: str | None = None
    max_kl: float | None = None
    by_default: bool = True


MODELS = {
    model.name: model
    for model in (
        Model(
            "smollm2",
            "SmolLM2-135M-Instruct",
            LlamaShape(hidden=576, layers=30, heads=9, kv_heads=3, feed_forward=1536, vocabulary=49152),
            random=False,
            long_rounds=2,
            steps=48,
            short_prompt=64,
            more=STORED,
        ),
        Model(
            "gemma3",
            "Gemma 3 270M, a Q4_K_M file",
            LlamaShape(hidden=640, layers=18, heads=4, kv_heads=1, feed_forward=2048, vocabulary=262144, head=256),
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
            LlamaShape(hidden=2048, layers=16, heads=32, kv_heads=8, feed_forward=8192, vocabulary=49152),
            random=True,
            long_rounds=1,
            steps=20,
            short_prompt=32,
            more=STORED,
        ),
        Model(
            "qwen35-1b",
            "a hybrid in Qwen3.5's shape of 1.01 billion random weights",
            DeltaShape(
                hidden=2048,
                layers=16,
                every=4,
                heads=8,
                kv_heads=2,
                head=256,
                states=16,
                state=128,
                feed_forward=6144,
                vocabulary=49152,
            ),
            random=True,
            long_rounds=3,
            steps=20,
            short_prompt=32,
            formats=("q4_k_m", "int8"),
            by_default=False,
        ),
        Model(
            "mamba2-1b",
            "a Mamba-2 of 1.03 billion random weights",
            ScanShape(hidden=2048, layers=36, states=64, head=64, state=128, vocabulary=49152),
            random=True,
            long_rounds=3,
            steps=20,
            short_prompt=32,
            formats=("q4_k_m", "int8"),
            by_default=False,
        ),
        Model(
            "llama-8b",
            "Llama of 8.05 billion random weights",
            LlamaShape(hidden=4096, layers=36, heads=32, kv_heads=8, feed_forward=14336, vocabulary=49152),
            random=True,
            long_rounds=1,
            steps=16,
            short_prompt=32,
            formats=("int4",),
            long_prompt=2048,
            reference=False,
            max_memory="8GiB",
            max_kl=2.0,
            by_default=False,
        ),
    )
}
