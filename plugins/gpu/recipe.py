"""[engines] of a recipe: what targets for NVIDIA's GPUs are given."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, field_validator

from enginewright.passes.formats.section import Section
from enginewright.runtime.shared.errors import TargetError

from ..ranks.recipe import known_partitions
from .formats import parse_capabilities

MOST_BLOCKS = 1 << 22
"""A cache may have so many: a slot's number then has 27 bits."""


Size = Annotated[int, Field(ge=1, le=1 << 20, strict=True)]


def known_gpus(value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return parse_capabilities(value)
    except TargetError as e:
        raise ValueError(f"{e.message}. {e.hint}") from e


class EnginesSection(Section):
    """What the targets that build engines do; others leave it alone.

    Attributes:
        gpus: compute capabilities; none: what a target has as its default.
        form: of the target tensorrt-rtx: one engine of the whole model, or segments between attentions.
        dtype: of activations and caches, and of weights that have no other format; None: bf16 for the target cuda, f16
            for the others.
        offsets: of int4 with an offset for each group: "keep" computes with them, "requantize" makes other integers of
            the weight, without offsets; "refuse" is an error.
        context: most tokens of a request with its answer, which slots are made for; None: the model's context.
        requests: most of a decode step; None: what buckets have, or 16.
        prompts: most of a step of prompts; None: 4.
        chunk: most tokens of a prompt in a step; None: what buckets have, or 512.
        caches: of the target tensorrt: how engines write into them. "aliased" declares it to TensorRT, which may insert
            copies; "ordered" hides it, and attention waits for a result of the write.
        blocks: of the target tensorrt: most blocks of a cache; None: 4,194,304, which fill any GPU.
        partitions: of the target cuda: ways to cut a model, such as "tensor=2", for whose ranks there are kernels too.
        large_tiles: of the target tensorrt, and not tried yet: attention's tiles may use more than 48 KiB of shared
            memory, which TensorRT may refuse to launch.
    """

    gpus: tuple[str, ...] = ()
    form: Literal["whole", "segments"] = "whole"
    dtype: Literal["f16", "bf16", "f32"] | None = None
    offsets: Literal["keep", "requantize", "refuse"] = "keep"
    context: Size | None = None
    requests: Size | None = None
    prompts: Size | None = None
    chunk: Size | None = None
    caches: Literal["aliased", "ordered"] = "aliased"
    blocks: Annotated[int, Field(ge=1, le=MOST_BLOCKS, strict=True)] | None = None
    partitions: tuple[str, ...] = ()
    large_tiles: StrictBool = False

    _gpus_are_known = field_validator("gpus")(known_gpus)
    _partitions_are_known = field_validator("partitions")(known_partitions)
