"""The sections of a recipe: what each may say, and what of it can be made today."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationInfo, field_validator, model_validator

from enginewright.passes.framework.weight_formats import FormatOverride, GptqOptions, Method, Sparsify, WeightFormats
from enginewright.plugins.shared.contracts import (
    GROUP_SIZES_OF_4_BITS,
    Activation,
    CacheDtype,
    Sparsity,
    Storage,
    WeightFormat,
)

from .builtin import builtin_files

Name = TypeVar("Name", bound=str)

ACTIVATION_OF: dict[Storage, Activation] = {
    "f32": "float",
    "bf16": "bf16",
    "fp8": "float",
    "int8": "int8",
    "int4": "int8",
}
"""What each of them is multiplied with."""

GROUP_SIZES: dict[Storage, tuple[int, ...]] = {
    "fp8": (0, 32, 64),
    "int8": (0, 32, 64),
    "int4": (0, *GROUP_SIZES_OF_4_BITS),
}
"""Of weights and of the activations that they are multiplied with; 0 is one scale a row."""

METHODS: tuple[Method, ...] = ("nearest", "gptq", "awq")
"""Ways to choose the integers of int4 that exist today."""

CACHES: dict[str, CacheDtype] = {"f32": "f32", "bf16": "bf16", "int8": "i8", "fp8": "fp8"}
"""KV-cache formats that can be emitted today, and what programs call them."""

DEFAULT_CACHE: CacheDtype = "bf16"
"""Of a recipe that leaves the KV cache open and whose weights or activations are less than 32-bit floats."""


class Section(BaseModel):
    """A table of a recipe: frozen, and a key that it doesn't know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightFormatSection(Section):
    """``contracts.WeightFormat`` as a TOML table."""

    storage: Storage = "f32"
    group_size: int = Field(default=0, ge=0)
    zero_point: StrictBool = False
    activation: Activation = "float"
    activation_group_size: int = Field(default=0, ge=0)
    sparsity: Sparsity = "dense"

    @model_validator(mode="before")
    @classmethod
    def _without_rotation(cls, given: Any, info: ValidationInfo) -> Any:
        """Drops a key that had one value, and that recipes and bundles of version 0.1 may have."""
        if isinstance(given, dict) and given.get("rotation") == "none":
            if info.context:  # a file, which a person can change
                text = f'{info.context}: rotation = "none" has no effect; leave it out'
                warnings.warn(text, FutureWarning, stacklevel=2)
            return {key: value for key, value in given.items() if key != "rotation"}
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (wanted := ACTIVATION_OF[self.storage]) != self.activation:
            raise ValueError(f"storage {self.storage!r} goes with activation {wanted!r}, not {self.activation!r}")
        groups = {"group_size": self.group_size, "activation_group_size": self.activation_group_size}
        for key, size in groups.items():
            if self.storage not in GROUP_SIZES and size:
                raise ValueError(f"{key} is {size}, but storage {self.storage!r} has no scales")
            if size not in (known := GROUP_SIZES.get(self.storage, (0,))):
                raise ValueError(f"{key} is {size}, which can't be made for {self.storage}, only {_listed(known)}")
        if self.activation_group_size and self.activation == "float":
            raise ValueError(
                f"activation_group_size is {self.activation_group_size}, but storage {self.storage!r} is multiplied "
                "with floats as they are"
            )
        if self.storage == "int4" and self.group_size != self.activation_group_size:
            raise ValueError(
                f"group_size is {self.group_size} and activation_group_size {self.activation_group_size}: "
                "for int4 they must be the same"
            )
        if self.group_size and self.activation_group_size and self.group_size != self.activation_group_size:
            raise ValueError(
                f"group_size is {self.group_size} and activation_group_size {self.activation_group_size}: "
                "where both are not 0 they must be the same"
            )
        if self.zero_point and self.storage != "int4":
            raise ValueError(f"zero_point can't be true for storage {self.storage!r}, only for 'int4'")
        if self.sparsity != "dense" and self.storage == "fp8":
            raise ValueError(f"sparsity {self.sparsity!r} can't be made for storage 'fp8' yet")
        if self.sparsity != "dense" and self.zero_point:
            raise ValueError(
                "sparsity '2:4' can't have zero_point = true: with an offset, what isn't kept would be one"
            )
        return self

    def to_format(self) -> WeightFormat:
        """The same as the dataclass that passes and emitters take."""
        return WeightFormat(**self.model_dump())


class WeightOverride(Section):
    """A weight format for the modules whose path ``layers`` matches (shell pattern, e.g. ``*.mlp.down_proj``)."""

    layers: str = Field(min_length=1)
    format: WeightFormatSection


