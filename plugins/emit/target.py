"""The compiling half of a target: its emitter, and its limits. Each target has one in ``compile/target.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import Lowering
from enginewright.runtime.shared.kv_formats import CacheDtype
from enginewright.runtime.shared.weight_formats import FORMATS, Storage

from ..gpu.recipe import EnginesSection
from .base import EmitOptions, Emitter


@dataclass(frozen=True)
class Target:
    """The compiling half of a target: its emitter, and what it supports.

    Attributes:
        emitter: lowers a program and writes the target's files.
        tools: the distributions that the emitter uses, in addition to those of every export; the manifest has their
            versions.
        check: raises the emitter's errors before any work is done, for targets that can't be emitted on every machine.
        gpus: the GPUs that it builds for by default; () for a target that isn't built for GPUs.
        check_gpus: raises TargetError for GPUs that it can't be built for.
        narrow_caches: True if its KV cache may have fewer bits than its computation.
        caches: returns the cache formats that it supports; () if it supports all.
        cache_instructions: the cache formats that need special instructions of its GPUs.
        floats: the default type of activations, if a recipe has none ([engines] dtype).
        instructions: the weight formats that need special instructions of its GPUs.
        every_format: True if it supports weight formats that not all targets support.
        states: True if it has kernels for the states of recurrent layers.
        whole_texts: True if it has kernels for attention without a cache, and for pooling.
        adaptive_context: True if it supports [adaptive_context] of recipes.
        exact: True if it supports [engines] exact of recipes.
        latent_caches: True if its attention reads values that are a part of their keys and stored nowhere else.
        lower: returns the lowered program that the target runs, with memory planned; None if it runs no such program.
        no_cache: the reason why caches with scales are unsupported, if ``caches`` depends on the recipe.
    """

    emitter: Emitter
    tools: tuple[str, ...] = ()
    check: Callable[[], None] = lambda: None
    gpus: tuple[str, ...] = ()
    check_gpus: Callable[[Sequence[str]], None] = lambda gpus: None
    narrow_caches: bool = False
    caches: Callable[[EnginesSection], Collection[CacheDtype]] = lambda engines: ()
    cache_instructions: tuple[str, ...] = ()
    floats: Literal["f16", "bf16"] = "f16"
    instructions: tuple[Storage, ...] = tuple(name for name, of in FORMATS.items() if of.least_gpu and of.group_sizes)
    no_cache: str = ""
    every_format: bool = False
    states: bool = False
    whole_texts: bool = False
    adaptive_context: bool = False
    exact: bool = False
    latent_caches: bool = False
    lower: Callable[[Program, EmitOptions], Lowering] | None = None
