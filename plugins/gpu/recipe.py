"""The table [engines] of a recipe: options of the targets for NVIDIA GPUs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, field_validator

from enginewright.passes.framework.pass_options import OffsetOptions
from enginewright.runtime.shared.errors import RecipeError, TargetError

from ..ranks.recipe import known_partitions
from .formats import parse_capabilities

MOST_BLOCKS = 1 << 22
"""The most blocks of a cache, with which a slot's number has 27 bits."""


Size = Annotated[int, Field(ge=1, le=1 << 20, strict=True)]


def known_gpus(value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return parse_capabilities(value)
    except TargetError as e:
        raise ValueError(f"{e.message}. {e.hint}") from e


class EnginesSection(OffsetOptions):
    """The recipe's options for targets that build engines; others ignore them.

    Attributes:
        gpus: the compute capabilities; () for the target's default.
        form: for the target tensorrt-rtx: one engine of the whole model, or segments between attentions.
        dtype: the type of activations and caches, and of weights that have no other format; None for bf16 in the target
            cuda, f16 in the others.
        context: the maximum tokens of a request with its answer, and so the size of slots; None for the model's
            context.
        requests: the maximum requests of a decode step; None for the largest bucket, or 16.
        prompts: the maximum prompts of a step; None for 4.
        chunk: the maximum tokens of a prompt in a step; None for the largest bucket, or 512.
        caches: for the target tensorrt: how engines write into caches. "aliased" declares it to TensorRT, which may
            insert copies; "ordered" hides it, and attention waits for a result of the write.
        blocks: for the target tensorrt: the maximum blocks of a cache; None for 4,194,304, which fill any GPU.
        partitions: for the target cuda: partitions of the model, such as "tensor=2", whose ranks also get kernels.
        exact: for the target cuda: True if a request's bits don't depend on the other requests of a step, nor on how
            its prompt is cut; slower.
        large_tiles: for the target tensorrt, untested: True if attention's tiles may use more than 48 KiB of shared
            memory, which TensorRT may refuse to launch.
    """

    gpus: tuple[str, ...] = ()
    form: Literal["whole", "segments"] = "whole"
    dtype: Literal["f16", "bf16", "f32"] | None = None
    context: Size | None = None
    requests: Size | None = None
    prompts: Size | None = None
    chunk: Size | None = None
    caches: Literal["aliased", "ordered"] = "aliased"
    blocks: Annotated[int, Field(ge=1, le=MOST_BLOCKS, strict=True)] | None = None
    partitions: tuple[str, ...] = ()
    exact: StrictBool = False
    large_tiles: StrictBool = False

    def context_within(self, model_context: int) -> int:
        """Returns the maximum tokens of a request: ``context``, or the model's if that is None.

        Args:
            model_context: the model's maximum tokens of a request; 0 for no limit.

        Raises:
            RecipeError: ``context`` is more than the model's.
        """
        if self.context and model_context and self.context > model_context:
            raise RecipeError(
                f"engines.context: {self.context:,} tokens are more than the model's context of {model_context:,}",
                hint="Ask for fewer, or export with a longer --context, if the model has one.",
            )
        return self.context or model_context

    _gpus_are_known = field_validator("gpus")(known_gpus)
    _partitions_are_known = field_validator("partitions")(known_partitions)