class GptqSection(Section):
    """How GPTQ goes through a weight's columns: ``passes.framework.weight_formats.GptqOptions`` as a TOML table."""

    damping: float = Field(default=GptqOptions.damping, gt=0, le=10, allow_inf_nan=False)
    activation_order: StrictBool = GptqOptions.activation_order


class WeightsSection(Section):
    """The format of the weight of every linear and embedding: the first override that matches, or the default.

    ``embeddings`` is the default of embedding tables and of the product that gives the logits, where it isn't that of
    the others. ``keep_blocks``: a weight that a GGUF file has in blocks of Q4_0, Q4_1 or Q8_0 keeps them bit for bit,
    unless an override names it. ``method``: how the integers of int4 are chosen; ``gptq`` has options of that method.
    ``sparsify``: how the weights that formats of sparsity 2:4 keep are; None takes the default.
    """

    default: WeightFormatSection = WeightFormatSection()
    overrides: tuple[WeightOverride, ...] = ()
    embeddings: WeightFormatSection | None = None
    keep_blocks: StrictBool = False
    method: Method = "nearest"
    gptq: GptqSection | None = None
    sparsify: Sparsify | None = None

    @field_validator("method")
    @classmethod
    def _method_exists(cls, value: Method) -> Method:
        return supported(value, METHODS, "the integers of int4")

    @field_validator("embeddings")
    @classmethod
    def _tables_are_dense(cls, value: WeightFormatSection | None) -> WeightFormatSection | None:
        if value is not None and value.sparsity != "dense":
            raise ValueError(
                f"sparsity {value.sparsity!r} is for linears: a row of a table is looked up, not multiplied"
            )
        return value

    @model_validator(mode="after")
    def _options_are_of_the_method(self) -> Self:
        if self.gptq is not None and self.method != "gptq":
            raise ValueError(f'gptq has options of method = "gptq", and the method is {self.method!r}')
        return self

    @property
    def formats(self) -> tuple[WeightFormatSection, ...]:
        """Every format that is named."""
        return (self.default, *(o.format for o in self.overrides), *([self.embeddings] if self.embeddings else []))

    @property
    def exact(self) -> bool:
        """Whether all weights, and what they are multiplied with, are 32-bit floats, and none is left out."""
        return not self.keep_blocks and all((f.storage, f.sparsity) == ("f32", "dense") for f in self.formats)

    def to_formats(self) -> WeightFormats:
        """The same as passes take it."""
        overrides = tuple(FormatOverride(o.layers, o.format.to_format()) for o in self.overrides)
        embeddings = None if self.embeddings is None else self.embeddings.to_format()
        formats = WeightFormats(self.default.to_format(), overrides, embeddings, self.keep_blocks, self.method)
        if self.gptq is not None:
            formats = replace(formats, gptq=GptqOptions(**self.gptq.model_dump()))
        return formats if self.sparsify is None else replace(formats, sparsify=self.sparsify)


class CacheSection(Section):
    """How keys and values are stored.

    ``dtype``: f32; bf16; int8 or fp8, which have a scale for each token, head and side. None leaves it to the target,
    see ``Recipe.cache``.
    """

    dtype: str | None = None

    @field_validator("dtype")
    @classmethod
    def _dtype_exists(cls, value: str | None) -> str | None:
        return value if value is None else supported(value, tuple(CACHES), "a KV cache")


class BudgetSection(Section):
    """How far from its source an exported model may be.

    ``max_kl``: mean KL divergence per token in nats, above which the export fails. None takes the default of formats
    that lose precision; exact recipes are held to rounding instead. ``max_bytes``: of all weights as they are stored.
    """

    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_bytes: int | None = Field(default=None, gt=0)


class AutoSection(Section):
    """Formats that are chosen weight by weight: as few bytes as [budget] ``max_kl`` allows, or the least KL within its
    ``max_bytes``.

    ``candidates``: what there is to choose from. ``tokens``: most that a candidate's cost is measured with; fewer are
    taken of large models.
    """

    candidates: tuple[WeightFormatSection, ...] = Field(min_length=2)
    tokens: int = Field(default=256, ge=16)


class CalibrationSection(Section):
    """The tokens that calibrated passes and measurements look at, from a file or sampled from the model.

    About ``tokens`` of them in sequences of ``sequence_length``, or the model's context if that is shorter; ``seed``
    is for sampling. More tokens make better integers, and take time in proportion.
    """

    tokens: int = Field(default=8192, ge=128)
    sequence_length: int = Field(default=256, ge=8)
    seed: int = Field(default=0, ge=0, lt=1 << 63)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)


def supported(value: Name, known: Sequence[Name], what: str) -> Name:
    """Refuses what the schema has a word for and no emitter can make yet."""
    if value not in known:
        recipes = ", ".join(builtin_files())
        raise ValueError(f"{value!r} can't be made for {what} yet, only {', '.join(known)} (recipes: {recipes})")
    return value
