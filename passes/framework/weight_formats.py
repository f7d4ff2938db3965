"""The formats of the weights of modules: a default, and overrides by module path."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from ..formats.section import Section
from ..formats.weight_format import WeightFormat

Method = Literal["nearest", "gptq", "awq"]
"""The method that chooses a weight's integers. ``nearest`` rounds each number by itself; ``gptq`` and ``awq`` minimise
the change of a layer's results on calibration tokens.
"""


def chooses(method: Method, weight_format: WeightFormat) -> bool:
    """Returns True if the method can choose the integers of this format: GPTQ below 8 bits, AWQ for int4."""
    if method == "gptq":
        return weight_format.stored.integers and weight_format.stored.bits < 8
    return method == "awq" and weight_format.storage == "int4"


Sparsify = Literal["magnitude", "wanda", "sparsegpt"]
"""The method by which a sparse format chooses two of every four weights, in
``passes/sparsity/select_sparsity_mask.py``.
"""


class GptqOptions(Section):
    """The options of GPTQ.

    Attributes:
        damping: the number that is added to the Hessian's diagonal, as a share of the diagonal's mean. The paper uses
            0.01; benchmarks/notes/quantization.md compares the errors on held-out tokens.
        activation_order: True rounds the columns in the order of their inputs' size, the largest first; False in the
            order of the weight.
    """

    damping: float = Field(default=0.1, gt=0, le=10, allow_inf_nan=False)
    activation_order: StrictBool = True


class FormatOverride(Section):
    """A format for modules whose path matches ``layers``, a shell pattern such as ``*.mlp.down_proj``."""

    layers: str = Field(min_length=1)
    format: WeightFormat


class WeightFormats(Section):
    """[weights] of a recipe. The first override that matches a module's path applies, otherwise the default.

    Attributes:
        default: the format of weights without an override.
        embeddings: the default of token tables and of the linear that computes logits; None uses ``default``.
        overrides: formats for some modules.
        keep_blocks: True keeps a source weight in blocks of a supported format bit for bit, unless an override names
            its module.
        method: how integers are chosen. Formats that the method doesn't support (``chooses``) are rounded to the
            nearest.
        gptq: options of the method "gptq"; None for their defaults.
        sparsify: the method that chooses the weights that remain in formats of sparsity 2:4; None for the default.
        smooth: True scales down the channels of activations with the largest values, and scales up the weights that
            read them, so that rounding activations causes less error.
        rotate: True rotates the values of attention, for the same reason.
    """

    default: WeightFormat = WeightFormat()
    overrides: tuple[FormatOverride, ...] = ()
    embeddings: WeightFormat | None = None
    keep_blocks: StrictBool = False
    method: Method = "nearest"
    gptq: GptqOptions | None = None
    sparsify: Sparsify | None = None
    smooth: StrictBool = False
    rotate: StrictBool = False

    @field_validator("embeddings")
    @classmethod
    def _tables_are_dense(cls, value: WeightFormat | None) -> WeightFormat | None:
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

    @model_validator(mode="after")
    def _blocks_are_rounded(self) -> Self:
        if self.method == "awq" and any(f.scale_block and chooses("awq", f) for f in self.formats):
            raise ValueError('scale_block can\'t go with method = "awq", whose groups each have a range of their own')
        return self

    @model_validator(mode="after")
    def _weights_change_or_stay(self) -> Self:
        for name, enabled, does in (("smooth", self.smooth, "scales"), ("rotate", self.rotate, "rotates")):
            if enabled and self.keep_blocks:
                raise ValueError(f"keep_blocks keeps a file's integers, and {name} {does} weights: leave one out")
        return self

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """All formats in this section."""
        return (self.default, *(o.format for o in self.overrides), *([self.embeddings] if self.embeddings else []))

    @property
    def exact(self) -> bool:
        """True if all weights and activations are 32-bit floats, and no weight is sparse."""
        return not self.keep_blocks and all((f.storage, f.sparsity) == ("f32", "dense") for f in self.formats)

    def override_of(self, path: str) -> FormatOverride | None:
        """Returns the override for the module at ``path``; None if there is none."""
        return next((o for o in self.overrides if fnmatchcase(path, o.layers)), None)
