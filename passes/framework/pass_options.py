"""The part of a recipe that passes read: a pass has all of it in ``PassContext.recipe``."""

from __future__ import annotations

from typing import Literal

from enginewright.runtime.shared.kv_formats import CACHES, CacheDtype

from ..formats.section import Section
from .kv_options import CacheOptions, ContextOptions, KvOptions
from .pruning import Pruning
from .weight_formats import WeightFormats


class OffsetOptions(Section):
    """The part of [engines] that passes read.

    Attributes:
        offsets: the treatment of int4 with an offset for each group: "keep" computes with them, "requantize" makes
            other integers of the weight, without offsets; "refuse" is an error.
    """

    offsets: Literal["keep", "requantize", "refuse"] = "keep"


class PassOptions(Section):
    """The options of a recipe that passes read. ``Recipe`` adds the options that only an export reads.

    A new option is a field of its section's class, or a new section here. A pass reads it in ``context.recipe.name``.

    Attributes:
        name: the recipe's name, for errors.
        weights: the formats of weights, and the methods that choose numbers.
        kv_cache: the storage of keys and values.
        attention: the numbers of key/value heads that attentions are to have; None keeps the model's.
        adaptive_context: the part of a long context that layers read; None for all of it.
        prune: the channels, heads and layers to remove; None removes nothing.
        engines: options of targets that build engines; None for their defaults.
    """

    name: str = ""
    weights: WeightFormats = WeightFormats()
    kv_cache: CacheOptions = CacheOptions()
    attention: KvOptions | None = None
    adaptive_context: ContextOptions | None = None
    prune: Pruning | None = None
    engines: OffsetOptions | None = None

    @property
    def cache(self) -> CacheDtype:
        """The storage type of keys and values on targets with such caches: 32-bit floats if no format is named."""
        return "f32" if self.kv_cache.dtype is None else CACHES[self.kv_cache.dtype]
