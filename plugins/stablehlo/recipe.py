"""The table [stablehlo] of a recipe."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import field_validator, model_validator

from enginewright.passes.formats.section import Section

from ..gpu.recipe import known_gpus
from ..steps.x86_levels import LevelName, levels_in_order


class StableHloOptions(Section):
    """The recipe's options for the target stablehlo.

    Attributes:
        kernels: "enginewright" if products and attention are the cpu target's kernels, which XLA's CPU client calls.
            None if XLA compiles all; then the modules run on other devices too.
        iree: the levels of x86-64 for which IREE compiles the modules ahead of time. Its runtime uses the best one that
            the CPU supports.
        iree_cuda: the compute capabilities of GPUs for which IREE compiles the modules, as files that Enginewright
            can't run.
    """

    kernels: Literal["enginewright"] | None = None
    iree: tuple[LevelName, ...] = ()
    iree_cuda: tuple[str, ...] = ()

    _gpus_are_known = field_validator("iree_cuda")(known_gpus)
    _in_order = field_validator("iree")(levels_in_order)

    @model_validator(mode="after")
    def _iree_has_none_of_our_kernels(self) -> Self:
        if self.kernels and (self.iree or self.iree_cuda):
            raise ValueError("modules that call our kernels run by XLA alone: leave out kernels, or iree and iree_cuda")
        return self


TABLE = StableHloOptions
