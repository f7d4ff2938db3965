"""The sections of a recipe that no pass reads, and the files of the built-in recipes."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from enginewright.passes.formats.section import Section
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.runtime.shared.contracts import DOCUMENT, QUERY
from enginewright.runtime.shared.kv_formats import CacheDtype

DEFAULT_CACHE: CacheDtype = "bf16"
"""The default KV-cache format of recipes whose weights or activations have less precision than 32-bit floats."""

PLACES = re.compile(f"{re.escape(QUERY)}|{re.escape(DOCUMENT)}")
"""The placeholders of texts in a template."""


class BudgetSection(Section):
    """The limits of an exported model.

    Attributes:
        max_kl: largest mean KL divergence from the source per token, in nats; above it the export fails. None: the
            default for lossy formats; exact recipes are checked for rounding errors instead.
        max_bytes: maximum bytes of all stored weights.
        max_ms_per_token: maximum milliseconds of a decode step of one request, for [auto], on this machine or
            ``device``.
        device: a GPU of ``optimize plan``; None for this machine.
    """

    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_bytes: int | None = Field(default=None, gt=0)
    max_ms_per_token: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    device: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _device_has_a_time(self) -> Self:
        if self.device is not None and self.max_ms_per_token is None:
            raise ValueError("device says where max_ms_per_token counts, which isn't there")
        return self


class AutoSection(Section):
    """The choice of a format for each weight: the fewest bytes within a KL, or the least KL within bytes or time.

    [budget] has the limits: ``max_kl``, or else ``max_bytes`` and ``max_ms_per_token``.

    Attributes:
        candidates: the formats to choose from; None for every format that the targets have kernels for.
        tokens: the most tokens with which a candidate's cost is measured; large models take fewer.
    """

    candidates: tuple[WeightFormat, ...] | None = Field(default=None, min_length=2)
    tokens: int = Field(default=256, ge=16)


class CalibrationSection(Section):
    """The tokens for calibrated passes and measurements, if the export has no calibration file.

    There are about ``tokens`` of them, in sequences of ``sequence_length`` or the model's context if that is shorter.
    ``source`` is "samples", drawn from the model with ``seed``, or "text", a text of the package with some 2,000
    tokens, for models with a tokenizer. More tokens give better integers, and take proportionally more time.
    """

    source: Literal["samples", "text"] = "samples"
    tokens: int = Field(default=8192, ge=128)
    sequence_length: int = Field(default=256, ge=8)
    seed: int = Field(default=0, ge=0, lt=1 << 63)


class PoolingSection(Section):
    """Facts about a model of vectors or scores. They replace the facts in the model's files.

    Attributes:
        dimensions: smaller numbers of dimensions to which its vectors may be cut (Matryoshka).
        template: the text of a pair for a reranker that is a decoder, with {query} and {document}, and with all control
            tokens.
        answers: the token whose logit is the score of such a reranker, such as "yes"; with a second token, such as
            "no", the score is the difference of both logits.
    """

    dimensions: tuple[int, ...] = ()
    template: str | None = None
    answers: tuple[str, ...] = Field(default=(), max_length=2)

    @field_validator("dimensions")
    @classmethod
    def _sizes(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in value):
            raise ValueError("a number of dimensions is at least 1")
        return tuple(sorted(set(value)))

    @field_validator("template")
    @classmethod
    def _has_both_places(cls, value: str | None) -> str | None:
        if value is not None and PLACES.findall(value) != [QUERY, DOCUMENT]:
            raise ValueError(f"it must have {QUERY} once, and {DOCUMENT} once after it")
        return value


def builtin_files() -> dict[str, Traversable]:
    """Lists the built-in recipes' files by name, in the order of names."""
    files = (f for f in resources.files(__package__).iterdir() if f.name.endswith(".toml"))
    return {f.name.removesuffix(".toml"): f for f in sorted(files, key=lambda f: f.name)}
