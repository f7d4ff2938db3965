"""The options of a recipe that passes use, as ``PassContext.recipe``."""

from __future__ import annotations

from typing import Literal

from enginewright.runtime.shared.kv_formats import CACHES, CacheDtype

from ..formats.section import Section
from .kv_options import CacheOptions, ContextOptions, KvOptions
from .pruning import Pruning
from .weight_formats import WeightFormats


class OffsetOptions(Section):
    """The options in [engines] that passes use.

    Attributes:
        offsets: how to treat int4 weights with an offset for each group. "keep" computes with them, "requantize" rounds
            the weight to integers without offsets, "refuse" is an error.
    """

    offsets: Literal["keep", "requantize", "refuse"] = "keep"


class PassOptions(Section):
    """The options of a recipe that passes use. ``Recipe`` adds the options that only an export uses.

    A new option is a field of its section's class, or a new section here. A pass reads it as ``context.recipe.name``.

    Attributes:
        name: the recipe's name, for errors.
        weights: the formats of weights, and the methods that choose integers.
        kv_cache: the format of keys and values.
        attention: the numbers of key/value heads; None keeps the model's.
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
        """The format of keys and values on targets with paged caches; 32-bit floats if the recipe has none.

        Layers may have others (``cache_of``).
        """
        return self.kv_cache.default or "f32"

    @property
    def caches(self) -> tuple[CacheDtype, ...]:
        """Every format that layers have, or may get by a search."""
        return (self.cache, *(CACHES[name] for name in self.kv_cache.named.values()))

    def cache_of(self, path: str) -> CacheDtype:
        """Returns the format of the keys and values of the attention at ``path``."""
        return self.kv_cache.override_of(path) or self.cache
