"""The section [attention]: how many key/value heads, given or searched for."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from enginewright.passes.framework.kv_options import KvGrouping, KvHeadsOverride, KvMethod, KvOptions

from .sections import Section


class KvHeadsOverrideSection(Section):
    """A number of heads for the attentions whose path ``layers`` matches (shell pattern, e.g. ``model.layers.3.*``)."""

    layers: str = Field(min_length=1)
    kv_heads: int = Field(ge=1)


class AttentionSection(Section):
    """Key/value heads, fewer than the model has: a number for all attentions and others by ``overrides``, or a budget.

    ``max_kl``: as few as cost no more, in nats a token. ``max_cache_bytes_per_token``: what costs least of all that
    takes no more, over all layers. ``method`` and ``grouping``: how heads become fewer. ``tokens``: most that a layer's
    numbers are measured with, in a search; fewer are taken of large models.
    """

    kv_heads: int | None = Field(default=None, ge=1)
    overrides: tuple[KvHeadsOverrideSection, ...] = ()
    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_cache_bytes_per_token: int | None = Field(default=None, gt=0)
    method: KvMethod = "calibrated"
    grouping: KvGrouping = "similar"
    tokens: int = Field(default=256, ge=16)

    @property
    def searched(self) -> bool:
        """Whether a budget decides."""
        return self.max_kl is not None or self.max_cache_bytes_per_token is not None

    @property
    def calibrated(self) -> bool:
        """Whether calibration tokens are looked at."""
        return self.searched or self.method == "calibrated" or self.grouping == "similar"

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        given = self.kv_heads is not None or bool(self.overrides)
        if given and self.searched:
            raise ValueError("kv_heads says what max_kl or max_cache_bytes_per_token would look for: give one of them")
        if not given and not self.searched:
            raise ValueError("it needs kv_heads, or a budget: max_kl or max_cache_bytes_per_token")
        return self

    def to_options(self, recipe: str) -> KvOptions:
        """The same as passes take it. ``recipe``: its name, for errors."""
        overrides = tuple(KvHeadsOverride(o.layers, o.kv_heads) for o in self.overrides)
        return KvOptions(self.kv_heads, overrides, self.method, self.grouping, recipe)
